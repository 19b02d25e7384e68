"""Paged causal attention as a plain loop over requests: the oracle of every attention kernel.

For query token i (0-based, of n) of a request with `seq_len` tokens in the cache, its position is p = seq_len - n + i:
    out = softmax(q . K[0..p] * scale) V[0..p]
with query head h reading key/value head h // (num_q_heads / num_kv_heads). Ignores groups: a group only says how the
same keys may be read once, so an implementation that shares reads must give this same result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen_kernels.metadata import AttentionMetadata

AttentionPlan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def plan_attention_reference(
    metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> AttentionPlan:
    """Everything that does not differ between layers is done here; the plan is then called once a layer:

    plan(query [T, num_q_heads, D], key_cache, value_cache, scale) -> [T, num_q_heads, D] of query's dtype.
    """
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")

    def run(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.empty_like(query)
        starts, lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        for r, seq_len in enumerate(lens):
            begin, end = starts[r], starts[r + 1]
            num_blocks = -(-seq_len // metadata.block_size)
            blocks = metadata.block_table[r, :num_blocks].long()
            k = key_cache[blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(num_q_heads // num_kv_heads, 1)
            v = value_cache[blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(num_q_heads // num_kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), k) * scale
            position = torch.arange(seq_len - (end - begin), seq_len, device=query.device)
            visible = torch.arange(seq_len, device=query.device)[None] <= position[:, None]
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
        return out

    return run
