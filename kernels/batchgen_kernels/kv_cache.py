"""Writes into the paged key/value cache: new tokens by slot, and whole blocks for copy-on-write.

key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block (all zero, never
written). kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], of which those are views.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton

COPY_ELEMENTS = 2048  # of a block, by one program


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """key, value [T, num_kv_heads, D] -> cache[slot // block_size, slot % block_size]; a slot of -1 writes nothing."""
    block_size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[t]
            value_cache[slot // block_size, slot % block_size] = value[t]


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As the reference, but every slot must be valid (the engine never emits -1 on this backend), and the first write
    into a block clears the rest of it: attention_torch computes the scores of unused slots before it drops them, and
    what an earlier owner left there might not be finite."""
    block_size = key_cache.shape[1]
    first_slots = slot_mapping[slot_mapping % block_size == 0]
    if len(first_slots) and block_size > 1:
        started = first_slots // block_size
        key_cache.index_fill_(0, started, 0)
        value_cache.index_fill_(0, started, 0)
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def copy_blocks_reference(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy blocks source[i] -> destination[i] in every layer, keys and values. source, destination: [n] int64, disjoint."""
    for s, d in zip(source.tolist(), destination.tolist()):
        kv_cache[:, :, d] = kv_cache[:, :, s]


def copy_blocks_torch(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    kv_cache[:, :, destination] = kv_cache[:, :, source]


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_slot,
    stride_head,
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
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    cell_ok = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + head * stride_head + dim
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=cell_ok)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=cell_ok)
    tl.store(key_cache_ptr + target, key, mask=cell_ok)
    tl.store(value_cache_ptr + target, value, mask=cell_ok)


def write_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As the reference; key and value may be strided views of a fused qkv tensor. No two tokens may share a slot."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if value.shape != key.shape or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"write_kv: key and value [T, num_kv_heads, D] and slot_mapping [T] must agree, "
            f"got {tuple(key.shape)}, {tuple(value.shape)}, {tuple(slot_mapping.shape)}"
        )
    if key_cache.shape[2:] != (num_kv_heads, head_dim) or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"write_kv: caches must be [num_blocks, block_size, {num_kv_heads}, {head_dim}], "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"write_kv: key, value and caches must share one dtype, "
            f"got {key.dtype}, {value.dtype}, {key_cache.dtype}, {value_cache.dtype}"
        )
    if key_cache.stride() != value_cache.stride():
        raise ValueError("write_kv: key_cache and value_cache must have the same strides")
    if key.stride(-1) != 1 or value.stride(-1) != 1 or key_cache.stride(-1) != 1:
        raise ValueError("write_kv: key, value and caches must be dense in their last dimension")
    if num_tokens == 0:
        return
    padded_heads, padded_dim = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim)
    write_kv_kernel[(num_tokens,)](
        key, value, key_cache, value_cache, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
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
    if kv_cache.dim() != 6 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"copy_blocks: kv_cache must be [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], "
            f"got {tuple(kv_cache.shape)}"
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
    block = min(COPY_ELEMENTS, triton.next_power_of_2(size))
    copy_blocks_kernel[(source.numel(), 2 * kv_cache.shape[0], -(-size // block))](
        kv_cache, source.contiguous(), destination.contiguous(), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        SIZE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
