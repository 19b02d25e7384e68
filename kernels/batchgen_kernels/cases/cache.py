"""Cases of the ops that write the key/value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor


def write_kv_case(
    slots: Sequence[int],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Case:
    """key and value are views of a fused tensor; the whole cache is compared, NaN where nothing is to be written."""

    def make() -> tuple[Any, ...]:
        fused = random_tensor((len(slots), 3 * num_kv_heads, head_dim), dtype, 0, device)
        cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        key, value = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :]
        return key, value, cache[0], cache[1], torch.tensor(slots, dtype=torch.int64, device=device)

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args)
        return [args[2], args[3]]

    return Case(f"{len(slots)} tokens, block size {block_size}, {num_kv_heads} heads of {head_dim}", make, call)


def copy_blocks_case(
    pairs: Sequence[tuple[int, int]],
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Case:
    def make() -> tuple[Any, ...]:
        cache = random_tensor((num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), dtype, 0, device)
        source, destination = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
        return cache, source, destination

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args)
        return [args[0]]

    return Case(f"{len(pairs)} of {num_blocks} blocks of {block_size}, {num_layers} layers", make, call)


def write_kv_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield write_kv_case([4, 37, 5, 79], 5, 16, 2, 64, dtype, device)
    yield write_kv_case([3], 4, 1, 3, 80, dtype, device)
    yield write_kv_case([17, 9, 31], 8, 4, 5, 96, dtype, device)


def copy_blocks_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield copy_blocks_case([(1, 4), (3, 2), (1, 5)], 3, 6, 16, 3, 80, dtype, device)
    yield copy_blocks_case([(2, 1)], 1, 3, 1, 1, 5, dtype, device)
    yield copy_blocks_case([], 2, 3, 4, 1, 8, dtype, device)
