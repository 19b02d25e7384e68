"""Cases of the products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor


def expert_choices(num_tokens: int, num_choices: int, experts: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """[num_tokens, num_choices] int32, drawn from `experts`."""
    index = torch.randint(len(experts), (num_tokens, num_choices), generator=torch.Generator().manual_seed(3))
    return torch.tensor(experts, dtype=torch.int32)[index].to(device)


def grouped_linear_case(
    num_tokens: int,
    num_choices: int,
    num_experts: int,
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    device: str = "cpu",
    used: Sequence[int] = (),
    by_pair: bool = False,
    scaled: bool = False,
) -> Case:
    """x is a view inside a wider tensor, with NaN around it. used: the experts that get pairs; all, if none is named."""

    def make() -> tuple[Any, ...]:
        rows = num_tokens * (num_choices if by_pair else 1)
        wide = torch.full((rows + 2, num_in + 16), float("nan"), dtype=dtype, device=device)
        x = wide[1:-1, 16:]
        x.copy_(random_tensor((rows, num_in), dtype, 0, device))
        weight = (random_tensor((num_experts, num_out, num_in), torch.float32, 1, device) * num_in**-0.5).to(dtype)
        experts = expert_choices(num_tokens, num_choices, used or range(num_experts), device)
        scale = random_tensor((num_tokens, num_choices), torch.float32, 2, device) if scaled else None
        return x, weight, experts, scale

    label = f"{num_tokens} tokens x {num_choices} of {num_experts} experts [{num_out}, {num_in}]"
    return Case(f"{label}{' by pair' if by_pair else ''}", make, lambda op, args: [op(*args)])


def combine_experts_case(num_tokens: int, num_choices: int, num_out: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    def make() -> tuple[Any, ...]:
        return random_tensor((num_tokens * num_choices, num_out), dtype, 0, device), num_choices

    return Case(f"{num_tokens} tokens of {num_choices} x {num_out}", make, lambda op, args: [op(*args)])


def grouped_linear_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield grouped_linear_case(9, 2, 5, 75, 40, dtype, device, scaled=True)
    yield grouped_linear_case(1, 1, 3, 32, 33, dtype, device)
    yield grouped_linear_case(20, 2, 4, 64, 32, dtype, device, used=[2])  # all on one expert, more than a tile of them
    yield grouped_linear_case(5, 3, 6, 40, 20, dtype, device, used=[0, -1, 5], by_pair=True, scaled=True)  # some on none
    yield grouped_linear_case(3, 8, 128, 32, 16, dtype, device)  # most experts without a pair


def combine_experts_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield combine_experts_case(5, 2, 123, dtype, device)
    yield combine_experts_case(1, 8, 1030, dtype, device)
    yield combine_experts_case(3, 1, 5, dtype, device)
