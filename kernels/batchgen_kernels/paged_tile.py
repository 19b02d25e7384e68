"""What the paged attention kernels share: one tile of keys and values, one step of the online softmax, and host checks.

The block id of a tile is a load that the tile's own loads wait for. Done inside the trip it leaves no copy in flight
while the tile computes, whatever num_stages says; so a kernel loads the ids of the *next* tile (`tile_block_ids`) and
carries them to the next trip in a register. Scores are kept in base 2 (exp2 is what the hardware has).
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.attention_options import FP8, AttentionOptions
from batchgen_kernels.float8 import decode_e4m3
from batchgen_kernels.launch import DTYPES, MAX_HEAD_DIM

LOG2E = 1.4426950408889634
INDEX_TENSORS = ["table_ptr", "query_start_ptr", "seq_lens_ptr", "kv_start_ptr", "requests_ptr"]
MAX_TILE_HEADS = 16  # query heads in a tile; a larger group takes several programs, so that the table has every launch


@triton.jit
def tile_block_ids(table_row, first_key, key_begin, key_end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of keys [first_key, first_key + BLOCK_N): one scalar where a tile lies in one block, else one per key.

    Entries before key_begin (None: there are none) and from key_end on are not read: a table may hold anything there. A
    tile lies in one block if the block size is a multiple of BLOCK_N, as tiles start at a multiple of the block size plus a
    multiple of BLOCK_N.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_row + first_key // BLOCK_SIZE, mask=first_key < key_end, other=0)
    else:
        keys = first_key + tl.arange(0, BLOCK_N)
        return tl.load(table_row + keys // BLOCK_SIZE, mask=in_range(keys, key_begin, key_end), other=0)


@triton.jit
def in_range(key, key_begin, key_end):
    """key_begin <= key < key_end; without the first part if key_begin is None."""
    if key_begin is None:
        return key < key_end
    else:
        return (key >= key_begin) & (key < key_end)


@triton.jit
def attend_tile(
    q,  # [BLOCK_M, PADDED_DIM]
    acc,  # [BLOCK_M, PADDED_DIM] float32: sum of p v so far, relative to row_max
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    cache,  # (k_ptr, v_ptr, stride_block, stride_slot), the pointers at the kv head; bytes of e4m3 if there are scales
    scales,  # None, or (key_scale_ptr, value_scale_ptr, stride_block, stride_slot), the pointers at the kv head
    block_ids,  # from tile_block_ids
    first_key,
    key_begin,  # keys before this one are not read (only if MASKED); None: there are none
    key_end,  # keys from here on are not read (only if MASKED)
    query_position,  # [BLOCK_M]: a row sees keys up to and with its own position (only if MASKED); None: every key read
    window,  # ... and only so many of them; None: all
    scale_log2,
    cap_log2,  # of the logits; None: no cap
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys -> (acc', m', l'):

    m' = max(m, max s);   p = 2^(s - m');   r = 2^(m - m');   l' = l r + sum p;   acc' = acc r + p v

    Nothing is masked unless MASKED: the caller knows that every row sees the whole tile.
    """
    k_ptr, v_ptr, stride_block, stride_slot = cache
    key = first_key + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, PADDED_DIM)
    readable = in_range(key, key_begin, key_end)
    if BLOCK_SIZE % BLOCK_N == 0:
        slot = first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        slot = key % BLOCK_SIZE
    # 64 bits: a cache of a large GPU has more than 2^31 elements
    block = block_ids.to(tl.int64)
    offset = block * stride_block + slot * stride_slot
    k_tile = k_ptr + offset[None, :] + dim[:, None]
    v_tile = v_ptr + offset[:, None] + dim[None, :]
    if MASKED:  # stale slots may hold NaN: values must be read as zero there, for 0 * NaN is NaN
        k = tl.load(k_tile, mask=readable[None, :] & (dim < HEAD_DIM)[:, None], other=0)
        v = tl.load(v_tile, mask=readable[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM == PADDED_DIM:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    else:
        k = tl.load(k_tile, mask=(dim < HEAD_DIM)[:, None], other=0)
        v = tl.load(v_tile, mask=(dim < HEAD_DIM)[None, :], other=0)
    if scales is None:
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
    else:  # one scale a key: the key's is of its score, the value's of its weight
        key_scale_ptr, value_scale_ptr, stride_scale_block, stride_scale_slot = scales
        scale_at = block * stride_scale_block + slot * stride_scale_slot
        if MASKED:
            key_scale = tl.load(key_scale_ptr + scale_at, mask=readable, other=0.0)
            value_scale = tl.load(value_scale_ptr + scale_at, mask=readable, other=0.0)
        else:
            key_scale = tl.load(key_scale_ptr + scale_at)
            value_scale = tl.load(value_scale_ptr + scale_at)
        scores = tl.dot(q, decode_e4m3(k).to(q.dtype), input_precision=PRECISION) * (scale_log2 * key_scale)[None, :]
        # e4m3 is exact in bfloat16, and only bfloat16 has the range for weight times scale
        v = decode_e4m3(v).to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)
    if cap_log2 is not None:
        scores = soft_cap(scores, cap_log2)
    if MASKED:
        if query_position is None:
            visible = readable[None, :]
        else:
            # A value that is not finite must not reach the rows that do not see it as 0 * NaN: the product gets 0 for it,
            # and the rows that do see it get NaN through the score of its key.
            zero = v * 0.0
            spoiled = tl.sum(zero.to(tl.float32), 1)
            v = tl.where(zero == 0.0, v, 0.0)
            if scales is not None:
                spoiled += value_scale * 0.0
                value_scale = tl.where(value_scale * 0.0 == 0.0, value_scale, 0.0)
            scores += spoiled[None, :]
            visible = (key[None, :] <= query_position[:, None]) & readable[None, :]
            if window is not None:
                visible = visible & (key[None, :] > query_position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if scales is not None:
        p *= value_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def attend_range(
    q,
    acc,
    row_max,
    row_sum,
    cache,
    scales,
    table_row,
    begin,  # of the first tile
    full_begin,  # tiles [full_begin, full_end) are seen whole by every row; begin <= full_begin <= full_end
    full_end,
    key_begin,
    key_end,
    query_position,
    window,
    scale_log2,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every tile from begin to key_end: first those that need no mask, then those at both edges. See attend_tile."""
    block_ids = tile_block_ids(table_row, full_begin, key_begin, key_end, BLOCK_SIZE, BLOCK_N)
    for first_key in range(full_begin, full_end, BLOCK_N):
        next_ids = tile_block_ids(table_row, first_key + BLOCK_N, key_begin, key_end, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, cache, scales, block_ids, first_key, key_begin, key_end, query_position, window,
            scale_log2, cap_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION, MASKED=False,
        )  # fmt: skip
        block_ids = next_ids
    # `edge` counts keys as if the full tiles were not there
    num_full = full_end - full_begin
    if begin < full_begin:
        block_ids = tile_block_ids(table_row, begin, key_begin, key_end, BLOCK_SIZE, BLOCK_N)
    for edge in range(begin, key_end - num_full, BLOCK_N):
        first_key = edge + tl.where(edge < full_begin, 0, num_full)
        next_key = edge + BLOCK_N + tl.where(edge + BLOCK_N < full_begin, 0, num_full)
        next_ids = tile_block_ids(table_row, next_key, key_begin, key_end, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, cache, scales, block_ids, first_key, key_begin, key_end, query_position, window,
            scale_log2, cap_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, PRECISION, MASKED=True,
        )  # fmt: skip
        block_ids = next_ids
    return acc, row_max, row_sum


@triton.jit
def soft_cap(scores, cap):
    """cap tanh(scores / cap) as cap - 2 cap / (1 + e^(2 scores / cap)), which goes to its limits where e^x overflows or
    vanishes."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.8853900817779268 / cap)))


@triton.jit
def first_state(sinks_ptr, head, row_ok, BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """(acc, row_max, row_sum) of rows that have seen nothing yet but the sink of their head, if there are sinks."""
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max = tl.load(sinks_ptr + head, mask=row_ok, other=0.0) * 1.4426950408889634
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    return acc, row_max, row_sum


@triton.jit
def finish_rows(acc, row_max, row_sum):
    """(out, lse): out = acc / l and lse = ln sum exp(s); a row that saw no key gets 0 and -inf, the identity of merging."""
    empty = row_sum == 0.0
    safe = tl.where(empty, 1.0, row_sum)
    lse = (row_max + tl.log2(safe)) * 0.6931471805599453
    return acc / safe[:, None], tl.where(empty, float("-inf"), lse)


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot on float32 would use tf32, whose error is 3e-4; the 16-bit types have only one precision."""
    return "ieee" if dtype == torch.float32 else "tf32"


def cache_bytes(cache: torch.Tensor) -> torch.Tensor:
    """What a kernel sees of a cache: bytes, if it holds float8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def option_scalars(options: AttentionOptions) -> tuple[float | None, int | None, int, int, int]:
    """(cap_log2, window, strides of the scales) as kernels take them: None for what is off, which compiles to nothing."""
    strides = (0, 0, 0) if options.key_scale is None else options.key_scale.stride()
    return options.soft_cap * LOG2E or None, options.window or None, *strides


def check_index_tensors(
    op: str,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_start: torch.Tensor,
    requests: torch.Tensor,
) -> None:
    """Block tables, offsets and lengths: integers, dense in the last dimension, as many as there are requests."""
    num_requests = seq_lens.shape[0]
    shapes = {
        "block_table": (block_table, (num_requests, *block_table.shape[1:])),
        "query_start": (query_start, (num_requests + 1,)),
        "seq_lens": (seq_lens, (num_requests,)),
        "kv_start": (kv_start, (num_requests,)),
        "requests": (requests, requests.shape),
    }
    for name, (t, shape) in shapes.items():
        if t.shape != shape or t.dim() != (2 if name == "block_table" else 1):
            raise ValueError(f"{op}: {name} must be {list(shape)} for {num_requests} requests, got {list(t.shape)}")
        if t.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be int32 or int64, got {t.dtype}")
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{op}: {name} must be dense in its last dimension, got strides {t.stride()}")


def check_attention_inputs(
    op: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and strides of what attention reads and writes; ValueError names what is wrong."""
    if query.dim() != 3:
        raise ValueError(f"{op}: query must be [num_tokens, num_q_heads, head_dim], got {tuple(query.shape)}")
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{op}: key_cache and value_cache must be [num_blocks, block_size, num_kv_heads, head_dim] alike, "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    num_q_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape[3] != head_dim:
        raise ValueError(f"{op}: head_dim is {head_dim} in query and {key_cache.shape[3]} in the cache")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim {head_dim} is more than {MAX_HEAD_DIM}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{op}: num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    if query.dtype not in DTYPES or key_cache.dtype not in (query.dtype, FP8) or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"{op}: query, key_cache and value_cache must share one dtype of float32, bfloat16, float16 "
            f"(or both caches be {FP8}); "
            f"got {query.dtype}, {key_cache.dtype}, {value_cache.dtype}"
        )
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"{op}: key_cache and value_cache must have the same strides")
    for name, t in (("query", query), ("key_cache", key_cache), ("out", out)):
        if t.stride(-1) != 1:
            raise ValueError(f"{op}: {name} must be dense in its last dimension, got strides {t.stride()}")
    if out.shape != query.shape or not out.dtype.is_floating_point:
        raise ValueError(
            f"{op}: out must be floats of query's shape {tuple(query.shape)}, got {tuple(out.shape)} {out.dtype}"
        )
    if lse is not None and (lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()):
        raise ValueError(
            f"{op}: lse must be contiguous float32 {tuple(query.shape[:2])}, got {tuple(lse.shape)} {lse.dtype}"
        )
