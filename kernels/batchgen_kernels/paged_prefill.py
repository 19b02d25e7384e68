"""Causal attention of many query tokens per request over the paged cache: prefill and chunked prefill.

For query token i (of n) of a request with seq_len tokens in the cache, p = seq_len - n + i, and the keys [kv_start, p]:
    s_j = scale q . k_j;   out = sum_j exp(s_j) v_j / sum_j exp(s_j);   lse = ln sum_j exp(s_j)

A tile of block_m rows is block_q query tokens times the query heads of one kv head, so keys and values are read once for
all of them, and with 64 or more rows Hopper gets its warpgroup instruction. The loop over key tiles is in two parts: tiles
that every row sees in full, with no mask at all, and the few at the causal edge.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.attention_options import NO_OPTIONS, AttentionOptions, check_options
from batchgen_kernels.launch import Launch, current_architecture, padded_head_dim, prefill_launch
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
    requests_ptr,
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
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    request = tl.load(requests_ptr + tl.program_id(2)).to(tl.int64)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    # the last tile of a request has the most keys: start it first, or it runs alone at the end
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    if first_token >= query_len:
        return
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
    check: bool = True,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    """Writes `out` (and `lse`) for the query tokens of the given requests; other rows are left alone.

    query, out [T, num_q_heads, D]; caches [num_blocks, block_size, num_kv_heads, D]; block_table [R, max_blocks];
    query_start [R + 1]; seq_lens, kv_start [R]; requests [n]; lse [T, num_q_heads] float32, natural logarithm.
    max_query_len bounds the query tokens of those requests: the grid comes from it, so the device is never waited for.
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
    launch = launch or prefill_launch(current_architecture(), head_dim, query.dtype)
    grid = (
        -(-max_query_len // (launch.block_m // tile_heads)),
        num_kv_heads * -(-group // tile_heads),
        num_requests,
    )
    paged_prefill_kernel[grid](
        query, cache_bytes(key_cache), cache_bytes(value_cache), out, lse,
        block_table, query_start, seq_lens, kv_start, requests, options.sinks, options.key_scale, options.value_scale,
        scale * LOG2E, *option_scalars(options), query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, TILE_HEADS=tile_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, PRECISION=dot_precision(query.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
