"""`python -m batchgen.bench.gpu_check`: what has to be seen on a GPU once, because no test without one can show it.

Right first, then fast: every kernel against its reference, an engine on Triton against the same on the reference kernels,
then times as shares of what the device can copy and multiply. Needs torch, triton, numpy and xxhash, no model and no data.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

GRACE = 20  # seconds that a stage may be late, a compilation or a run in progress


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.self_test:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
        options.device = "cpu"
    if reason := cannot_run(options):
        print(
            f"gpu-check: {reason}, so nothing ran. On a machine with a GPU it checks every Triton kernel against its "
            "reference in each dtype, compares the engine's tokens with those of the reference kernels, and times the "
            "kernels and a random model of 1.2 B parameters, in at most 8 minutes. Run `make gpu-check` there: with a "
            "python3 that has torch, triton, numpy and xxhash it installs nothing; "
            "`python -m batchgen.bench.gpu_check --self-test` tries the checks themselves here."
        )
        return 0
    from batchgen.bench import gpu_stages

    stages = gpu_stages.self_test_stages() if options.self_test else gpu_stages.stages(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "gpu-check.json"
    result: dict[str, Any] = {"benchmark": "batchgen.bench.gpu_check", "self_test": options.self_test, "failed": []}
    began = time.perf_counter()
    end = began + 60 * options.minutes
    signal.signal(signal.SIGALRM, _out_of_time)
    for name, seconds, stage in stages:
        begin = time.perf_counter()
        if begin >= end:
            result.setdefault("skipped", []).append(name)
            print(f"{name}: skipped, {options.minutes:g} minutes are over", flush=True)
            continue
        print(f"{name}:", flush=True)
        until = min(begin + seconds, end)
        signal.setitimer(signal.ITIMER_REAL, until + GRACE - begin)  # for one that hangs
        try:
            figures, problems = stage(until)
        except Exception as e:  # one stage that breaks, compilers and drivers included, must not hide the others
            traceback.print_exc()
            figures, problems = {}, [f"{type(e).__name__}: {e}"]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        result[name] = {**figures, "seconds": time.perf_counter() - begin}
        result["failed"] += [f"{name}: {problem}" for problem in problems]
        for problem in problems:
            print(f"  WRONG: {problem}")
        result["seconds"] = time.perf_counter() - began
        file.write_text(json.dumps(result, indent=1))  # what is known so far outlives a crash of the driver
    verdict = f"{len(result['failed'])} checks failed" if result["failed"] else "all checks passed"
    if result.get("skipped"):
        verdict += f", {len(result['skipped'])} stages were skipped"
    print(f"gpu-check: {verdict} in {time.perf_counter() - began:.0f} s; everything is in {file}")
    print(json.dumps(result))
    return 1 if result["failed"] else 0


class OutOfTimeError(Exception):
    """A stage did not end by itself."""


def _out_of_time(*_: Any) -> None:
    raise OutOfTimeError(f"did not end {GRACE} s after its time")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m batchgen.bench.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--self-test", action="store_true", help="a small part of it, in Triton's interpreter on the CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for gpu-check.json")
    parser.add_argument("--minutes", type=float, default=7.3, help="begin no further stage after so long")
    return parser.parse_args(arguments)


def cannot_run(options: argparse.Namespace) -> str | None:
    """Why the checks cannot run here, or None."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not options.self_test and options.device == "cpu":
        return "--device cpu is no GPU"
    if not options.self_test and not torch.cuda.is_available():
        return "torch sees no GPU here"
    return None


if __name__ == "__main__":
    sys.exit(main())
