"""`python -m batchgen.bench`: batchgen against transformers on this CPU, float32, the same tokens in and out.

First what the machine and the model allow, then that all agree, then the times. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.bench.peers import ContinuousBatchingSystem, GenerateSystem
from batchgen.bench.physics import JobFlops, LinearSeconds, StaticCost, job_flops, static_cost
from batchgen.bench.systems import BatchgenSystem, Run, SystemFailed, SystemProcess, first_difference
from batchgen.bench.workloads import JOBS, RECIPES, Workload, load_workload
from batchgen.errors import BatchgenError, UsageError

SYSTEMS: dict[str, tuple[str, Callable[[str, int], Any]]] = {
    "batchgen": ("batchgen", BatchgenSystem),
    "generate": ("transformers generate", GenerateSystem),
    "continuous": ("transformers continuous batching", ContinuousBatchingSystem),
}
GUARD_ROWS, GUARD_TOKENS = 3, 6
NEAR_TIE = 1e-3  # difference of logits: rounding of float32 sums over some hundred terms decides
MAX_TIES_LOOKED_AT = 6
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
    processes: dict[str, SystemProcess] = {}
    try:
        # The oracle is always there; each system waits in its own process while another one runs
        for name in dict.fromkeys(["generate", *options.systems]):
            processes[name] = SystemProcess(SYSTEMS[name][1], options.model, threads)
        linears = None
        if "batchgen" in processes:
            linears = physics(processes["batchgen"], options.model, result)
        for workload in workloads:
            result["workloads"][workload.name] = measure(workload, processes, options, linears)
    except (BatchgenError, SystemFailed) as e:
        print(f"stopped: {e}", file=sys.stderr)
        return 1
    finally:
        for process in processes.values():
            process.close()
    result["load_before"], result["seconds"] = load, time.perf_counter() - began
    line = json.dumps(result, allow_nan=False)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m batchgen.bench", description="batchgen against transformers on this CPU: same tokens in, same number out"
    )
    names = lambda known: lambda text: [n if n in known else _unknown(n, known) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--workloads", type=names(RECIPES), default=list(RECIPES), help=",".join(RECIPES))
    parser.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--quick", action="store_true", help="smaller workloads: about 4 minutes instead of 15")
    parser.add_argument("--rows", type=int, help="rows of each workload, instead of its own number")
    parser.add_argument("--max-tokens", type=int, help="tokens that each row gets, instead of the workload's own number")
    parser.add_argument("--repeats", type=int, default=1, help="measure so often, systems in turn; the median counts")
    parser.add_argument("--threads", type=int, help="of each system; default: the cores this process may use")
    parser.add_argument("--profile", action="store_true", help="run batchgen once more and time the parts of a step")
    parser.add_argument("--model", default="packaged:smollm2", help="folder, hub id, .gguf file or packaged:smollm2")
    parser.add_argument("--jobs", type=Path, default=JOBS, help="folder of demo.yaml and eval.yaml")
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


# ---- what is possible -----------------------------------------------------------------------------------------------


class Limits:
    """The static cost of the model and the measured rate of its matrix products."""

    def __init__(self, cost: StaticCost, config: Any, linears: LinearSeconds, min_rows: int) -> None:
        self.cost, self.config, self.linears, self.min_rows = cost, config, linears, min_rows

    def flops(self, workload: Workload, run: Run) -> JobFlops:
        window = workload.window()
        return job_flops(self.cost, self.config, window, np.array([len(run.tokens[i]) for i in window.index]))

    def seconds(self, steps: list[list[int]]) -> float:
        """The matrix products of those steps ([tokens, sampled, how often]) alone, padding included."""
        padded = [(max(n, self.min_rows), max(k, self.min_rows) if k else 0, times) for n, k, times in steps]
        return sum(self.linears.of(n, k) * times for n, k, times in padded)


def physics(batchgen: SystemProcess, model: str, result: dict[str, Any]) -> Limits:
    """Print the static cost, then the rate of the model's matrix products here."""
    import torch

    from batchgen.models.loader import load_config, resolve_model

    config = load_config(resolve_model(model, with_weights=False))
    cost = static_cost(config, torch.float32)
    print(
        f"model   {(cost.layer_parameters + cost.head_parameters) / 1e6:.1f} M matrix parameters = "
        f"{cost.weight_bytes / 2**20:.0f} MiB; {cost.flops_per_token / 1e9:.3f} GFLOP a token, "
        f"{cost.flops_per_sampled_token / 1e9:.3f} more where one is sampled; KV {cost.kv_bytes_per_token:,} bytes a token"
    )
    linears: LinearSeconds = batchgen.call("linear_seconds", 512)
    min_rows: int = batchgen.call("min_rows")
    rates = linears.gflops(cost)
    print("matrix products of the model alone, here and now (the best of some passes through all layers):")
    print("  rows     " + "".join(f"{n:>8}" for n in linears.rows))
    print("  GFLOP/s  " + "".join(f"{r:>8.1f}" for r in rates))
    print("  tokens/s " + "".join(f"{n / s:>8.0f}" for n, s in zip(linears.rows, linears.layers)))
    bandwidth = cost.weight_bytes / (linears.layers[0] + linears.head[0]) / 1e9
    print(f"  at one row the weights are read at {bandwidth:.1f} GB/s; batchgen pads a step to {min_rows} rows", flush=True)
    result["physics"] = {
        **cost._asdict(),
        "rows": linears.rows,
        "layers_seconds": linears.layers,
        "head_seconds": linears.head,
        "gflops": rates,
        "min_rows": min_rows,
    }
    return Limits(cost, config, linears, min_rows)


