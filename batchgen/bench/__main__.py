"""`python -m batchgen.bench`: batchgen against its peers on this CPU, float32, the same tokens in and as many out.

First what the machine and the model allow; then, workload by workload, that all agree and how long each takes with ample
and with scarce KV memory; then a plot. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchgen.bench.limits import Limits, measure_limits
from batchgen.bench.measure import SYSTEMS, Bench
from batchgen.bench.systems import SystemFailed
from batchgen.bench.workloads import JOBS, RECIPES, load_workload
from batchgen.errors import BatchgenError, UsageError

BUSY = 0.5  # cores; threads that wait for each other suffer more from a busy core than its share


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    threads = options.threads or len(os.sched_getaffinity(0))
    try:
        workloads = [
            load_workload(name, options.model, options.rows, options.max_tokens, options.quick, options.jobs)
            for name in options.workloads
        ]
    except UsageError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    result: dict[str, Any] = {"benchmark": "batchgen.bench", **machine(threads), "model": options.model, "workloads": {}}
    print(f"{result['cpu']}, {threads} threads, " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()), flush=True)
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"note: {load:.1f} cores were busy with other work in the last minute; the times below will suffer from that")
    began = time.perf_counter()
    bench = Bench(options.model, threads, options.systems, workloads, options.peers, options.repeats)
    try:
        limits: Limits | None = None
        if "batchgen" in bench.processes:
            limits = measure_limits(bench.processes["batchgen"], options.model, result)
        for workload in workloads:
            result["workloads"][workload.name] = bench.measure(workload, limits, options.profile)
    except (BatchgenError, SystemFailed) as e:
        print(f"stopped: {e}", file=sys.stderr)
        return 1
    finally:
        bench.close()
    result["missing"], result["load_before"], result["seconds"] = bench.missing, load, time.perf_counter() - began
    if options.plot:
        result["plot"] = plot(result, options.plot)
    line = json.dumps(result, allow_nan=False)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    return 0


def plot(result: dict[str, Any], file: Path) -> str | None:
    try:
        from batchgen.bench.plot import draw
    except ImportError:
        print("no plot: matplotlib is not installed; pip install 'batchgen-offline[bench]' brings it")
        return None
    draw(result, file)
    print(f"\nplot: {file}")
    return str(file)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m batchgen.bench", description="batchgen against its peers on this CPU: same tokens in, same number out"
    )
    names = lambda known: lambda text: [n if n in known else _unknown(n, known) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--workloads", type=names(RECIPES), default=list(RECIPES), help=",".join(RECIPES))
    parser.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--quick", action="store_true", help="smaller workloads: about 4 minutes instead of 20")
    parser.add_argument("--rows", type=int, help="rows of each workload, instead of its own number")
    parser.add_argument("--max-tokens", type=int, help="tokens that each row gets, instead of the workload's own number")
    parser.add_argument("--repeats", type=int, default=1, help="measure so often, systems in turn; the median counts")
    parser.add_argument("--threads", type=int, help="of each system; default: the cores this process may use")
    parser.add_argument("--profile", action="store_true", help="run batchgen once more and time the parts of a step")
    parser.add_argument("--model", default="packaged:smollm2", help="folder, hub id, .gguf file or packaged:smollm2")
    parser.add_argument("--jobs", type=Path, default=JOBS, help="folder of demo.yaml and eval.yaml")
    parser.add_argument("--peers", type=Path, default=JOBS.parent / ".bench-peers", help="what `make bench-peers` made")
    parser.add_argument("--plot", type=Path, help="draw the times into this PNG file")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    return parser.parse_args(arguments)


def _unknown(name: str, known: Any) -> str:
    raise argparse.ArgumentTypeError(f"unknown {name!r}; there are {', '.join(known)}")


def machine(threads: int) -> dict[str, Any]:
    versions = {}
    for package in ("torch", "transformers", "accelerate", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "device": "cpu",
        "cpu": cpu_name(),
        "threads": threads,
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": versions,
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
