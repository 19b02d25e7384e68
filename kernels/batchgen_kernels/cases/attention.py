"""Cases of attention over the paged cache and of merging its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from batchgen_kernels.attention_options import AttentionOptions
from batchgen_kernels.cases.case import Case, random_tensor
from batchgen_kernels.metadata import AttentionMetadata


def merge_states_case(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    """Far apart, huge, equal and empty sums of weights; the last token has seen nothing on either side."""

    def make() -> tuple[Any, ...]:
        out_a, out_b = (random_tensor((num_tokens, num_heads, head_dim), dtype, seed, device) for seed in (0, 1))
        lse_a, lse_b = (10 * random_tensor((num_tokens, num_heads), torch.float32, seed, device) for seed in (2, 3))
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


def with_options(
    inputs: PagedInputs, window: int = 0, soft_cap: float = 0.0, sinks: bool = False, fp8: bool = False
) -> tuple[PagedInputs, AttentionOptions]:
    """The same inputs, with a float8 cache if asked for, and the options that go with them.

    Scales differ from one to the next (the largest value of a head may be any byte but NaN), and are NaN where the cache is.
    """
    options = AttentionOptions(window, soft_cap)
    if sinks:
        options = options._replace(sinks=random_tensor(inputs.query.shape[1:2], torch.float32, 5, str(inputs.query.device)))
    if fp8:
        caches, scales = [], []
        for seed, cache in enumerate((inputs.key_cache, inputs.value_cache)):
            values = cache.float()
            largest = 100 + 348 * torch.rand(cache.shape[:3], generator=torch.Generator().manual_seed(seed)).to(cache.device)
            scales.append(values.abs().amax(-1) / largest)  # NaN if there is one
            caches.append((values / scales[-1][..., None]).to(torch.float8_e4m3fn))
        inputs = inputs._replace(key_cache=caches[0], value_cache=caches[1])
        options = options._replace(key_scale=scales[0], value_scale=scales[1])
    return inputs, options


def plan_attention_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    poison: bool = True,
    **options: Any,
) -> Case:
    """options: those of with_options."""

    def make() -> tuple[Any, ...]:
        shape = (query_lens, seq_lens, num_q_heads, num_kv_heads, head_dim, block_size)
        inputs, given = with_options(paged_inputs(*shape, dtype, device, poison=poison), **options)
        return *inputs, *given

    tokens = f"{list(query_lens)} of {list(seq_lens)} tokens"
    what = "".join(f", {name}{'' if value is True else f' {value}'}" for name, value in options.items())
    return attention_case(f"{tokens}, {num_q_heads}/{num_kv_heads} heads of {head_dim}, blocks of {block_size}{what}", make)


def attention_case(label: str, make: Callable[[], tuple[Any, ...]]) -> Case:
    """make: PagedInputs and AttentionOptions, one after the other."""

    def call(plan_attention: Any, args: Any) -> list[torch.Tensor]:
        metadata, query, key_cache, value_cache, scale, *given = args
        plan = plan_attention(metadata, query.shape[1], key_cache.shape[2], query.shape[2])
        return [plan(query, key_cache, value_cache, scale, *given)]

    return Case(label, make, call)


def merge_states_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield merge_states_case(5, 3, 64, dtype, device)
    yield merge_states_case(41, 7, 80, dtype, device)


def plan_attention_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    yield plan_attention_case([5, 1, 9], [5, 1, 9], 9, 3, 64, 16, dtype, device)  # fresh prompts
    yield plan_attention_case([1, 4, 1, 6], [70, 52, 1, 33], 8, 2, 64, 16, dtype, device)  # chunked prefill and decode
    yield plan_attention_case([1, 37, 1], [123, 69, 64], 4, 1, 64, 64, dtype, device)  # more than one query tile
    yield plan_attention_case([2, 1], [34, 17], 4, 4, 80, 32, dtype, device)  # no GQA; head dim not a power of two
    yield plan_attention_case([1, 3], [37, 5], 7, 1, 96, 4, dtype, device)  # all heads on one kv head
    yield plan_attention_case([1, 2], [5, 7], 3, 3, 64, 1, dtype, device)  # one token a block
    yield plan_attention_case([1], [33], 20, 1, 64, 24, dtype, device)  # a large group; an odd block size
    yield plan_attention_case([1, 37], [53, 69], 5, 1, 64, 16, dtype, device, window=21)
    yield plan_attention_case([1, 9], [67, 20], 6, 2, 112, 32, dtype, device, soft_cap=3.0, sinks=True)
    if dtype != torch.float16:  # whose weights and scales are rounded to bfloat16
        yield plan_attention_case([1, 9], [53, 20], 6, 2, 80, 16, dtype, device, fp8=True)
        everything: dict[str, Any] = {"window": 30, "soft_cap": 3.0, "sinks": True, "fp8": True}
        yield plan_attention_case([1, 5, 19], [130, 5, 60], 4, 4, 64, 64, dtype, device, **everything)
