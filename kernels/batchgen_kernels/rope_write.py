"""Everything between the qkv projection and attention, in one launch a layer: QK-norm, rotary embedding, the cache write.

    query = rotary(rms_norm(query, q_norm));   cache[slot] = rotary(rms_norm(key, k_norm)), value

The norms (rms_norm.py, over head_dim) are left out where there are no weights for them, as in Llama. Results are rounded
where the three ops alone round (rms_norm.py, rotary.py, kv_cache.py), so the fusion changes no token.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.float8 import encode_e4m3, row_maximum, row_scale
from batchgen_kernels.kv_cache import as_bytes, check_write, store_heads, write_kv_reference, write_kv_torch
from batchgen_kernels.rms_norm import rms_norm_reference, rms_norm_torch
from batchgen_kernels.rotary import (
    check_rotary,
    load_angles,
    load_pairs,
    rotary_embedding_reference,
    rotary_embedding_torch,
    store_pairs,
)

TILE_ELEMENTS = 1024  # pairs of one program: 16 bytes of 16-bit elements a load and thread


def rope_and_write_kv_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """query [T, num_q_heads, D] in place; key and value [T, num_kv_heads, D] into the cache, after which `key` itself is
    undefined (normalised and rotated, or as it was). The three may be views of one fused tensor.

    q_norm, k_norm: [D], both or neither; eps is theirs. cos, sin, positions, interleaved: see rotary.py. key_cache,
    value_cache, slot_mapping [T], key_scale, value_scale: see kv_cache.py; a token of slot -1 is rotated but not written.
    """
    if q_norm is not None and k_norm is not None:
        query.copy_(rms_norm_reference(query, q_norm, eps))
        key.copy_(rms_norm_reference(key, k_norm, eps))
    rotary_embedding_reference(query, key, cos, sin, positions, interleaved)
    write_kv_reference(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def rope_and_write_kv_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """As the reference, of torch's columns."""
    if q_norm is not None and k_norm is not None:
        rms_norm_torch(query, q_norm, eps, in_place=True)
        rms_norm_torch(key, k_norm, eps, in_place=True)
    rotary_embedding_torch(query, key, cos, sin, positions, interleaved)
    write_kv_torch(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _normalize_and_rotate(
    row,  # pointers to heads, [n, 1]
    row_ok,  # [n, 1]
    weight_ptr,  # or None
    eps,
    c,  # [1, PADDED_HALF]
    s,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """x1, x2 [n, PADDED_HALF] and what does not rotate, [n, PADDED_REST]: float32, but rounded to the dtype of the heads."""
    DTYPE: tl.constexpr = row.dtype.element_ty
    rest_column = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    rest_ok = rest_column < HEAD_DIM
    x1, x2 = load_pairs(row, row_ok, HALF, PADDED_HALF, INTERLEAVED)
    rest = tl.load(row + rest_column, mask=row_ok & rest_ok, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(x1 * x1 + x2 * x2, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = weight_ptr + tl.zeros([1, 1], tl.int32)
        w1, w2 = load_pairs(weight, tl.full([1, 1], 1, tl.int1), HALF, PADDED_HALF, INTERLEAVED)
        w_rest = tl.load(weight + rest_column, mask=rest_ok, other=0.0).to(tl.float32)
        x1 = _rounded(w1 * _rounded(x1 * scale, DTYPE), DTYPE)
        x2 = _rounded(w2 * _rounded(x2 * scale, DTYPE), DTYPE)
        rest = _rounded(w_rest * _rounded(rest * scale, DTYPE), DTYPE)
    return _rounded(x1 * c - x2 * s, DTYPE), _rounded(x2 * c + x1 * s, DTYPE), rest


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "positions_ptr"])
def rope_and_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_norm_ptr,  # or None
    k_norm_ptr,
    eps,
    key_scale_ptr,  # or None
    value_scale_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    stride_cos,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NUM_Q_TILES: tl.constexpr,
):
    """One token and BLOCK_HEADS of its heads: of the query, or (tiles from NUM_Q_TILES on) of key and value."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    c, s = load_angles(cos_ptr, sin_ptr, position, stride_cos, HALF, PADDED_HALF)
    lane = tl.arange(0, BLOCK_HEADS)
    rest_column = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    if tile < NUM_Q_TILES:
        head = (tile * BLOCK_HEADS + lane)[:, None].to(tl.int64)
        head_ok = head < NUM_Q_HEADS
        row = q_ptr + token * stride_q_token + head * stride_q_head
        x1, x2, rest = _normalize_and_rotate(
            row, head_ok, q_norm_ptr, eps, c, s, HEAD_DIM, HALF, PADDED_HALF, PADDED_REST, INTERLEAVED
        )
        store_pairs(row, head_ok, x1, x2, HALF, PADDED_HALF, INTERLEAVED)
        if q_norm_ptr is not None:
            tl.store(row + rest_column, rest.to(q_ptr.dtype.element_ty), mask=head_ok & (rest_column < HEAD_DIM))
        return
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = ((tile - NUM_Q_TILES) * BLOCK_HEADS + lane).to(tl.int64)
    head_ok = head < NUM_KV_HEADS
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = (block * stride_block + offset * stride_slot + head * stride_head)[:, None]
    scale_target = block * stride_scale_block + offset * stride_scale_slot + head

    row = k_ptr + token * stride_k_token + head[:, None] * stride_k_head
    x1, x2, rest = _normalize_and_rotate(
        row, head_ok[:, None], k_norm_ptr, eps, c, s, HEAD_DIM, HALF, PADDED_HALF, PADDED_REST, INTERLEAVED
    )
    if key_scale_ptr is not None:
        largest = tl.maximum(tl.maximum(row_maximum(x1), row_maximum(x2)), row_maximum(rest))
        scale, inverse = row_scale(largest)
        tl.store(key_scale_ptr + scale_target, scale, mask=head_ok)
        x1, x2 = encode_e4m3(x1 * inverse[:, None]), encode_e4m3(x2 * inverse[:, None])
        rest = encode_e4m3(rest * inverse[:, None])
    key_row = key_cache_ptr + target
    store_pairs(key_row, head_ok[:, None], x1, x2, HALF, PADDED_HALF, INTERLEAVED)
    tl.store(
        key_row + rest_column, rest.to(key_cache_ptr.dtype.element_ty), mask=head_ok[:, None] & (rest_column < HEAD_DIM)
    )

    dim = tl.arange(0, PADDED_DIM)[None, :]
    value_row = v_ptr + token * stride_v_token + head[:, None] * stride_v_head
    value = tl.load(value_row + dim, mask=head_ok[:, None] & (dim < HEAD_DIM), other=0.0)
    store_heads(value_cache_ptr, value_scale_ptr, target, scale_target, head_ok, dim, dim < HEAD_DIM, value)


def rope_and_write_kv_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """As the reference; leaves `key` as it was. No two tokens may share a slot."""
    op = "rope_and_write_kv"
    check_rotary(op, query, key, cos, sin, positions)
    check_write(op, key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    num_tokens, num_q_heads, head_dim = query.shape
    if query.dtype != key.dtype:
        raise ValueError(f"{op}: query and key must share one dtype, got {query.dtype} and {key.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: give both q_norm and k_norm, or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (head_dim,) or not weight.is_contiguous()):
            raise ValueError(f"{op}: {name} must be contiguous [{head_dim}], got {tuple(weight.shape)}")
    if num_tokens == 0:
        return
    num_kv_heads, half = key.shape[1], cos.shape[-1]
    padded_half = triton.next_power_of_2(half)
    block_heads = max(1, min(triton.next_power_of_2(max(num_q_heads, num_kv_heads)), TILE_ELEMENTS // padded_half))
    num_q_tiles, num_kv_tiles = -(-num_q_heads // block_heads), -(-num_kv_heads // block_heads)
    scale_strides = (0, 0) if key_scale is None else key_scale.stride()[:2]
    rope_and_write_kv_kernel[(num_tokens, num_q_tiles + num_kv_tiles)](
        query, key, value, as_bytes(key_cache), as_bytes(value_cache), slot_mapping, cos, sin, positions,
        q_norm, k_norm, eps, key_scale, value_scale,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *key_cache.stride()[:3], *scale_strides, cos.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim), HALF=half, PADDED_HALF=padded_half,
        PADDED_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)), INTERLEAVED=interleaved,
        BLOCK_SIZE=key_cache.shape[1], BLOCK_HEADS=block_heads, NUM_Q_TILES=num_q_tiles,
        num_warps=min(4, max(1, block_heads * padded_half // 256)),
    )  # fmt: skip
