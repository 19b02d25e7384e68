"""Paged causal attention on a GPU: decode and prefill requests of one step, each by its own kernel.

The equation is that of attention_reference.py. One merged kernel for both would need one tile shape for both, and loses 2x.
"""

from __future__ import annotations

import torch

from batchgen_kernels.attention_options import AttentionOptions, check_options
from batchgen_kernels.attention_reference import AttentionPlan
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.paged_decode import paged_decode
from batchgen_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill


def plan_attention_triton(metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int) -> AttentionPlan:
    """See AttentionPlan for what it returns.

    Reads no shared-prefix groups (`shares_prefix_reads` is False): metadata that has some is refused. Nothing here waits
    for the device. Shapes and dtypes are checked at the first layer of a step with each set of
    options; the others are like it.
    """
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    num_groups = metadata.group_query_start.numel()
    if num_groups:
        raise ValueError(
            f"attention of backend triton reads no shared-prefix groups, but the metadata has {num_groups}; "
            "build it without groups and with kv_start all zero (see Ops.shares_prefix_reads)"
        )
    checked: set[tuple[bool, ...]] = set()  # with these options in use
    prefill: PrefillPlan | None = None

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
        nonlocal prefill
        options = AttentionOptions(window, soft_cap, sinks, key_scale, value_scale)
        check_options("attention", query, key_cache, options)
        check = options.used not in checked
        if check:
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
            check=check, options=options,
        )  # fmt: skip
        requests = metadata.prefill_requests
        if prefill is None and requests.shape[0]:
            prefill = plan_prefill(
                query, key_cache, metadata.query_start, metadata.seq_lens, requests, metadata.max_query_len
            )
        paged_prefill(
            query, key_cache, value_cache, *index, requests, metadata.max_query_len, scale, out,
            plan=prefill, check=check, options=options,
        )  # fmt: skip
        checked.add(options.used)
        return out

    return run


plan_attention_triton.shares_prefix_reads = False  # type: ignore[attr-defined]
