"""Paged causal attention on a GPU: decode and prefill requests of one step, each by its own kernel.

The equation is that of attention_reference.py. One merged kernel for both would need one tile shape for both, and loses 2x.
"""

from __future__ import annotations

import torch

from batchgen_kernels.attention_reference import AttentionPlan
from batchgen_kernels.launch import current_architecture, decode_launch, num_processors, prefill_launch
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.paged_decode import choose_num_splits, paged_decode
from batchgen_kernels.paged_prefill import paged_prefill
from batchgen_kernels.paged_tile import MAX_TILE_HEADS


def plan_attention_triton(metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
    """plan(query [T, num_q_heads, D], key_cache, value_cache, scale) -> [T, num_q_heads, D] of query's dtype.

    Reads no shared-prefix groups (`shares_prefix_reads` is False): metadata that has some is refused. Nothing here waits
    for the device. Shapes and dtypes are checked at the first layer of a step only; the others are like it.
    """
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    num_groups = metadata.group_query_start.numel()
    if num_groups:
        raise ValueError(
            f"attention of backend triton reads no shared-prefix groups, but the metadata has {num_groups}; "
            "build it without groups and with kv_start all zero (see Ops.shares_prefix_reads)"
        )
    num_decodes = metadata.decode_requests.shape[0]
    architecture = current_architecture()
    num_tiles = num_kv_heads * -(-(num_q_heads // num_kv_heads) // MAX_TILE_HEADS)
    num_splits = choose_num_splits(num_decodes * num_tiles, metadata.max_seq_len, num_processors(metadata.seq_lens.device))
    checked = False

    def run(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> torch.Tensor:
        nonlocal checked
        if not checked:
            expected = (metadata.block_size, num_kv_heads, head_dim)
            if tuple(key_cache.shape[1:]) != expected or tuple(query.shape[1:]) != (num_q_heads, head_dim):
                raise ValueError(
                    f"planned for query {('T', num_q_heads, head_dim)} and cache {('num_blocks', *expected)}, "
                    f"got {tuple(query.shape)} and {tuple(key_cache.shape)}"
                )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
        paged_decode(
            query, key_cache, value_cache, *index, metadata.decode_requests, metadata.max_seq_len, scale, out,
            num_splits=num_splits, launch=decode_launch(architecture, head_dim, query.dtype), check=not checked,
        )  # fmt: skip
        paged_prefill(
            query, key_cache, value_cache, *index, metadata.prefill_requests, metadata.max_query_len, scale, out,
            launch=prefill_launch(architecture, head_dim, query.dtype), check=not checked,
        )  # fmt: skip
        checked = True
        return out

    return run


plan_attention_triton.shares_prefix_reads = False  # type: ignore[attr-defined]
