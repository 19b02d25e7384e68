"""Inputs of every op, for tests and benches alike: `CASES[op](dtype, device)` gives small, mean cases.

A case knows how to make its arguments (the same ones each time, so that an in-place op can be run on fresh copies), how to
call an implementation with them, and what to compare. Benches use the same `*_case` functions with the sizes of a model.

Mean means: sizes that no tile divides, strided views, NaN wherever nothing may be read, sentinels wherever nothing may be
written, block ids in random order, block tables as tight as they may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from batchgen_kernels.metadata import AttentionMetadata

# ||out - reference|| / ||reference|| that two or three roundings to the dtype explain (one is about 0.4 of 2^-24, 2^-11
# or 2^-8): torch's ops round between steps, attention rounds the probabilities, and float32 sums in another order.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 7e-4, torch.bfloat16: 5e-3}
MOVES_DATA = ("write_kv", "copy_blocks")


def tolerance(op: str, implementation: str, dtype: torch.dtype) -> float:
    """The relative error that this implementation of an op may have.

    Ops that only move data are exact. The Triton ops compute in float32 and round where the reference rounds, so that in a
    16-bit dtype only a rare last digit may differ; attention is the exception.
    """
    if op in MOVES_DATA:
        return 0.0
    if implementation == "triton" and op != "plan_attention" and dtype.itemsize == 2:
        return TOLERANCE[dtype] / 10
    return TOLERANCE[dtype]


class Case(NamedTuple):
    label: str
    make: Callable[[], tuple[Any, ...]]  # fresh arguments
    call: Callable[[Any, tuple[Any, ...]], list[torch.Tensor]]  # (implementation, arguments) -> tensors to compare

    def run(self, implementation: Any) -> list[torch.Tensor]:
        return self.call(implementation, self.make())


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; infinite where one has a NaN or an infinity and the other hasn't the same."""
    out, expected = out.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(out.isfinite(), finite) or not torch.equal(out[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return float("inf")
    out, expected = out[finite], expected[finite]
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rms_norm_case(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", strided: bool = False) -> Case:
    def make() -> tuple[Any, ...]:
        x = _random(shape, dtype, 0, device)
        if strided:  # heads in the middle of a fused tensor, NaN around them
            fused = torch.full((shape[0], shape[1] + 3, shape[2]), float("nan"), dtype=dtype, device=device)
            fused[:, 1:-2] = x
            x = fused[:, 1:-2]
        return x, _random(shape[-1:], dtype, 1, device), 1e-5

    return Case(f"{list(shape)}{' strided' if strided else ''}", make, lambda op, args: [op(*args)])


def add_rms_norm_case(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Case:
    def make() -> tuple[Any, ...]:
        x, residual = _random(shape, dtype, 0, device), _random(shape, dtype, 2, device)
        return x, residual, _random(shape[-1:], dtype, 1, device), 1e-5

    return Case(f"{list(shape)}", make, lambda op, args: list(op(*args)))


def rotary_embedding_case(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Case:
    """The tensor that is compared is the fused qkv, of which query and key are views: values must stay as they are."""

    def make() -> tuple[Any, ...]:
        qkv = _random((num_tokens, num_q_heads + 2 * num_kv_heads, head_dim), dtype, 0, device)
        query, key = qkv[:, :num_q_heads], qkv[:, num_q_heads : num_q_heads + num_kv_heads]
        angle = torch.arange(300)[:, None] / 10000.0 ** (torch.arange(rotary_dim // 2) * 2 / rotary_dim)
        positions = torch.randint(0, 300, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        return query, key, angle.cos().to(device), angle.sin().to(device), positions, qkv

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args[:-1])
        return [args[-1]]

    return Case(f"{num_tokens} tokens {num_q_heads}/{num_kv_heads} heads of {head_dim}, {rotary_dim} rotate", make, call)


def silu_and_mul_case(num_tokens: int, intermediate: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    def make() -> tuple[Any, ...]:
        return (4 * _random((num_tokens, 2 * intermediate), dtype, 0, device),)

    return Case(f"[{num_tokens}, 2 * {intermediate}]", make, lambda op, args: [op(*args)])


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
        fused = _random((len(slots), 3 * num_kv_heads, head_dim), dtype, 0, device)
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
        cache = _random((num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), dtype, 0, device)
        source, destination = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
        return cache, source, destination

    def call(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        op(*args)
        return [args[0]]

    return Case(f"{len(pairs)} of {num_blocks} blocks of {block_size}, {num_layers} layers", make, call)


def merge_states_case(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    """Far apart, huge, equal and empty sums of weights; the last token has seen nothing on either side."""

    def make() -> tuple[Any, ...]:
        out_a, out_b = (_random((num_tokens, num_heads, head_dim), dtype, seed, device) for seed in (0, 1))
        lse_a, lse_b = (10 * _random((num_tokens, num_heads), torch.float32, seed, device) for seed in (2, 3))
        lse_a[0] += 1000.0
        lse_b[1] = lse_a[1] + 90.0
        lse_a[2] = -float("inf")
        lse_b[3 % num_tokens] = -float("inf")
        lse_a[-1] = lse_b[-1] = -float("inf")
        return out_a, lse_a, out_b, lse_b

    return Case(f"[{num_tokens}, {num_heads}, {head_dim}]", make, lambda op, args: list(op(*args)))


def build_metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, block_size: int, device: str = "cpu"
) -> AttentionMetadata:
    """Metadata of one step without shared-prefix groups."""
    empty = torch.zeros(0, dtype=torch.int32)
    return AttentionMetadata(
        block_size=block_size,
        block_table=block_table.to(device),
        query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        kv_start=torch.zeros(len(query_lens), dtype=torch.int32, device=device),
        decode_requests=torch.tensor([r for r, n in enumerate(query_lens) if n == 1], dtype=torch.int64, device=device),
        prefill_requests=torch.tensor([r for r, n in enumerate(query_lens) if n > 1], dtype=torch.int64, device=device),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        group_query_start=empty,
        group_query_end=empty,
        group_block_start=torch.zeros(1, dtype=torch.int32),
        group_blocks=empty,
    )


class PagedInputs(NamedTuple):
    """Arguments of attention, before an op is chosen."""

    metadata: AttentionMetadata
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scale: float


def paged_inputs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    padding: int = 0,
    poison: bool = True,
) -> PagedInputs:
    """A cache with the blocks of each request in random order; with poison, NaN in every slot that no request owns.

    The block table ends with the last block of the longest request; shorter rows are filled with `padding` (0 in the
    engine; -1 here shows that nobody reads them). Query is a view of a fused qkv tensor.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks) + 3
    order = 1 + torch.randperm(num_blocks - 1, generator=generator)  # block 0 is the null block
    table = torch.full((len(blocks), max(blocks)), padding, dtype=torch.int32)
    cache = torch.randn((2, num_blocks, block_size, num_kv_heads, head_dim), generator=generator).to(dtype)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for r, (first, n) in enumerate(zip(itertools.accumulate([0, *blocks]), blocks)):
        mine = order[first : first + n]
        table[r, :n] = mine.int()
        owned[mine] = torch.arange(n * block_size).view(n, block_size) < seq_lens[r]
    if poison:
        cache[:, ~owned] = float("nan")
    qkv = torch.full((sum(query_lens), num_q_heads + 2 * num_kv_heads, head_dim), float("nan")).to(dtype)
    qkv[:, :num_q_heads] = torch.randn((sum(query_lens), num_q_heads, head_dim), generator=generator).to(dtype)
    cache, qkv = cache.to(device), qkv.to(device)
    metadata = build_metadata(query_lens, seq_lens, table, block_size, device)
    return PagedInputs(metadata, qkv[:, :num_q_heads], cache[0], cache[1], head_dim**-0.5)


def plan_attention_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    **options: Any,
) -> Case:
    def make() -> tuple[Any, ...]:
        shape = (query_lens, seq_lens, num_q_heads, num_kv_heads, head_dim, block_size)
        return paged_inputs(*shape, dtype, device, **options)

    def call(plan_attention: Any, args: Any) -> list[torch.Tensor]:
        metadata, query, key_cache, value_cache, scale = args
        if getattr(plan_attention, "needs_finite_slots", False):  # its contract: see attention_torch
            owned = torch.cat(
                [metadata.block_table.flatten().clamp(min=0).unique(), torch.zeros(1, dtype=torch.int32)]
            ).long()
            key_cache, value_cache = key_cache.clone(), value_cache.clone()
            key_cache[owned], value_cache[owned] = key_cache[owned].nan_to_num(0), value_cache[owned].nan_to_num(0)
        plan = plan_attention(metadata, num_q_heads, num_kv_heads, head_dim)
        return [plan(query, key_cache, value_cache, scale)]

    tokens = f"{list(query_lens)} of {list(seq_lens)} tokens"
    return Case(f"{tokens}, {num_q_heads}/{num_kv_heads} heads of {head_dim}, blocks of {block_size}", make, call)


def _rms_norm(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for shape in ((5, 123), (3, 64), (1, 1), (2, 2050), (37, 5)):
        yield rms_norm_case(shape, dtype, device)
    yield rms_norm_case((5, 3, 80), dtype, device)
    yield rms_norm_case((7, 4, 64), dtype, device, strided=True)


def _add_rms_norm(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for shape in ((5, 123), (1, 64), (3, 2050)):
        yield add_rms_norm_case(shape, dtype, device)


def _rotary_embedding(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield rotary_embedding_case(5, 4, 2, 64, 64, dtype, device)
    yield rotary_embedding_case(1, 9, 3, 128, 128, dtype, device)
    yield rotary_embedding_case(3, 7, 1, 80, 32, dtype, device)  # partial, as in Phi
    yield rotary_embedding_case(2, 33, 2, 256, 96, dtype, device)  # more heads than a tile


def _silu_and_mul(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for num_tokens, intermediate in ((5, 123), (1, 1), (2, 1500), (3, 64)):
        yield silu_and_mul_case(num_tokens, intermediate, dtype, device)


def _write_kv(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield write_kv_case([4, 37, 5, 79], 5, 16, 2, 64, dtype, device)
    yield write_kv_case([3], 4, 1, 3, 80, dtype, device)
    yield write_kv_case([17, 9, 31], 8, 4, 5, 96, dtype, device)


def _copy_blocks(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield copy_blocks_case([(1, 4), (3, 2), (1, 5)], 3, 6, 16, 3, 80, dtype, device)
    yield copy_blocks_case([(2, 1)], 1, 3, 1, 1, 5, dtype, device)
    yield copy_blocks_case([], 2, 3, 4, 1, 8, dtype, device)


def _merge_states(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield merge_states_case(5, 3, 64, dtype, device)
    yield merge_states_case(41, 7, 80, dtype, device)


def _plan_attention(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield plan_attention_case([5, 1, 9], [5, 1, 9], 9, 3, 64, 16, dtype, device)  # fresh prompts
    yield plan_attention_case([1, 4, 1, 6], [70, 52, 1, 33], 8, 2, 64, 16, dtype, device)  # chunked prefill and decode
    yield plan_attention_case([1, 37, 1], [123, 69, 64], 4, 1, 64, 64, dtype, device)  # more than one query tile
    yield plan_attention_case([2, 1], [34, 17], 4, 4, 80, 32, dtype, device)  # no GQA; head dim not a power of two
    yield plan_attention_case([1, 3], [37, 5], 7, 1, 96, 4, dtype, device)  # all heads on one kv head
    yield plan_attention_case([1, 2], [5, 7], 3, 3, 64, 1, dtype, device)  # one token a block
    yield plan_attention_case([1], [33], 20, 1, 64, 24, dtype, device)  # a large group; an odd block size


CASES: dict[str, Callable[[torch.dtype, str], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary_embedding": _rotary_embedding,
    "silu_and_mul": _silu_and_mul,
    "write_kv": _write_kv,
    "copy_blocks": _copy_blocks,
    "merge_states": _merge_states,
    "plan_attention": _plan_attention,
}
