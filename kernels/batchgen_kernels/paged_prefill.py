"""Causal attention of many query tokens per request over the paged cache: prefill and chunked prefill.

For query token i (of n) of a request with seq_len tokens in the cache, p = seq_len - n + i, and the keys [kv_start, p]:
    s_j = scale q . k_j;   out = sum_j exp(s_j) v_j / sum_j exp(s_j);   lse = ln sum_j exp(s_j)

A tile of block_m rows is block_q query tokens times the query heads of one kv head, so keys and values are read once for
all of them, and with 64 or more rows Hopper gets its warpgroup instruction. The loop over key tiles is in two parts: tiles
that every row sees in full, with no mask at all, and the few at the edges (of causality, and of a sliding window).

Which program does what is a list of tiles that the device makes once a step (`prefill_tiles`), the longest first. Its
length comes from shapes alone, so a few entries at its end may be empty: those programs leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.attention_options import FP8, NO_OPTIONS, AttentionOptions, check_options
from batchgen_kernels.launch import Launch, current_architecture, num_processors, padded_head_dim, prefill_launch
from batchgen_kernels.paged_tile import (
    INDEX_TENSORS,
    LOG2E,
    MAX_TILE_HEADS,
    attend_range,
    cache_bytes,
    check_attention_inputs,
    check_index_tensors,
    dot_precision,
    finish_rows,
    first_state,
    option_scalars,
)


@triton.jit(
    do_not_specialize=["stride_table", "window"],
    do_not_specialize_on_alignment=INDEX_TENSORS,
)
def paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # or None
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    kv_start_ptr,
    tiles_ptr,  # [n, 2]: request, or -1, and first token of each tile
    sinks_ptr,  # [num_q_heads] float32, natural, or None
    key_scale_ptr,  # float32, for caches of e4m3 bytes, or None
    value_scale_ptr,
    scale_log2,
    cap_log2,  # or None
    window,  # or None
    stride_scale_block,
    stride_scale_slot,
    stride_scale_head,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_slot,
    stride_kv_head,
    stride_table,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    TILE_HEADS: tl.constexpr,  # of which this many share a tile
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    PROGRAMS: tl.constexpr = NUM_Q_HEADS // GROUP * HEAD_TILES  # of one tile
    tile = tl.program_id(0) // PROGRAMS
    kv_head = tl.program_id(0) % PROGRAMS // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    request = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    if request < 0:
        return
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    num_computed = tl.load(seq_lens_ptr + request) - query_len
    begin = tl.load(kv_start_ptr + request)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    token = first_token + row // TILE_HEADS
    group_head = head_tile * TILE_HEADS + row % TILE_HEADS
    head = kv_head * GROUP + group_head
    row_ok = (row < BLOCK_Q * TILE_HEADS) & (token < query_len) & (group_head < GROUP)
    cell_ok = row_ok[:, None] & (dim < HEAD_DIM)[None, :]
    position = num_computed + token
    q_row = (query_start + token).to(tl.int64)
    q_tile = q_ptr + q_row[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_tile, mask=cell_ok, other=0.0)

    key_end = num_computed + tl.minimum(first_token + BLOCK_Q, query_len)  # the last row's own position, plus one
    first_position = num_computed + first_token
    if window is None:
        key_begin = None
        full_begin = begin
    else:  # the first row sees keys from key_begin on, and every row those from last_begin on
        key_begin = tl.maximum(first_position - window + 1, begin)
        last_begin = tl.maximum(key_end - window, begin)
        full_begin = begin + tl.cdiv(last_begin - begin, BLOCK_N) * BLOCK_N
        begin += (key_begin - begin) // BLOCK_N * BLOCK_N
    full_end = begin + tl.maximum(first_position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(full_begin, full_end)

    kv_head = kv_head.to(tl.int64)
    cache = (k_ptr + kv_head * stride_kv_head, v_ptr + kv_head * stride_kv_head, stride_block, stride_slot)
    if key_scale_ptr is None:
        scales = None
    else:
        scale_at = kv_head * stride_scale_head
        scales = (key_scale_ptr + scale_at, value_scale_ptr + scale_at, stride_scale_block, stride_scale_slot)
    acc, row_max, row_sum = first_state(sinks_ptr, head, row_ok, BLOCK_M, PADDED_DIM)
    acc, row_max, row_sum = attend_range(
        q, acc, row_max, row_sum, cache, scales, table_ptr + request * stride_table, begin, full_begin, full_end,
        key_begin, key_end, position, window, scale_log2, cap_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip
    out, lse = finish_rows(acc, row_max, row_sum)
    out_tile = out_ptr + q_row[:, None] * stride_out_token + head[:, None] * stride_out_head + dim[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=cell_ok)
    if lse_ptr is not None:
        tl.store(lse_ptr + q_row * NUM_Q_HEADS + head, lse, mask=row_ok)


class PrefillPlan(NamedTuple):
    """What is the same for every layer of a step."""

    launch: Launch
    tiles: torch.Tensor  # from prefill_tiles


def plan_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
    max_query_len: int,
    launch: Launch | None = None,
) -> PrefillPlan:
    """Chooses the launch, unless it is given, and lists the tiles. Arguments as those of paged_prefill."""
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_q_heads // num_kv_heads
    tile_heads = min(group, MAX_TILE_HEADS)
    if launch is None:
        num_rows = tile_heads * min(num_tokens, max_query_len * requests.shape[0])
        num_programs = num_rows // 128 * num_kv_heads * -(-group // tile_heads)
        # Tiles of 128 rows use tensor cores and reads better than those of 64, unless the last one is much of a request,
        # or they are too few for the processors.
        short = num_rows < 256 * requests.shape[0] or num_programs < num_processors(query.device)
        launch = prefill_launch(current_architecture(), head_dim, query.dtype, short, key_cache.dtype == FP8)
    return PrefillPlan(
        launch, prefill_tiles(query_start, seq_lens, requests, num_tokens, max_query_len, launch.block_m // tile_heads)
    )


def prefill_tiles(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
    num_tokens: int,
    max_query_len: int,
    block_q: int,
) -> torch.Tensor:
    """[n, 2] int32: request and first query token (counted in it) of each tile of block_q query tokens, that with the most
    keys first; request -1 where there is no tile. Does not wait for the device: n is what the shapes say it can be at most.
    """
    num_requests = requests.shape[0]
    num_tiles = min(num_tokens // block_q + num_requests, num_requests * -(-max_query_len // block_q))
    lens = query_start[requests + 1] - query_start[requests]
    tiles_of = (lens + block_q - 1) // block_q
    ends = tiles_of.cumsum(0)
    tile = torch.arange(num_tiles, device=requests.device)
    index = torch.searchsorted(ends, tile, right=True).clamp_(max=num_requests - 1)
    first_token = (tile - ends[index] + tiles_of[index]) * block_q
    there = tile < ends[-1]
    num_keys = (seq_lens - query_start.diff())[requests[index]] + first_token
    order = torch.where(there, num_keys, -1).argsort(descending=True)
    return torch.stack([torch.where(there, requests[index], -1), first_token], 1)[order].int()


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_start: torch.Tensor,
    requests: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    launch: Launch | None = None,
    plan: PrefillPlan | None = None,
    check: bool = True,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    """Writes `out` (and `lse`) for the query tokens of the given requests; other rows are left alone.

    query, out [T, num_q_heads, D]; caches [num_blocks, block_size, num_kv_heads, D]; block_table [R, max_blocks];
    query_start [R + 1]; seq_lens, kv_start [R]; requests [n]; lse [T, num_q_heads] float32, natural logarithm.
    max_query_len bounds the query tokens of those requests, or plan comes from plan_prefill, for all layers of a step.
    """
    if check:
        check_attention_inputs("paged_prefill", query, key_cache, value_cache, out, lse)
        check_options("paged_prefill", query, key_cache, options)
        check_index_tensors("paged_prefill", block_table, query_start, seq_lens, kv_start, requests)
    num_requests = requests.shape[0]
    if num_requests == 0 or max_query_len == 0:
        return
    num_q_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    tile_heads = min(group, MAX_TILE_HEADS)
    plan = plan or plan_prefill(query, key_cache, query_start, seq_lens, requests, max_query_len, launch)
    launch, tiles = plan
    paged_prefill_kernel[(tiles.shape[0] * num_kv_heads * -(-group // tile_heads),)](
        query, cache_bytes(key_cache), cache_bytes(value_cache), out, lse,
        block_table, query_start, seq_lens, kv_start, tiles, options.sinks, options.key_scale, options.value_scale,
        scale * LOG2E, *option_scalars(options), query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, TILE_HEADS=tile_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, PRECISION=dot_precision(query.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
