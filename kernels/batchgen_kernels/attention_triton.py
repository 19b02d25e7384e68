"""Paged causal attention on a GPU: decode and prefill requests of one step, each by its own kernel.

The equation is that of attention_reference.py. One merged kernel for both would need one tile shape for both, and loses 2x.
With shared-prefix groups one more kernel reads all shared keys, those two only the private ones, and a fourth merges.
"""

from __future__ import annotations

import torch

from batchgen_kernels.attention_options import FP8, AttentionOptions, check_options
from batchgen_kernels.attention_reference import AttentionPlan
from batchgen_kernels.launch import current_architecture, prefill_launch
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.paged_decode import paged_decode
from batchgen_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill
from batchgen_kernels.prefix_cost import group_rule
from batchgen_kernels.shared_prefix import SharedPlan, attend_shared, merge_shared, plan_shared, token_positions


def plan_attention_triton(
    metadata: AttentionMetadata, num_q_heads: int, num_kv_heads: int, head_dim: int, batch_invariant: bool = False
) -> AttentionPlan:
    """See AttentionPlan for what it returns.

    batch_invariant: the bits of a request's result do not depend on what else is in the step: one tile shape, keys never
    split, no shared-prefix groups (ValueError if there are some). It idles processors when requests are few.


    Nothing here waits for the device. Shapes and dtypes are checked at the first layer of a step with each set of options;
    the others are like it. Without groups the launches are those of paged_decode and paged_prefill and nothing else.
    """
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads ({num_q_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    has_groups = metadata.group_query_start.numel() > 0
    if has_groups and batch_invariant:
        raise ValueError(
            "attention: what is shared changes with the batch, so batch_invariant takes no shared-prefix groups"
        )
    checked: set[tuple[bool, ...]] = set()  # with these options in use
    prefill: PrefillPlan | None = None
    shared: SharedPlan | None = None
    positions: torch.Tensor | None = None

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
        nonlocal prefill, shared, positions
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
        private_out, private_lse, private_options, max_keys = out, None, options, metadata.max_seq_len
        if has_groups:
            num_tokens = query.shape[0]
            if shared is None:
                fp8 = key_cache.dtype == FP8
                shared = plan_shared(metadata, num_tokens, num_q_heads, num_kv_heads, head_dim, query.dtype, fp8)
            if window and positions is None:
                positions = token_positions(metadata, num_tokens)
            parts = attend_shared(query, key_cache, value_cache, scale, shared, positions, check, options)
            private_out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            private_lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            private_options = options._replace(sinks=None)  # a sink joins when the parts do
            max_keys -= shared.min_shared
        index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
        paged_decode(
            query, key_cache, value_cache, *index, metadata.decode_requests, max_keys, scale, private_out, private_lse,
            num_splits=1 if batch_invariant else None, check=check, options=private_options,
        )  # fmt: skip
        requests = metadata.prefill_requests
        if prefill is None and requests.shape[0]:
            fp8 = key_cache.dtype == FP8
            launch = prefill_launch(current_architecture(), head_dim, query.dtype, fp8=fp8) if batch_invariant else None
            prefill = plan_prefill(
                query, key_cache, metadata.query_start, metadata.seq_lens, requests, metadata.max_query_len, launch
            )
        paged_prefill(
            query, key_cache, value_cache, *index, requests, metadata.max_query_len, scale, private_out, private_lse,
            plan=prefill, check=check, options=private_options,
        )  # fmt: skip
        if shared is not None and private_lse is not None:
            merge_shared(*parts, private_out, private_lse, shared, num_kv_heads, out, sinks)
        checked.add(options.used)
        return out

    return run


plan_attention_triton.shares_prefix_reads = True  # type: ignore[attr-defined]
plan_attention_triton.group_rule = group_rule  # type: ignore[attr-defined]
