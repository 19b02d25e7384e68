"""What the device allows: its rates, measured here and now, and the time that a job's own work takes at them.

Work that the plan saved is counted too: the same job with every prompt token computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchgen.models.config import ModelConfig, kv_bytes_per_token, num_matmul_parameters
from batchgen.plan.work import ModelShape, Work

MIN_SECONDS, MAX_SECONDS = 0.02, 1.0
CPU_SIZES = (512, 2048, 1024), 32 << 20  # of the product (m, k, n), and bytes of the copy
GPU_SIZES = (8192, 8192, 8192), 1 << 30


class Rates(NamedTuple):
    """What one matrix product and one copy reach on the device."""

    flops: float  # per second, in the model's dtype
    bandwidth: float  # bytes per second, read and written


def model_shape(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> ModelShape:
    layers = num_matmul_parameters(config, lm_head=False)
    return ModelShape(
        layers, num_matmul_parameters(config) - layers, config.num_layers, config.num_heads, config.head_dim,
        dtype.itemsize, kv_bytes_per_token(config, kv_dtype),
    )  # fmt: skip


@torch.inference_mode()
def calibrate(device: torch.device, dtype: torch.dtype, seconds: float) -> Rates:
    """Time a large matrix product and a large copy, for about `seconds` in all: the best of some."""
    (m, k, n), num_bytes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    a, b = torch.ones(m, k, device=device, dtype=dtype), torch.ones(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    each = min(max(seconds, MIN_SECONDS), MAX_SECONDS) / 2
    product = _fastest(lambda: torch.mm(a, b.T, out=out), device, each)
    copy = _fastest(lambda: target.copy_(source), device, each)
    return Rates(2.0 * m * k * n / product, 2.0 * num_bytes / copy)


def _fastest(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > end:
            return best


def roofline(work: Work, unshared: Work, m: ModelShape, rates: Rates, seconds: float) -> dict[str, float]:
    """The figures for a summary. unshared: the same job without a plan; seconds: what the work took."""
    compute, memory = work.flops(m) / rates.flops, work.bytes(m) / rates.bandwidth
    sequential = compute + memory
    return {
        "device_gflops": rates.flops / 1e9,
        "device_gb_per_second": rates.bandwidth / 1e9,
        "compute_seconds": compute,
        "memory_seconds": memory,
        "sequential_limit_seconds": sequential,
        "overlapped_limit_seconds": max(compute, memory),
        "share_of_sequential_limit": sequential / seconds,
        "share_of_overlapped_limit": max(compute, memory) / seconds,
        "unshared_limit_seconds": unshared.flops(m) / rates.flops + unshared.bytes(m) / rates.bandwidth,
    }


def roofline_line(r: dict[str, float]) -> str:
    saved = 1 - r["sequential_limit_seconds"] / r["unshared_limit_seconds"]
    return (
        f"limit     {r['sequential_limit_seconds']:,.1f} s at {r['device_gflops']:,.0f} GFLOP/s and "
        f"{r['device_gb_per_second']:,.0f} GB/s measured here ({r['compute_seconds']:,.1f} s computing, "
        f"{r['memory_seconds']:,.1f} s reading): {r['share_of_sequential_limit']:.0%} of it reached, "
        f"{r['share_of_overlapped_limit']:.0%} if both overlapped; the plan saved {saved:.0%} of that work"
    )
