"""Attention of one query token per request over the paged cache: decode.

For a request with seq_len tokens in the cache and the keys [kv_start, seq_len):
    s_j = scale q . k_j;   out = sum_j exp(s_j) v_j / sum_j exp(s_j);   lse = ln sum_j exp(s_j)

The query heads of one kv head are the rows of the tile, so keys and values are read once for all of them: what decode
costs is reading the cache. With few requests the processors would idle; only then are the keys split among programs, each
of which leaves (out_s, lse_s) in float32, and a second kernel merges them: out = sum_s exp(lse_s) out_s / sum_s exp(lse_s).
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.attention_options import FP8, NO_OPTIONS, AttentionOptions, check_options
from batchgen_kernels.launch import Launch, current_architecture, decode_launch, num_processors, padded_head_dim
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

MIN_SPLIT_KEYS = 256  # a shorter part costs more to merge than it saves
MAX_SPLITS = 64


@triton.jit(
    do_not_specialize=["stride_table", "num_splits", "window"],
    do_not_specialize_on_alignment=INDEX_TENSORS,
)
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # if SPLIT: [n, num_q_heads, num_splits, HEAD_DIM] float32
    lse_ptr,  # if SPLIT: [n, num_q_heads, num_splits]; else [T, num_q_heads] or None
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    kv_start_ptr,
    requests_ptr,
    sinks_ptr,  # [num_q_heads] float32, natural, or None; None if SPLIT: a sink joins when the parts do
    key_scale_ptr,  # float32, for caches of e4m3 bytes, or None
    value_scale_ptr,
    num_splits,
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
    SPLIT: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)
    request = tl.load(requests_ptr + index).to(tl.int64)
    token = tl.load(query_start_ptr + request).to(tl.int64)
    begin = tl.load(kv_start_ptr + request)
    key_end = tl.load(seq_lens_ptr + request)
    if window is None:
        key_begin = None
    else:  # tiles stay where they are: the first one may be ragged, too
        key_begin = tl.maximum(key_end - window, begin)
        begin += (key_begin - begin) // BLOCK_N * BLOCK_N
    if SPLIT:  # whole tiles to each part, so that only the last one is ragged
        part = tl.cdiv(tl.cdiv(key_end - begin, num_splits), BLOCK_N) * BLOCK_N
        begin += split * part
        key_end = tl.minimum(begin + part, key_end)
    full_end = begin + tl.maximum(key_end - begin, 0) // BLOCK_N * BLOCK_N
    full_begin = begin
    if window is not None:
        full_begin = tl.minimum(begin + tl.where(begin < key_begin, BLOCK_N, 0), full_end)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    group_head = head_tile * TILE_HEADS + row
    head = kv_head * GROUP + group_head
    row_ok = (row < TILE_HEADS) & (group_head < GROUP)
    cell_ok = row_ok[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * stride_q_token + head[:, None] * stride_q_head + dim[None, :], mask=cell_ok, other=0.0)

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
        key_begin, key_end, None, None, scale_log2, cap_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip
    out, lse = finish_rows(acc, row_max, row_sum)
    if SPLIT:
        out_row = (index * NUM_Q_HEADS + head) * num_splits + split
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], out, mask=cell_ok)
        tl.store(lse_ptr + out_row, lse, mask=row_ok)
    else:
        out_tile = out_ptr + token * stride_out_token + head[:, None] * stride_out_head + dim[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=cell_ok)
        if lse_ptr is not None:
            tl.store(lse_ptr + token * NUM_Q_HEADS + head, lse, mask=row_ok)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_start_ptr", "requests_ptr", "sinks_ptr"],
)
def merge_splits_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,  # or None
    query_start_ptr,
    requests_ptr,
    sinks_ptr,  # or None
    num_splits,
    stride_out_token,
    stride_out_head,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One (request, head): the parts in a fixed order, BLOCK_SPLITS at a time, so one variant serves any number of parts."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = tl.load(requests_ptr + index).to(tl.int64)
    token = tl.load(query_start_ptr + request).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    first_row = (index * NUM_Q_HEADS + head) * num_splits
    if sinks_ptr is None:
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
    else:
        top = tl.load(sinks_ptr + head)
        total = tl.full([], 1.0, tl.float32)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, num_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        lse = tl.load(partial_lse_ptr + first_row + split, mask=split < num_splits, other=float("-inf"))
        out = tl.load(
            partial_out_ptr + (first_row + split)[:, None] * HEAD_DIM + dim[None, :],
            mask=(split < num_splits)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(lse - base)
        rescale = tl.exp(top - base)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(out * weight[:, None], 0)
        top = new_top
    safe = tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + token * stride_out_token + head * stride_out_head + dim
    tl.store(out_row, (acc / safe).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * NUM_Q_HEADS + head, top + tl.log(safe))


def choose_num_splits(num_programs: int, max_keys: int, processors: int) -> int:
    """Parts per request: 1 if the programs already give every processor two, else as many as reach that, within reason."""
    if num_programs >= 2 * processors:
        return 1
    wanted = -(-2 * processors // max(1, num_programs))
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_start: torch.Tensor,
    requests: torch.Tensor,
    max_seq_len: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    launch: Launch | None = None,
    check: bool = True,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    """Writes `out` (and `lse`) for the one query token of each of the given requests; other rows are left alone.

    query, out [T, num_q_heads, D]; caches [num_blocks, block_size, num_kv_heads, D]; block_table [R, max_blocks];
    query_start [R + 1]; seq_lens, kv_start [R]; requests [n]; lse [T, num_q_heads] float32, natural logarithm.
    max_seq_len only helps to choose num_splits, where that is not given.
    """
    if check:
        check_attention_inputs("paged_decode", query, key_cache, value_cache, out, lse)
        check_options("paged_decode", query, key_cache, options)
        check_index_tensors("paged_decode", block_table, query_start, seq_lens, kv_start, requests)
    num_requests = requests.shape[0]
    if num_requests == 0:
        return
    num_q_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    tile_heads = min(group, MAX_TILE_HEADS)
    num_tiles = num_kv_heads * -(-group // tile_heads)
    launch = launch or decode_launch(current_architecture(), head_dim, query.dtype, key_cache.dtype == FP8)
    padded_dim = padded_head_dim(head_dim)
    if num_splits is None:
        max_keys = min(max_seq_len, options.window or max_seq_len)
        num_splits = choose_num_splits(num_requests * num_tiles, max_keys, num_processors(query.device))
    split = num_splits > 1
    target, target_lse = out, lse
    if split:
        target = torch.empty((num_requests, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
        target_lse = torch.empty((num_requests, num_q_heads, num_splits), dtype=torch.float32, device=query.device)
    paged_decode_kernel[(num_requests, num_tiles, num_splits)](
        query, cache_bytes(key_cache), cache_bytes(value_cache), target, target_lse,
        block_table, query_start, seq_lens, kv_start, requests,
        None if split else options.sinks, options.key_scale, options.value_scale,
        num_splits, scale * LOG2E, *option_scalars(options), query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, TILE_HEADS=tile_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        PRECISION=dot_precision(query.dtype), SPLIT=split, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if split:
        merge_splits_kernel[(num_requests, num_q_heads)](
            target, target_lse, out, lse, query_start, requests, options.sinks, num_splits, out.stride(0), out.stride(1),
            NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SPLITS=8, num_warps=1,
        )  # fmt: skip
