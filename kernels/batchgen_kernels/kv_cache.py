"""Writes into the paged key/value cache: new tokens by slot, and whole blocks for copy-on-write.

key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block (all zero, never
written). kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], of which those are views.

A cache of float8_e4m3fn has scales key_scale and value_scale, [num_blocks, block_size, num_kv_heads] float32: one for each
token and head, see float8.py.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.float8 import E4M3, encode_e4m3, quantize_rows, row_maximum, row_scale

COPY_BYTES = 4096  # of a block, by one program


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """key, value [T, num_kv_heads, D] -> cache[slot // block_size, slot % block_size]; a slot of -1 writes nothing."""
    block_size = key_cache.shape[1]
    for x, cache, scales in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            at = (slot // block_size, slot % block_size)
            if scales is None:
                cache[at] = x[t]
            else:
                cache[at], scales[at] = quantize_rows(x[t])


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    for x, cache, scales in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if scales is None:
            cache.flatten(0, 1).index_copy_(0, slot_mapping, x)
        else:
            codes, scale = quantize_rows(x)
            cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slot_mapping, codes.view(torch.uint8))
            scales.flatten(0, 1).index_copy_(0, slot_mapping, scale)


def copy_blocks_reference(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy blocks source[i] -> destination[i] in every layer, keys and values. source, destination: [n] int64, disjoint.

    kv_cache: [num_layers, 2, num_blocks, ...] of any dtype, so the scales of a float8 cache are copied by a second call.
    """
    for s, d in zip(source.tolist(), destination.tolist()):
        kv_cache[:, :, d] = kv_cache[:, :, s]


def copy_blocks_torch(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    kv_cache[:, :, destination] = kv_cache[:, :, source]


@triton.jit
def store_heads(cache_ptr, scale_ptr, cache_row, scale_row, row_ok, column, column_ok, x):
    """Rows [heads, D] of one token into its slot, as they are or, where there is a scale_ptr, as codes and scales.

    cache_row [heads, 1] and scale_row [heads]: element offsets of the rows in the cache and in its scales.
    """
    if scale_ptr is not None:
        scale, inverse = row_scale(row_maximum(x.to(tl.float32)))
        tl.store(scale_ptr + scale_row, scale, mask=row_ok)
        x = encode_e4m3(x.to(tl.float32) * inverse[:, None])
    tl.store(cache_ptr + cache_row + column, x, mask=row_ok[:, None] & column_ok)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    key_scale_ptr,  # or None
    value_scale_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, PADDED_HEADS).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    head_ok, dim_ok = head < NUM_KV_HEADS, dim < HEAD_DIM
    cell_ok = head_ok[:, None] & dim_ok
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = (block * stride_block + offset * stride_slot + head * stride_head)[:, None]
    scale_row = block * stride_scale_block + offset * stride_scale_slot + head
    key_row, value_row = (
        token * stride_key_token + head * stride_key_head,
        token * stride_value_token + head * stride_value_head,
    )
    key = tl.load(key_ptr + key_row[:, None] + dim, mask=cell_ok, other=0.0)
    value = tl.load(value_ptr + value_row[:, None] + dim, mask=cell_ok, other=0.0)
    store_heads(key_cache_ptr, key_scale_ptr, row, scale_row, head_ok, dim, dim_ok, key)
    store_heads(value_cache_ptr, value_scale_ptr, row, scale_row, head_ok, dim, dim_ok, value)


def check_write(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """ValueError in the name of `op` for what the write cannot take."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if value.shape != key.shape or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"{op}: key and value [T, num_kv_heads, D] and slot_mapping [T] must agree, "
            f"got {tuple(key.shape)}, {tuple(value.shape)}, {tuple(slot_mapping.shape)}"
        )
    if key_cache.shape[2:] != (num_kv_heads, head_dim) or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{op}: caches must be [num_blocks, block_size, {num_kv_heads}, {head_dim}], "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"{op}: key_cache and value_cache must have the same strides")
    if key.stride(-1) != 1 or value.stride(-1) != 1 or key_cache.stride(-1) != 1:
        raise ValueError(f"{op}: key, value and caches must be dense in their last dimension")
    of_cache = E4M3 if key_cache.dtype == E4M3 else key.dtype
    if key.dtype == E4M3 or key.dtype != value.dtype or not key_cache.dtype == value_cache.dtype == of_cache:
        raise ValueError(
            f"{op}: key, value and caches must share one dtype, or the caches be float8_e4m3fn, "
            f"got {key.dtype}, {value.dtype}, {key_cache.dtype}, {value_cache.dtype}"
        )
    if (of_cache == E4M3) != (key_scale is not None) or (key_scale is None) != (value_scale is None):
        raise ValueError(
            f"{op}: key_scale and value_scale belong to caches of float8_e4m3fn, got caches of {key_cache.dtype}"
        )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and (scale.shape != key_cache.shape[:3] or scale.dtype != torch.float32):
            raise ValueError(
                f"{op}: {name} must be {list(key_cache.shape[:3])} float32, got {list(scale.shape)} {scale.dtype}"
            )
        if scale is not None and (scale.stride(-1) != 1 or scale.stride() != key_scale.stride()):  # type: ignore[union-attr]
            raise ValueError(f"{op}: key_scale and value_scale must have the same strides, dense in the last dimension")


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """float8 as uint8, since Triton has no float8 of this format on every GPU; others as they are."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """As the reference; key and value may be strided views of a fused qkv tensor. No two tokens may share a slot."""
    check_write("write_kv", key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    padded_heads, padded_dim = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim)
    scale_strides = (0, 0) if key_scale is None else key_scale.stride()[:2]
    write_kv_kernel[(num_tokens,)](
        key, value, as_bytes(key_cache), as_bytes(value_cache), slot_mapping, key_scale, value_scale,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3], *scale_strides,
        NUM_KV_HEADS=num_kv_heads, PADDED_HEADS=padded_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        BLOCK_SIZE=key_cache.shape[1],
        num_warps=min(4, max(1, padded_heads * padded_dim // 512)),  # few enough for 16 bytes a thread
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["source_ptr", "destination_ptr"])
def copy_blocks_kernel(
    cache_ptr,
    source_ptr,
    destination_ptr,
    stride_layer,
    stride_kv,
    stride_block,
    SIZE: tl.constexpr,  # elements of a block: block_size * num_kv_heads * head_dim
    BLOCK: tl.constexpr,
):
    """One part of one block of the keys or values of one layer."""
    source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
    destination = tl.load(destination_ptr + tl.program_id(0)).to(tl.int64)
    plane = (tl.program_id(1) // 2).to(tl.int64) * stride_layer + (tl.program_id(1) % 2).to(tl.int64) * stride_kv
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(cache_ptr + plane + source * stride_block + element, mask=element < SIZE)
    tl.store(cache_ptr + plane + destination * stride_block + element, x, mask=element < SIZE)


def copy_blocks_triton(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """As the reference: every layer in one launch."""
    if kv_cache.dim() < 4 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"copy_blocks: kv_cache must be [num_layers, 2, num_blocks, block_size, ...], got {tuple(kv_cache.shape)}"
        )
    if not kv_cache[0, 0, 0].is_contiguous():
        raise ValueError(f"copy_blocks: a block must be contiguous, got strides {kv_cache.stride()}")
    if source.shape != destination.shape or source.dim() != 1:
        raise ValueError(
            f"copy_blocks: source and destination must be [n] alike, "
            f"got {tuple(source.shape)} and {tuple(destination.shape)}"
        )
    if source.numel() == 0:
        return
    size = kv_cache[0, 0, 0].numel()
    block = min(COPY_BYTES // kv_cache.itemsize, triton.next_power_of_2(size))
    copy_blocks_kernel[(source.numel(), 2 * kv_cache.shape[0], -(-size // block))](
        as_bytes(kv_cache), source.contiguous(), destination.contiguous(), *kv_cache.stride()[:3],
        SIZE=size, BLOCK=block, num_warps=max(1, block * kv_cache.itemsize // 1024),  # 32 bytes a thread
    )  # fmt: skip
