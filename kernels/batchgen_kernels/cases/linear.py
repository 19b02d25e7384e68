"""Cases of linear layers: quantised weights, and the batch-invariant one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor
from batchgen_kernels.linear import quantize_fp8, quantize_int4, quantize_int8


def linear_case(
    op: str,
    num_tokens: int,
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    device: str = "cpu",
    bias: bool = False,
    group_size: int = 128,
    whole_zeros: bool = True,
) -> Case:
    """x is a view inside a wider tensor, with NaN around it. whole_zeros=False: int4 as other quantisers make it."""

    def make() -> tuple[Any, ...]:
        wide = torch.full((num_tokens + 2, num_in + 16), float("nan"), dtype=dtype, device=device)
        x = wide[1:-1, 16:]
        x.copy_(random_tensor((num_tokens, num_in), dtype, 0, device))
        weight = random_tensor((num_out, num_in), torch.float32, 1, device) * num_in**-0.5
        channels = random_tensor((num_out,), dtype, 2, device) if bias else None
        if op == "linear_invariant":
            return x, weight.to(dtype), channels
        if op == "linear_int4":
            packed, scale, zero = quantize_int4(weight, group_size)
            return x, packed, scale, zero if whole_zeros else zero + 0.3, channels
        quantize = {"linear_int8": quantize_int8, "linear_fp8": quantize_fp8}[op]
        return x, *quantize(weight), channels

    groups = f", groups of {group_size}" if op == "linear_int4" else ""
    return Case(
        f"[{num_tokens}, {num_in}] x [{num_out}, {num_in}]{groups}{', bias' if bias else ''}",
        make,
        lambda op, args: [op(*args)],
    )


def _cases(op: str, dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield linear_case(op, 3, 130, 77, dtype, device, bias=True)
    yield linear_case(op, 1, 64, 32, dtype, device)
    yield linear_case(op, 17, 75, 1, dtype, device)
    yield linear_case(op, 35, 40, 70, dtype, device)
    yield linear_case(op, 150, 40, 5, dtype, device)  # more tokens than the largest tile


def linear_invariant_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield from _cases("linear_invariant", dtype, device)


def linear_int8_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield from _cases("linear_int8", dtype, device)


def linear_fp8_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield from _cases("linear_fp8", dtype, device)


def linear_int4_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield linear_case("linear_int4", 3, 256, 77, dtype, device, bias=True)
    yield linear_case("linear_int4", 17, 96, 33, dtype, device, group_size=32)
    yield linear_case("linear_int4", 1, 192, 32, dtype, device, group_size=64)
    # other zeros only where code minus zero is not rounded by more than the result
    yield linear_case("linear_int4", 150, 64, 5, dtype, device, group_size=64, whole_zeros=dtype != torch.float32)
