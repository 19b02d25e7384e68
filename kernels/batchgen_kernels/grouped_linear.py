"""Grouped matrix products for mixtures of experts: each token is multiplied with the weights of the experts it was sent to.

A *pair* p = t * k + c is choice c of token t, expert_ids[t, c]. With the weights [E, N, K] of E experts:
    grouped_linear     y[p] = weight[expert of p] x[p // k]      (or x[p], if x has a row for each pair)  times pair_scale[p]
    combine_experts    out[t] = sum_c y[t * k + c]               in the order of the choices, so without atomics

`route_tokens` sorts the pairs by expert and pads each expert's run to whole tiles, on the device and with shapes that depend
on nothing but shapes: at most T k + E (block_t - 1) places. As in linear.py the product is y^T = w x^T, so the channels fill
the rows that Hopper's warpgroup instruction needs, and a tile may be as few as 16 tokens.

A pair whose expert is -1 has none: its row of y is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.launch import DTYPES, current_architecture
from batchgen_kernels.linear_launch import CLASSES, LinearLaunch, linear_launch
from batchgen_kernels.paged_tile import dot_precision


class Routing(NamedTuple):
    """Pairs by expert. P places, a multiple of block_t; places and tiles past the end hold -1."""

    pairs: torch.Tensor  # [P] int32: pair of each place
    tile_experts: torch.Tensor  # [P / block_t] int32: expert of each tile
    block_t: int


def count_tiles(num_pairs: int, num_experts: int, block_t: int) -> int:
    """Tiles that suffice however the pairs fall: an expert with pairs pads its run by less than a tile."""
    return (num_pairs + min(num_experts, num_pairs) * (block_t - 1)) // block_t


def route_tokens(expert_ids: torch.Tensor, num_experts: int, block_t: int) -> Routing:
    """expert_ids [T, k] int32 or int64, below num_experts, -1 for none. Pairs of an expert stay in order.
    Does not wait for the device."""
    experts = expert_ids.flatten().long()
    num_pairs, device = experts.numel(), experts.device
    num_tiles = count_tiles(num_pairs, num_experts, block_t)
    experts = torch.where(experts < 0, num_experts, experts)  # sorted behind all others
    order = torch.argsort(experts, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    tiles_of = (counts[:-1] + block_t - 1) // block_t
    tile_end = tiles_of.cumsum(0)
    first_tile = torch.cat([tile_end - tiles_of, tile_end[-1:]])
    rank = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[experts[order]]  # in its expert's run
    place = first_tile[experts[order]] * block_t + rank
    place = torch.where(experts[order] < num_experts, place, num_tiles * block_t)  # one more place, cut off below
    pairs = torch.full((num_tiles * block_t + 1,), -1, dtype=torch.int32, device=device)
    pairs.scatter_(0, place, order.int())
    tile = torch.arange(num_tiles, device=device)
    tile_experts = torch.searchsorted(tile_end, tile, right=True)
    return Routing(pairs[:-1], torch.where(tile < tile_end[-1], tile_experts, -1).int(), block_t)


# ---- reference and torch --------------------------------------------------------------------------------------------


def _grouped(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, pair_scale: torch.Tensor | None
) -> torch.Tensor:
    """In the dtype of x, which is that of the sums."""
    num_choices = expert_ids.shape[1]
    experts = expert_ids.flatten()
    rows = x if x.shape[0] == experts.numel() else x.repeat_interleave(num_choices, 0)
    out = x.new_zeros(experts.numel(), weight.shape[1])
    for expert in range(weight.shape[0]):
        mine = (experts == expert).nonzero()[:, 0]
        out[mine] = rows[mine] @ weight[expert].to(x.dtype).T
    if pair_scale is None:
        return out
    return out * pair_scale.flatten().where(experts >= 0, 0)[:, None]  # a scale of no expert may be NaN


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, pair_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], or [T * k, K] with a row for each pair; weight [E, N, K] of x's dtype; expert_ids [T, k] int32 or int64;
    pair_scale [T, k] float32 -> [T * k, N] of x's dtype."""
    return _grouped(x.double(), weight, expert_ids, pair_scale).to(x.dtype)


def grouped_linear_torch(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, pair_scale: torch.Tensor | None = None
) -> torch.Tensor:
    return _grouped(x.float(), weight, expert_ids, pair_scale).to(x.dtype)


