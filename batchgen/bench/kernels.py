"""`python -m batchgen.bench.kernels`: every Triton kernel on a GPU, right first, then as shares of what the GPU can do.

Medians over calls on cold caches, in GB/s and TFLOP/s and as a share of a copy and of a large matrix product that are
timed in the same run; beside them what torch takes, and FlashAttention and FlashInfer where they are installed. The last
line of stdout is one JSON object. Without a GPU it says so and stops.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchgen.bench.kernel_table import Row, Work, ops_without_rows, rows

FLUSH_BYTES = 2**29  # several times any cache; writing them also hides the launch of what is timed
REPEATS = 30
ROW_SECONDS = 3.0  # of timing one call, at most


class Ceilings(NamedTuple):
    """What the device does when it does nothing else."""

    copy: float  # bytes/s, read and written
    gemm: float  # FLOP/s of a bfloat16 product


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := no_gpu():
        print(
            f"bench-kernels: {reason}, so nothing was timed. On a machine with a GPU `make bench-kernels` checks and times "
            "each Triton kernel; `make predict-kernels` prints what bytes, FLOPs and occupancy let one expect."
        )
        return 0
    table, missing = rows(options.short)
    table = [row for row in table if not options.kernels or row.kernel in options.kernels]
    result = {"benchmark": "batchgen.bench.kernels", **machine(options.device)}
    print(", ".join(f"{k} {v}" for k, v in result.items()), flush=True)
    figures, problems = time_rows(table, missing, options.device)
    line = json.dumps(result | figures | {"failed": problems}, allow_nan=False)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    return 1 if problems else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m batchgen.bench.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--short", action="store_true", help="the few rows of make gpu-check")
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="only these, by the names of the table")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    return parser.parse_args(arguments)


def no_gpu() -> str | None:
    """Why no kernel can be timed here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.is_available() else "torch sees no GPU here"


def machine(device: str) -> dict[str, Any]:
    """What a figure must be given with."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    for package in ("triton", "flash-attn", "flashinfer-python"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return facts


def time_rows(
    table: list[Row], missing: list[str], device: str, until: float = float("inf")
) -> tuple[dict[str, Any], list[str]]:
    """Check and time each row, printing as it goes -> (figures for JSON, what is wrong).

    missing: kernels that are not there, to be named. until: begin no row after this time.perf_counter().
    """
    ceilings = measured_ceilings(device)
    print(f"  ceilings: a copy {ceilings.copy / 1e9:,.0f} GB/s, a large bfloat16 product {ceilings.gemm / 1e12:.0f} TFLOP/s")
    print(
        f"  {'kernel':18}{'shape':32}{'us':>9}{'GB/s':>7}{'of copy':>8}{'TFLOP/s':>8}{'of gemm':>8}  others, us (times ours)"
    )
    measured, problems, left_out = [], [], []
    for row in table:
        if time.perf_counter() > until:
            left_out.append(f"{row.kernel} {row.shape}")
            continue
        try:
            figures = time_row(row, ceilings, device)
        except Exception as e:  # a row that breaks must not hide the others
            traceback.print_exc()
            figures = {"kernel": row.kernel, "shape": row.shape, "wrong": f"{type(e).__name__}: {e}"}
        measured.append(figures)
        if "wrong" in figures:
            problems.append(f"{row.kernel} {row.shape}: {figures['wrong']}")
        print(line_of(figures), flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()
    if missing:
        print(f"  not in this package: {', '.join(missing)}")
    if without := ops_without_rows():
        print(f"  without a row: {', '.join(without)}")
    if left_out:
        print(f"  no time left for: {'; '.join(left_out)}")
    return {
        "copy_gb_per_second": ceilings.copy / 1e9,
        "gemm_tflops": ceilings.gemm / 1e12,
        "rows": measured,
        "missing": missing,
        "left_out": left_out,
    }, problems


def time_row(row: Row, ceilings: Ceilings, device: str) -> dict[str, Any]:
    """One row: its error first; a wrong result is not timed."""
    from batchgen_kernels.cases.case import relative_error

    work = row.make(device)
    error = max(relative_error(*pair) for pair in zip(work.outputs(), work.expected(), strict=True))
    figures: dict[str, Any] = {"kernel": row.kernel, "shape": row.shape}
    if not error <= work.allowed:
        return figures | {"wrong": f"error {error:.1e}, {work.allowed:.1e} is allowed"}
    seconds = median_seconds(work.run, device)
    figures |= {
        "error": error,
        "microseconds": 1e6 * seconds,
        "gb_per_second": row.bytes / seconds / 1e9,
        "copy_share": row.bytes / seconds / ceilings.copy,
        "tflops": row.flops / seconds / 1e12,
        "gemm_share": row.flops / seconds / ceilings.gemm,
        "others": peer_times(work, device),
    }
    return figures


def peer_times(work: Work, device: str) -> dict[str, Any]:
    """Microseconds of each peer; the reason in words where one cannot."""
    times: dict[str, Any] = {}
    for name, call in work.peers.items():
        try:
            times[name] = 1e6 * median_seconds(call, device)
        except Exception as e:
            times[name] = f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"
    return times


def line_of(f: dict[str, Any]) -> str:
    start = f"  {f['kernel']:18}{f['shape']:32}"
    if "wrong" in f:
        return f"{start}  WRONG: {f['wrong']}"
    others = ", ".join(
        f"{name} {t}" if isinstance(t, str) else f"{name} {t:.0f} ({t / f['microseconds']:.2f}x)"
        for name, t in f["others"].items()
    )
    flops = f"{f['tflops']:>8.0f}{f['gemm_share']:>8.0%}" if f["tflops"] else f"{'-':>8}{'-':>8}"
    return f"{start}{f['microseconds']:>9.1f}{f['gb_per_second']:>7,.0f}{f['copy_share']:>8.0%}{flops}  {others}"


# ---- the clock ---------------------------------------------------------------------------------------------------------


@functools.cache
def _flush(device: str) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES if device != "cpu" else 1, dtype=torch.uint8, device=device)


def median_seconds(call: Callable[[], Any], device: str, repeats: int = REPEATS) -> float:
    """Median time of one call on caches that hold nothing of it. Allocations inside the call come from torch's pool."""
    for _ in range(3):
        call()
    if device == "cpu":
        return statistics.median(_cpu_seconds(call) for _ in range(3))
    times: list[float] = []
    flush, begin = _flush(device), time.perf_counter()
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - begin < ROW_SECONDS):
        flush.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def _cpu_seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@functools.cache
def measured_ceilings(device: str) -> Ceilings:
    """By the same clock as everything else: a copy of 1 GiB, and a bfloat16 product of random matrices."""
    size, num_bytes = (8192, 2**30) if device != "cpu" else (128, 2**16)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ceilings(
        2 * num_bytes / median_seconds(lambda: target.copy_(source), device),
        2 * size**3 / median_seconds(lambda: a @ a, device),
    )


if __name__ == "__main__":
    sys.exit(main())