# ---- one workload ---------------------------------------------------------------------------------------------------


def measure(
    workload: Workload, processes: dict[str, SystemProcess], options: argparse.Namespace, limits: Limits | None
) -> dict[str, Any]:
    window = workload.window()
    total, computed = workload.num_prompt_tokens, window.num_computed()
    up_to = "up to " if workload.end_token_ids else ""
    print(
        f"\n{workload.name}: {workload.about}\n"
        f"  {len(window)} rows, {total:,} prompt tokens ({window.lengths.min()} to {window.lengths.max()} a row), "
        f"{up_to}{workload.max_tokens} out each; the plan computes {computed:,} ({1 - computed / total:.1%} less)",
        flush=True,
    )
    facts: dict[str, Any] = {
        "rows": len(window),
        "prompt_tokens": total,
        "max_tokens": workload.max_tokens,
        "planned_prefill": computed,
    }
    systems: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name in options.systems:
        systems[name] = prepare(name, workload, processes)
    for _ in range(options.repeats):
        for name in options.systems:
            if "error" in systems[name]:
                continue
            try:
                run: Run = processes[name].call("run", workload)
            except SystemFailed as e:
                if name == "batchgen":
                    raise
                systems[name]["error"] = str(e)
                continue
            if not all(workload.is_whole(tokens) for tokens in run.tokens):
                systems[name]["error"] = f"not every row got {workload.max_tokens} tokens or an end token"
                continue
            systems[name].setdefault("all_seconds", []).append(run.seconds)
            runs[name] = run
            print(f"  {SYSTEMS[name][0]}: {run.seconds:.1f} s", flush=True)
    for name, run in runs.items():
        seconds = float(np.median(systems[name]["all_seconds"]))
        systems[name] |= {
            "seconds": seconds,
            "prompt_tokens_per_second": total / seconds,
            "output_tokens": sum(map(len, run.tokens)),
            "output_tokens_per_second": sum(map(len, run.tokens)) / seconds,
            "prefill_computed": run.num_prefill,
            **run.facts,
        }
    ours = systems.get("batchgen", {}).get("seconds")
    for name, run in runs.items():
        systems[name]["times_batchgen"] = systems[name]["seconds"] / ours if ours else None
        if name != "batchgen" and "batchgen" in runs:
            systems[name]["agreement"] = agreement(workload, runs["batchgen"], run, processes["generate"])
    print_table(systems)
    facts["systems"] = systems
    if "batchgen" in runs and limits is not None:
        facts["limits"] = explain(workload, runs["batchgen"], limits)
        if options.profile:
            facts["profile"] = show_profile(processes["batchgen"].call("profile", workload))
    return facts


def prepare(name: str, workload: Workload, processes: dict[str, SystemProcess]) -> dict[str, Any]:
    """Warm up on a few rows, whose tokens must be the oracle's; then let the system choose its sizes.

    A peer that cannot is left out with its reason; if it is batchgen, nothing is measured.
    """
    few = replace(
        workload, prompts=workload.prompts[:GUARD_ROWS], row_keys=workload.row_keys[:GUARD_ROWS], max_tokens=GUARD_TOKENS
    )
    oracle = processes["generate"]
    try:
        run: Run = processes[name].call("run", few)
        expected = Run(0.0, oracle.call("one_by_one", few), 0)
        agreed = agreement(few, run, expected, oracle)
        if agreed["differ"] > agreed["near_ties"]:
            raise SystemFailed(f"{SYSTEMS[name][0]} gives other tokens than one prompt at a time: {agreed}")
        choice = processes[name].call("calibrate", workload)
    except SystemFailed as e:
        if name == "batchgen":
            raise
        print(f"  {SYSTEMS[name][0]}: {e}", flush=True)
        return {"error": str(e)}
    print(f"  {SYSTEMS[name][0]}: first tokens right; {choice}", flush=True)
    return {"choice": choice}


