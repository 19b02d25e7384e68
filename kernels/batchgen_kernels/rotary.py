"""Rotary position embedding (Su et al. 2021).

For each head, with R = 2 * cos.shape[1] <= head_dim and pair i of its first R elements (x1, x2):
    x1' = x1 * cos_i - x2 * sin_i;   x2' = x2 * cos_i + x1 * sin_i;   elements from R on are left as they are.
Pair i is elements (i, i + R / 2), the half-split layout of GPT-NeoX and Llama, or, with `interleaved`, elements
(2 i, 2 i + 1), that of GPT-J and ChatGLM.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton

TILE_ELEMENTS = 1024  # heads are rotated in tiles of this many pairs


def pairs(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second elements of the pairs of x [..., D]: [..., half] each."""
    rotated = x[..., : 2 * half]
    return (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])


def rotary_embedding_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """In place. query [T, num_q_heads, D], key [T, num_kv_heads, D] (may be strided views), cos/sin [max_positions, R/2]
    float32, positions [T] int64."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    for x in (query, key):
        x1, x2 = pairs(x, cos.shape[-1], interleaved)
        y1, y2 = x1.float() * c - x2.float() * s, x2.float() * c + x1.float() * s
        x1.copy_(y1)
        x2.copy_(y2)


def rotary_embedding_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """As the reference, with one temporary instead of six."""
    if query.dtype != torch.float32:
        return rotary_embedding_reference(query, key, cos, sin, positions, interleaved)
    c, s = cos[positions][:, None], sin[positions][:, None]
    for x in (query, key):
        x1, x2 = pairs(x, cos.shape[-1], interleaved)
        y1 = (x1 * c).addcmul_(x2, s, value=-1)
        x2.mul_(c).addcmul_(x1, s)
        x1.copy_(y1)


@triton.jit
def load_pairs(row, row_ok, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """row: pointers to rows, [n, 1]; row_ok [n, 1]. Returns x1 and x2 of all pairs, [n, PADDED_HALF] float32 each."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED_HALF)[None, :]
        x = tl.load(row + column, mask=row_ok & (column < 2 * HALF), other=0.0)
        x1, x2 = tl.split(tl.reshape(x, [row.shape[0], PADDED_HALF, 2]))
    else:
        pair = tl.arange(0, PADDED_HALF)[None, :]
        x1 = tl.load(row + pair, mask=row_ok & (pair < HALF), other=0.0)
        x2 = tl.load(row + HALF + pair, mask=row_ok & (pair < HALF), other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def store_pairs(row, row_ok, x1, x2, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of load_pairs."""
    x1, x2 = x1.to(row.dtype.element_ty), x2.to(row.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED_HALF)[None, :]
        x = tl.reshape(tl.join(x1, x2), [row.shape[0], 2 * PADDED_HALF])
        tl.store(row + column, x, mask=row_ok & (column < 2 * HALF))
    else:
        pair = tl.arange(0, PADDED_HALF)[None, :]
        tl.store(row + pair, x1, mask=row_ok & (pair < HALF))
        tl.store(row + HALF + pair, x2, mask=row_ok & (pair < HALF))


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, stride_cos, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """cos and sin of one position, [1, PADDED_HALF] float32."""
    pair = tl.arange(0, PADDED_HALF)[None, :]
    c = tl.load(cos_ptr + position * stride_cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + position * stride_cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _rotate_heads(
    x_row,
    c,  # [1, PADDED_HALF]
    s,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    for first in range(0, NUM_HEADS, BLOCK_HEADS):
        head = (first + tl.arange(0, BLOCK_HEADS))[:, None]
        row, head_ok = x_row + head.to(tl.int64) * stride_head, head < NUM_HEADS
        x1, x2 = load_pairs(row, head_ok, HALF, PADDED_HALF, INTERLEAVED)
        store_pairs(row, head_ok, x1 * c - x2 * s, x2 * c + x1 * s, HALF, PADDED_HALF, INTERLEAVED)


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
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One token: its row of cos and sin is read once for all heads."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    c, s = load_angles(cos_ptr, sin_ptr, position, stride_cos, HALF, PADDED_HALF)
    q_row, k_row = q_ptr + token * stride_q_token, k_ptr + token * stride_k_token
    _rotate_heads(q_row, c, s, stride_q_head, NUM_Q_HEADS, HALF, PADDED_HALF, INTERLEAVED, BLOCK_HEADS)
    _rotate_heads(k_row, c, s, stride_k_head, NUM_KV_HEADS, HALF, PADDED_HALF, INTERLEAVED, BLOCK_HEADS)


def check_rotary(
    op: str, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """ValueError in the name of `op` for what cannot be rotated."""
    num_tokens, _, head_dim = query.shape
    if key.shape[0] != num_tokens or key.shape[-1] != head_dim or positions.shape != (num_tokens,):
        raise ValueError(
            f"{op}: query [T, num_q_heads, D], key [T, num_kv_heads, D] and positions [T] must agree, "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(positions.shape)}"
        )
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"{op}: cos rotates {2 * cos.shape[-1]} elements, but head_dim is {head_dim}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise ValueError(f"{op}: cos and sin must be [max_positions, R / 2] alike, dense in the last dimension")
    if query.stride(-1) != 1 or key.stride(-1) != 1:
        raise ValueError(f"{op}: query and key must be dense in their last dimension")


def rotary_embedding_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """In place, as the reference. A position must lie inside the table: on a GPU nothing checks it."""
    check_rotary("rotary_embedding", query, key, cos, sin, positions)
    num_tokens, num_q_heads, _ = query.shape
    if num_tokens == 0:
        return
    half = cos.shape[-1]
    padded_half = triton.next_power_of_2(half)
    most_heads = triton.next_power_of_2(max(num_q_heads, key.shape[1]))
    rotary_embedding_kernel[(num_tokens,)](
        query, key, cos, sin, positions, query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=key.shape[1], HALF=half, PADDED_HALF=padded_half, INTERLEAVED=interleaved,
        BLOCK_HEADS=max(1, min(most_heads, TILE_ELEMENTS // padded_half)), num_warps=4,
    )  # fmt: skip
