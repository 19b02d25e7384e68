"""Rotary position embedding (Su et al. 2021), the half-split layout of GPT-NeoX and Llama.

For each head, with R = 2 * cos.shape[1] <= head_dim and x1, x2 the halves of the first R elements:
    x1' = x1 * cos - x2 * sin;   x2' = x2 * cos + x1 * sin;   elements from R on are left as they are.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton

TILE_ELEMENTS = 1024  # heads are rotated in tiles of this many pairs


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat([(x1 * c - x2 * s).to(x.dtype), (x2 * c + x1 * s).to(x.dtype), rest], dim=-1)


def rotary_embedding_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """In place. query [T, num_q_heads, D], key [T, num_kv_heads, D] (may be strided views), cos/sin [max_positions, R/2]
    float32, positions [T] int64."""
    query.copy_(_rotate(query, cos[positions], sin[positions]))
    key.copy_(_rotate(key, cos[positions], sin[positions]))


def rotary_embedding_torch(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """As the reference, with one temporary instead of six."""
    half = cos.shape[-1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    for x in (query, key):
        x1, x2 = x[..., :half], x[..., half : 2 * half]
        if x.dtype != torch.float32:
            y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
            x1.copy_(y1)
            x2.copy_(y2)
            continue
        y1 = (x1 * c).addcmul_(x2, s, value=-1)
        x2.mul_(c).addcmul_(x1, s)
        x1.copy_(y1)


@triton.jit
def _rotate_heads(
    x_row,
    c,  # [1, PADDED_HALF]
    s,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    pair = tl.arange(0, PADDED_HALF)
    for first in range(0, NUM_HEADS, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        cell_ok = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        x = x_row + head[:, None] * stride_head + pair[None, :]
        x1 = tl.load(x, mask=cell_ok, other=0.0).to(tl.float32)
        x2 = tl.load(x + HALF, mask=cell_ok, other=0.0).to(tl.float32)
        tl.store(x, (x1 * c - x2 * s).to(x_row.dtype.element_ty), mask=cell_ok)
        tl.store(x + HALF, (x2 * c + x1 * s).to(x_row.dtype.element_ty), mask=cell_ok)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def rotary_embedding_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_cos,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One token: its row of cos and sin is read once for all heads."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    c = tl.load(cos_ptr + position * stride_cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin_ptr + position * stride_cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(q_ptr + token * stride_q_token, c, s, stride_q_head, NUM_Q_HEADS, HALF, PADDED_HALF, BLOCK_HEADS)
    _rotate_heads(k_ptr + token * stride_k_token, c, s, stride_k_head, NUM_KV_HEADS, HALF, PADDED_HALF, BLOCK_HEADS)


def rotary_embedding_triton(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """In place, as the reference. A position must lie inside the table: on a GPU nothing checks it."""
    num_tokens, num_q_heads, head_dim = query.shape
    half = cos.shape[-1]
    if key.shape[0] != num_tokens or key.shape[-1] != head_dim or positions.shape != (num_tokens,):
        raise ValueError(
            f"rotary_embedding: query [T, num_q_heads, D], key [T, num_kv_heads, D] and positions [T] must agree, "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(positions.shape)}"
        )
    if 2 * half > head_dim:
        raise ValueError(f"rotary_embedding: cos rotates {2 * half} elements, but head_dim is {head_dim}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise ValueError("rotary_embedding: cos and sin must be [max_positions, R / 2] alike, dense in the last dimension")
    if query.stride(-1) != 1 or key.stride(-1) != 1:
        raise ValueError("rotary_embedding: query and key must be dense in their last dimension")
    if num_tokens == 0:
        return
    padded_half = triton.next_power_of_2(half)
    most_heads = triton.next_power_of_2(max(num_q_heads, key.shape[1]))
    rotary_embedding_kernel[(num_tokens,)](
        query, key, cos, sin, positions, query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=key.shape[1], HALF=half, PADDED_HALF=padded_half,
        BLOCK_HEADS=max(1, min(most_heads, TILE_ELEMENTS // padded_half)), num_warps=4,
    )  # fmt: skip
