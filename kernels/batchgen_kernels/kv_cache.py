"""Writes into the paged key/value cache: new tokens by slot, and whole blocks for copy-on-write.

key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]; block 0 is the null block (all zero, never
written). kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], of which those are views.
"""

from __future__ import annotations

import torch


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
    """As the reference, but every slot must be valid (the engine never emits -1 on this backend)."""
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def copy_blocks_reference(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy blocks source[i] -> destination[i] in every layer, keys and values. source, destination: [n] int64, disjoint."""
    for s, d in zip(source.tolist(), destination.tolist()):
        kv_cache[:, :, d] = kv_cache[:, :, s]


def copy_blocks_torch(kv_cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    kv_cache[:, :, destination] = kv_cache[:, :, source]