def agreement(workload: Workload, a: Run, b: Run, oracle: SystemProcess) -> dict[str, Any]:
    """How many rows have the same tokens, and of some that differ whether rounding decided (a near tie of logits)."""
    differences = [
        (row, at) for row, pair in enumerate(zip(a.tokens, b.tokens)) if (at := first_difference(*pair)) is not None
    ]
    gaps = []
    for row, at in differences[:MAX_TIES_LOOKED_AT]:
        ids = np.concatenate([workload.prompts[row], np.array(a.tokens[row][:at], np.int32)])
        gaps.append(oracle.call("logit_gap", ids, a.tokens[row][at], b.tokens[row][at]))
    return {
        "identical": 1 - len(differences) / len(workload.prompts),
        "differ": len(differences),
        "looked_at": len(gaps),
        "near_ties": sum(gap < NEAR_TIE for gap in gaps),
        "largest_gap": max(gaps, default=None),
    }


# ---- reporting ------------------------------------------------------------------------------------------------------


def print_table(systems: dict[str, dict[str, Any]]) -> None:
    print(f"  {'':34}{'wall s':>8}{'ratio':>8}{'prompt/s':>10}{'output/s':>10}{'prefilled':>11}  same tokens")
    for name, facts in systems.items():
        label = f"  {SYSTEMS[name][0]:34}"
        if "seconds" not in facts:
            print(f"{label}did not run: {facts['error']}")
            continue
        ratio = f"{facts['times_batchgen']:.2f}x" if facts["times_batchgen"] else ""
        agreed, told = facts.get("agreement"), ""
        if agreed:
            told = f"{agreed['identical']:.1%}"
            if agreed["differ"]:
                told += f"; of {agreed['looked_at']} that differ, {agreed['near_ties']} at a near tie"
        print(
            f"{label}{facts['seconds']:>8.1f}{ratio:>8}{facts['prompt_tokens_per_second']:>10,.0f}"
            f"{facts['output_tokens_per_second']:>10,.1f}{facts['prefill_computed']:>11,}  {told}"
        )
    sys.stdout.flush()


def explain(workload: Workload, run: Run, limits: Limits) -> dict[str, Any]:
    """batchgen's time against the matrix products of its own steps, and where the rest went."""
    flops, alone = limits.flops(workload, run), limits.seconds(run.facts["steps"])
    best = max(limits.linears.gflops(limits.cost))
    print(
        f"  work:  {flops.linear / 1e12:.2f} TFLOP in matrix products, {flops.linear_without_sharing / 1e12:.2f} without "
        f"sharing; {flops.attention / 1e12:.2f} in attention; {run.facts['num_steps']} steps of up to "
        f"{run.facts['max_running']} rows; each KV token read serves {run.facts['kv_read_factor']:.1f} rows"
    )
    print(
        f"  limit: the matrix products alone would need {alone:.1f} s at the measured rate of these steps: "
        f"{alone / run.seconds:.0%} of the time ({flops.linear / best / 1e9:.1f} s at the best rate, {best:.0f} GFLOP/s)"
    )
    stages = {**run.facts["stage_seconds"]}
    stages["matrix products"] = alone
    stages["rest of forward"] = stages.pop("forward") - alone
    shares = sorted(stages.items(), key=lambda item: -item[1])
    print("  time:  " + ", ".join(f"{name} {s:.2f} s ({s / run.seconds:.1%})" for name, s in shares), flush=True)
    return {
        **flops._asdict(),
        "matrix_products_seconds": alone,
        "matrix_products_share": alone / run.seconds,
        "best_gflops": best,
    }


def show_profile(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    print(f"  profile of a second run, {total:.1f} s:")
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"    {name:18}{seconds:>9.2f} s {seconds / total:>7.1%}")
    sys.stdout.flush()
    return parts


if __name__ == "__main__":
    sys.exit(main())
