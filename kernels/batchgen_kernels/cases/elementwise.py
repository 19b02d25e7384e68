"""Cases of the ops that work on one token at a time: norms, rotary embedding, activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchgen_kernels.cases.case import Case, random_tensor


def rms_norm_case(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", strided: bool = False) -> Case:
    def make() -> tuple[Any, ...]:
        x = random_tensor(shape, dtype, 0, device)
        if strided:  # heads in the middle of a fused tensor, NaN around them
            fused = torch.full((shape[0], shape[1] + 3, shape[2]), float("nan"), dtype=dtype, device=device)
            fused[:, 1:-2] = x
            x = fused[:, 1:-2]
        return x, random_tensor(shape[-1:], dtype, 1, device), 1e-5

    return Case(f"{list(shape)}{' strided' if strided else ''}", make, lambda op, args: [op(*args)])


def add_rms_norm_case(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Case:
    def make() -> tuple[Any, ...]:
        x, residual = random_tensor(shape, dtype, 0, device), random_tensor(shape, dtype, 2, device)
        return x, residual, random_tensor(shape[-1:], dtype, 1, device), 1e-5

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        y, total = op(*args)
        return [y, total, args[1]]  # which is overwritten

    return Case(f"{list(shape)}", make, call)


def rotary_embedding_case(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    interleaved: bool = False,
) -> Case:
    """The tensor that is compared is the fused qkv, of which query and key are views: values must stay as they are."""

    def make() -> tuple[Any, ...]:
        qkv = random_tensor((num_tokens, num_q_heads + 2 * num_kv_heads, head_dim), dtype, 0, device)
        query, key = qkv[:, :num_q_heads], qkv[:, num_q_heads : num_q_heads + num_kv_heads]
        cos, sin = angles(rotary_dim, device)
        positions = torch.randint(0, len(cos), (num_tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        return query, key, cos, sin, positions, interleaved, qkv

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args[:-1])
        return [args[-1]]

    kind = ", interleaved" if interleaved else ""
    return Case(
        f"{num_tokens} tokens {num_q_heads}/{num_kv_heads} heads of {head_dim}, {rotary_dim} rotate{kind}", make, call
    )


def angles(rotary_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 300 positions."""
    angle = torch.arange(300)[:, None] / 10000.0 ** (torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    return angle.cos().to(device), angle.sin().to(device)


def silu_and_mul_case(num_tokens: int, intermediate: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    def make() -> tuple[Any, ...]:
        return (4 * random_tensor((num_tokens, 2 * intermediate), dtype, 0, device),)

    return Case(f"[{num_tokens}, 2 * {intermediate}]", make, lambda op, args: [op(*args)])


def gelu_and_mul_case(
    num_tokens: int, intermediate: int, dtype: torch.dtype, device: str = "cpu", approximate: str = "none"
) -> Case:
    def make() -> tuple[Any, ...]:
        return 4 * random_tensor((num_tokens, 2 * intermediate), dtype, 0, device), approximate

    return Case(f"[{num_tokens}, 2 * {intermediate}], {approximate}", make, lambda op, args: [op(*args)])


def rms_norm_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for shape in ((5, 123), (3, 64), (1, 1), (2, 2050), (37, 5)):
        yield rms_norm_case(shape, dtype, device)
    yield rms_norm_case((5, 3, 80), dtype, device)
    yield rms_norm_case((7, 4, 64), dtype, device, strided=True)


def add_rms_norm_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for shape in ((5, 123), (1, 64), (3, 2050)):
        yield add_rms_norm_case(shape, dtype, device)


def rotary_embedding_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield rotary_embedding_case(5, 4, 2, 64, 64, dtype, device)
    yield rotary_embedding_case(1, 9, 3, 128, 128, dtype, device)
    yield rotary_embedding_case(3, 7, 1, 80, 32, dtype, device)  # partial, as in Phi
    yield rotary_embedding_case(2, 33, 2, 256, 96, dtype, device)  # more heads than a tile
    yield rotary_embedding_case(3, 5, 2, 64, 64, dtype, device, interleaved=True)
    yield rotary_embedding_case(3, 7, 1, 80, 24, dtype, device, interleaved=True)


def silu_and_mul_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for num_tokens, intermediate in ((5, 123), (1, 1), (2, 1500), (3, 64)):
        yield silu_and_mul_case(num_tokens, intermediate, dtype, device)


def gelu_and_mul_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        for num_tokens, intermediate in ((5, 123), (1, 1), (2, 1500)):
            yield gelu_and_mul_case(num_tokens, intermediate, dtype, device, approximate)
