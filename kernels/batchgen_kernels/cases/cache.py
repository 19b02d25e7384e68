"""Cases of the ops that write the key/value cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor
from batchgen_kernels.cases.elementwise import angles
from batchgen_kernels.float8 import E4M3, dequantize_rows


def write_kv_case(
    slots: Sequence[int],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    float8: bool = False,
) -> Case:
    """key and value are views of a fused tensor; the whole cache is compared, NaN where nothing is to be written.

    float8: the first rows of the values are such as scales must be told about: zeros, tiny, huge, infinite, NaN.
    """

    def make() -> tuple[Any, ...]:
        fused = random_tensor((len(slots), 3 * num_kv_heads, head_dim), dtype, 0, device)
        key, value = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :]
        caches, scales = empty_caches((num_blocks, block_size, num_kv_heads, head_dim), dtype, device, float8)
        if float8:
            value[0, 0] = 0
            value[0, 1] *= 1e-7
            value[1, 0] *= 1e4
            value[1, 1, 3], value[2, 0, 5] = float("inf"), float("nan")
        return key, value, *caches, torch.tensor(slots, dtype=torch.int64, device=device), *scales

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args)
        return [args[2], args[3], *args[5:]]

    kind = ", float8" if float8 else ""
    return Case(f"{len(slots)} tokens, block size {block_size}, {num_kv_heads} heads of {head_dim}{kind}", make, call)


def empty_caches(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, float8: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """key_cache and value_cache full of NaN, and their scales if they have any."""
    cache = torch.full((2, *shape), float("nan"), dtype=E4M3 if float8 else dtype, device=device)
    scales = torch.full((2, *shape[:-1]), float("nan"), device=device)
    return [cache[0], cache[1]], [scales[0], scales[1]] if float8 else []


def rope_and_write_kv_case(
    slots: Sequence[int],
    num_blocks: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    norm: bool = False,
    interleaved: bool = False,
    float8: bool = False,
) -> Case:
    """query, key and value are views of a fused qkv. Compared are its queries and values and the whole cache, NaN where
    nothing is to be written; a float8 cache by what its codes and scales say."""

    def make() -> tuple[Any, ...]:
        qkv = random_tensor((len(slots), num_q_heads + 2 * num_kv_heads, head_dim), dtype, 0, device)
        query, key, value = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        caches, scales = empty_caches((num_blocks, block_size, num_kv_heads, head_dim), dtype, device, float8)
        cos, sin = angles(rotary_dim, device)
        positions = torch.randint(0, len(cos), (len(slots),), generator=torch.Generator().manual_seed(1)).to(device)
        weights = [1 + 0.1 * random_tensor((head_dim,), torch.float32, seed, device).to(dtype) for seed in (2, 3)]
        options = {
            "q_norm": weights[0] if norm else None,
            "k_norm": weights[1] if norm else None,
            "eps": 1e-5,
            "key_scale": scales[0] if float8 else None,
            "value_scale": scales[1] if float8 else None,
            "interleaved": interleaved,
        }
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        return query, key, value, *caches, slot_mapping, cos, sin, positions, options

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        *tensors, options = args
        op(*tensors, **options)
        query, _, value, key_cache, value_cache = tensors[:5]
        if float8:
            key_cache = dequantize_rows(key_cache, options["key_scale"])
            value_cache = dequantize_rows(value_cache, options["value_scale"])
        return [query, value, key_cache, value_cache]

    kind = "".join(f", {name}" for name, on in (("norm", norm), ("interleaved", interleaved), ("float8", float8)) if on)
    heads = f"{num_q_heads}/{num_kv_heads} heads of {head_dim}, {rotary_dim} rotate"
    return Case(f"{len(slots)} tokens, block size {block_size}, {heads}{kind}", make, call)


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
    """head_dim 0: the scales of a float8 cache, which have no such dimension."""

    def make() -> tuple[Any, ...]:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        cache = random_tensor(shape if head_dim else shape[:-1], torch.float32, 0, device).to(dtype)
        source, destination = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
        return cache, source, destination

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args)
        return [args[0]]

    return Case(f"{len(pairs)} of {num_blocks} blocks of {block_size}, {num_layers} layers", make, call)


def write_kv_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield write_kv_case([4, 37, 5, 79], 5, 16, 2, 64, dtype, device)
    yield write_kv_case([3, -1], 4, 1, 3, 80, dtype, device)
    yield write_kv_case([17, -1, 9, 31], 8, 4, 5, 96, dtype, device)
    yield write_kv_case([4, 37, -1, 79], 5, 16, 2, 64, dtype, device, float8=True)
    yield write_kv_case([17, 9, 31], 8, 4, 5, 80, dtype, device, float8=True)


def copy_blocks_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield copy_blocks_case([(1, 4), (3, 2), (1, 5)], 3, 6, 16, 3, 80, dtype, device)
    yield copy_blocks_case([(2, 1)], 1, 3, 1, 1, 5, dtype, device)
    yield copy_blocks_case([], 2, 3, 4, 1, 8, dtype, device)
    yield copy_blocks_case([(2, 1), (0, 3)], 2, 4, 4, 3, 24, E4M3, device)
    yield copy_blocks_case([(2, 1), (0, 3)], 2, 4, 4, 3, 0, torch.float32, device)


def rope_and_write_kv_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    case = functools.partial(rope_and_write_kv_case, dtype=dtype, device=device)
    yield case([4, -1, 5, 79], 5, 16, 4, 2, 64, 64)
    yield case([18, 3], 8, 4, 9, 3, 128, 128, norm=True)
    yield case([3, -1, 2], 4, 1, 7, 1, 80, 32, norm=True)  # partial, as in Phi
    yield case([10, 7], 4, 3, 17, 2, 256, 96)  # more heads than a tile
    yield case([10, 7], 4, 3, 5, 5, 48, 48, interleaved=True)
    yield case([10, 7], 4, 3, 4, 1, 96, 40, norm=True, interleaved=True)
    yield case([4, -1, 37], 5, 16, 4, 2, 64, 64, float8=True)
    yield case([10, 7], 4, 3, 3, 3, 80, 24, interleaved=True, float8=True)
    if dtype == torch.float32:  # torch's norm of 16 bits rounds once, and a last digit of theirs can be one of e4m3's
        yield case([18, 3], 8, 4, 6, 2, 128, 96, norm=True, float8=True)
