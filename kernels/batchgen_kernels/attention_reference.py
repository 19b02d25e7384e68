"""Paged causal attention as a plain loop over requests: the oracle of every attention kernel.

For query token i (0-based, of n) of a request with `seq_len` tokens in the cache, its position is p = seq_len - n + i:
    s_j = scale q . k_j                        or soft_cap tanh(scale q . k_j / soft_cap)
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))      j = 0..p, or p - window + 1..p; exp(sink) only with sinks
with query head h reading key/value head h // (num_q_heads / num_kv_heads). Ignores groups: a group only says how the
same keys may be read once, so an implementation that shares reads must give this same result.
"""

from __future__ import annotations

from typing import Protocol

import torch

from batchgen_kernels.attention_options import AttentionOptions, check_options, read_tokens
from batchgen_kernels.metadata import AttentionMetadata


class AttentionPlan(Protocol):
    """Attention of one layer; see AttentionOptions for the arguments that have a default.

    query [T, num_q_heads, D], caches [num_blocks, block_size, num_kv_heads, D] -> [T, num_q_heads, D] of query's dtype.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def plan_attention_reference(
    metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> AttentionPlan:
    """Everything that does not differ between layers is done here; the plan is then called once a layer."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    group = num_q_heads // num_kv_heads

    def run(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = AttentionOptions(window, soft_cap, sinks, key_scale, value_scale)
        check_options("attention", query, key_cache, options)
        out = torch.empty_like(query)
        starts, lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        for r, seq_len in enumerate(lens):
            begin, end = starts[r], starts[r + 1]
            blocks = metadata.block_table[r, : -(-seq_len // metadata.block_size)].long()
            k = read_tokens(key_cache, key_scale, blocks, seq_len, torch.float64).repeat_interleave(group, 1)
            v = read_tokens(value_cache, value_scale, blocks, seq_len, torch.float64).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), k) * scale
            if soft_cap:
                scores = soft_cap * (scores / soft_cap).tanh()
            key = torch.arange(seq_len, device=query.device)[None]
            position = torch.arange(seq_len - (end - begin), seq_len, device=query.device)[:, None]
            visible = (key <= position) & (key > position - (window or seq_len))
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, end - begin, 1)], -1)
            weights = scores.softmax(-1)[..., :seq_len]
            for i in range(end - begin):  # one token at a time: a value that is not finite is nobody's who does not see it
                seen = visible[i]
                out[begin + i] = torch.einsum("hk,khd->hd", weights[:, i, seen], v[seen]).to(query.dtype)
        return out

    return run