def combine_experts_reference(y: torch.Tensor, num_choices: int) -> torch.Tensor:
    """y [T * k, N] -> [T, N] of y's dtype: sums of k neighbours, in float32."""
    out = torch.zeros(y.shape[0] // num_choices, y.shape[1], device=y.device)
    for choice in range(num_choices):
        out += y[choice::num_choices].float()
    return out.to(y.dtype)


combine_experts_torch = combine_experts_reference


# ---- triton ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["pair_ptr", "tile_expert_ptr", "pair_scale_ptr"])
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,  # [T * k, N]
    pair_ptr,
    tile_expert_ptr,
    pair_scale_ptr,  # [T * k] float32, or None
    stride_x,
    stride_expert,
    stride_weight,
    stride_out,
    CHOICES: tl.constexpr,  # pairs that read one row of x
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of channels of one expert, and of its pairs. Tiles of pairs are neighbours: they share the weights."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # a place without a pair and a channel past the end read another one's data, so that no load needs a mask
    x_row = x_ptr + (tl.maximum(pair, 0) // CHOICES).to(tl.int64) * stride_x
    safe_channel = tl.minimum(channel, NUM_OUT - 1).to(tl.int64)
    weight_row = weight_ptr + expert.to(tl.int64) * stride_expert + safe_channel * stride_weight
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    column = tl.arange(0, BLOCK_K)
    for first in range(0, NUM_IN, BLOCK_K):
        k = first + column
        if NUM_IN % BLOCK_K == 0:
            w = tl.load(weight_row[:, None] + k[None, :])
            x = tl.load(x_row[None, :] + k[:, None])
        else:
            w = tl.load(weight_row[:, None] + k[None, :], mask=(k < NUM_IN)[None, :], other=0.0)
            x = tl.load(x_row[None, :] + k[:, None], mask=(k < NUM_IN)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    if pair_scale_ptr is not None:
        acc *= tl.load(pair_scale_ptr + pair, mask=pair >= 0, other=0.0)[None, :]
    cell_ok = (channel < NUM_OUT)[:, None] & (pair >= 0)[None, :]
    out_tile = out_ptr + pair.to(tl.int64)[None, :] * stride_out + channel[:, None]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=cell_ok)


@triton.jit
def combine_experts_kernel(
    y_ptr, out_ptr, stride_y, stride_out, CHOICES: tl.constexpr, NUM_OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < NUM_OUT
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        acc += tl.load(y_ptr + (token * CHOICES + choice) * stride_y + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + channel, acc.to(out_ptr.dtype.element_ty), mask=there)


def grouped_launch(dtype: torch.dtype, num_pairs: int, num_experts: int) -> LinearLaunch:
    """By how many pairs an expert has on average, which shapes tell."""
    return linear_launch(current_architecture(), dtype, "plain", min(num_pairs // num_experts + 1, CLASSES[-1]))


def grouped_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    pair_scale: torch.Tensor | None = None,
    routing: Routing | None = None,
    launch: LinearLaunch | None = None,
) -> torch.Tensor:
    """As the reference. routing: from route_tokens, to share it between the products of a layer; with the launch
    (grouped_launch) whose block_t it was made for."""
    if x.dim() != 2 or weight.dim() != 3 or x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"grouped_linear: x [T, K] and weight [E, N, K] must share one dtype of float32, bfloat16, float16, "
            f"got {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if expert_ids.dim() != 2 or expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"grouped_linear: expert_ids must be [T, k] int32 or int64, got {tuple(expert_ids.shape)} {expert_ids.dtype}"
        )
    num_pairs, num_choices = expert_ids.numel(), expert_ids.shape[1]
    if x.shape[0] not in (expert_ids.shape[0], num_pairs):
        raise ValueError(f"grouped_linear: x must have a row for each of {expert_ids.shape[0]} tokens or {num_pairs} pairs")
    num_experts, num_out, num_in = weight.shape
    if num_experts == 0:
        raise ValueError("grouped_linear: the weight must have at least one expert")
    if x.shape[1] != num_in:
        raise ValueError(f"grouped_linear: x has {x.shape[1]} inputs, the weight {num_in}")
    if x.stride(1) != 1 or weight.stride(2) != 1:
        raise ValueError("grouped_linear: x and weight must be dense in their last dimension")
    if pair_scale is not None and (
        pair_scale.shape != expert_ids.shape or pair_scale.dtype != torch.float32 or not pair_scale.is_contiguous()
    ):
        raise ValueError(f"grouped_linear: pair_scale must be contiguous float32 {list(expert_ids.shape)}")
    out = torch.zeros((num_pairs, num_out), dtype=x.dtype, device=x.device)  # pairs without an expert stay zero
    if num_pairs == 0:
        return out
    launch = launch or grouped_launch(x.dtype, num_pairs, num_experts)
    routing = routing or route_tokens(expert_ids, num_experts, launch.block_t)
    if routing.block_t != launch.block_t:
        raise ValueError(
            f"grouped_linear: routed in tiles of {routing.block_t} pairs, launched in tiles of {launch.block_t}"
        )
    num_tiles = count_tiles(num_pairs, num_experts, launch.block_t)
    if routing.tile_experts.shape[0] != num_tiles or routing.pairs.shape[0] != num_tiles * launch.block_t:
        raise ValueError(
            f"grouped_linear: routing of {routing.tile_experts.shape[0]} tiles, which is not of {num_pairs} pairs and "
            f"{num_experts} experts"
        )
    grouped_linear_kernel[(routing.tile_experts.shape[0], -(-num_out // launch.block_n))](
        x, weight, out, routing.pairs, routing.tile_experts, pair_scale,
        x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        CHOICES=num_choices if x.shape[0] == expert_ids.shape[0] else 1, NUM_IN=num_in, NUM_OUT=num_out,
        BLOCK_N=launch.block_n, BLOCK_T=launch.block_t, BLOCK_K=launch.block_k, PRECISION=dot_precision(x.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return out


def combine_experts_triton(y: torch.Tensor, num_choices: int) -> torch.Tensor:
    if y.dim() != 2 or num_choices < 1 or y.shape[0] % num_choices or y.stride(1) != 1:
        raise ValueError(
            f"combine_experts: y must be [T * {num_choices}, N], dense in its last dimension, got {tuple(y.shape)}"
        )
    num_tokens, num_out = y.shape[0] // num_choices, y.shape[1]
    out = torch.empty((num_tokens, num_out), dtype=y.dtype, device=y.device)
    if num_tokens == 0:
        return out
    block = min(2048, triton.next_power_of_2(num_out))
    combine_experts_kernel[(num_tokens, -(-num_out // block))](
        y, out, y.stride(0), out.stride(0), CHOICES=num_choices, NUM_OUT=num_out, BLOCK=block, num_warps=4
    )
    return out
