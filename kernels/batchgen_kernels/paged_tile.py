"""What the paged attention kernels share: one tile of keys and values, one step of the online softmax, and host checks.

The block id of a tile is a load that the tile's own loads wait for. Done inside the trip it leaves no copy in flight
while the tile computes, whatever num_stages says; so a kernel loads the ids of the *next* tile (`tile_block_ids`) and
carries them to the next trip in a register. Scores are kept in base 2 (exp2 is what the hardware has).
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.launch import DTYPES, MAX_HEAD_DIM

LOG2E = 1.4426950408889634
MAX_TILE_HEADS = 16  # query heads in a tile; a larger group takes several programs, so that the table has every launch


@triton.jit
def tile_block_ids(table_row, first_key, key_end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of keys [first_key, first_key + BLOCK_N): one scalar where a tile lies in one block, else one per key.

    Entries at or past key_end are not read: a table may end there or hold anything. A tile lies in one block if the block
    size is a multiple of BLOCK_N, as tiles start at a multiple of the block size plus a multiple of BLOCK_N.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_row + first_key // BLOCK_SIZE, mask=first_key < key_end, other=0)
    else:
        keys = first_key + tl.arange(0, BLOCK_N)
        return tl.load(table_row + keys // BLOCK_SIZE, mask=keys < key_end, other=0)


@triton.jit
def attend_tile(
    q,  # [BLOCK_M, PADDED_DIM]
    acc,  # [BLOCK_M, PADDED_DIM] float32: sum of p v so far, relative to row_max
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    k_ptr,  # of the kv head
    v_ptr,
    block_ids,  # from tile_block_ids
    first_key,
    key_end,  # keys from here on are not read (only if MASKED)
    query_position,  # [BLOCK_M]: a row sees keys up to and with its own position (only if MASKED)
    scale_log2,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys -> (acc', m', l'):

    m' = max(m, max s);   p = 2^(s - m');   r = 2^(m - m');   l' = l r + sum p;   acc' = acc r + p v
    """
    key = first_key + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, PADDED_DIM)
    if BLOCK_SIZE % BLOCK_N == 0:
        slot = first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        slot = key % BLOCK_SIZE
    # 64 bits: a cache of a large GPU has more than 2^31 elements
    offset = block_ids.to(tl.int64) * stride_block + slot * stride_slot
    k_tile = k_ptr + offset[None, :] + dim[:, None]
    v_tile = v_ptr + offset[:, None] + dim[None, :]
    if MASKED:  # stale slots may hold NaN: values must be read as zero there, for 0 * NaN is NaN
        k = tl.load(k_tile, mask=(key < key_end)[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_tile, mask=(key < key_end)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    else:
        k = tl.load(k_tile, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_tile, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
    if MASKED:
        visible = (key[None, :] <= query_position[:, None]) & (key < key_end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


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
    if query.dtype not in DTYPES or not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"{op}: query, key_cache and value_cache must share one dtype of float32, bfloat16, float16; "
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
