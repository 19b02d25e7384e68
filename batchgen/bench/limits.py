"""What a workload takes at least here: its matrix products at the rate of the model's own; runs compared with that."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from batchgen.bench.physics import JobFlops, LinearSeconds, StaticCost, job_flops, static_cost
from batchgen.bench.systems import Run, SystemProcess
from batchgen.bench.workloads import Workload


class Limits:
    """The static cost of the model and the measured rate of its matrix products."""

    def __init__(self, cost: StaticCost, config: Any, linears: LinearSeconds, min_rows: int) -> None:
        self.cost, self.config, self.linears, self.min_rows = cost, config, linears, min_rows

    def flops(self, workload: Workload) -> JobFlops:
        window = workload.window()
        return job_flops(self.cost, self.config, window, np.full(len(window), workload.max_tokens))

    def seconds(self, steps: list[list[int]], min_rows: int = 1) -> float:
        """The matrix products of those steps ([tokens, sampled, how often]) alone, padded to `min_rows`."""
        padded = [(max(n, min_rows), max(k, min_rows) if k else 0, times) for n, k, times in steps]
        return sum(self.linears.of(n, k) * times for n, k, times in padded)


def measure_limits(batchgen: SystemProcess, model: str, result: dict[str, Any]) -> Limits:
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


def explain(workload: Workload, run: Run, limits: Limits) -> dict[str, Any]:
    """batchgen's time against the matrix products of its own steps, and where the rest went."""
    flops, alone = limits.flops(workload), limits.seconds(run.facts["steps"], limits.min_rows)
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
