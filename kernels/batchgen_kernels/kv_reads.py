"""How much of the cache the Triton attention of one step reads, counted exactly from its plan. For reports and tests."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from batchgen_kernels.attention_options import FP8
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.paged_prefill import plan_prefill
from batchgen_kernels.paged_tile import MAX_TILE_HEADS
from batchgen_kernels.shared_prefix import FIRST_TILE, NUM_KEYS, SharedPlan, plan_shared


class KVReads(NamedTuple):
    """Tokens are read once a tile of rows: a key/value head's worth each, for all key/value heads alike."""

    shared_tokens: int
    private_tokens: int
    bytes: int  # of keys and values of all key/value heads, shared and private
    program_units: list[int]  # tiles of work of each program that reads shared keys


def count_kv_reads(
    metadata: AttentionMetadata,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_bytes: int = 0,
) -> KVReads:
    """For one layer without a window. cache_bytes of an element, 0: like dtype. Waits for the device."""
    query_start, seq_lens, kv_start = (t.tolist() for t in (metadata.query_start, metadata.seq_lens, metadata.kv_start))
    shared_tokens, units = 0, []
    if metadata.group_query_start.numel():
        plan = plan_shared(metadata, query_start[-1], num_q_heads, num_kv_heads, head_dim, dtype, fp8=cache_bytes == 1)
        shared_tokens, units = shared_reads(plan) // num_kv_heads, program_units(plan)
    head_tiles = -(-(num_q_heads // num_kv_heads) // MAX_TILE_HEADS)
    private_tokens = sum(seq_lens[r] - kv_start[r] for r in metadata.decode_requests.tolist()) * head_tiles
    if metadata.prefill_requests.numel():
        query = torch.empty((query_start[-1], num_q_heads, head_dim), dtype=dtype, device=metadata.seq_lens.device)
        index = (metadata.query_start, metadata.seq_lens, metadata.prefill_requests, metadata.max_query_len)
        cache = query.new_empty((0, metadata.block_size, num_kv_heads, head_dim), dtype=FP8 if cache_bytes == 1 else dtype)
        launch, tiles = plan_prefill(query, cache, *index)
        block_q = launch.block_m // min(num_q_heads // num_kv_heads, MAX_TILE_HEADS)
        for r, first in tiles.tolist():
            if r >= 0:
                num_queries = query_start[r + 1] - query_start[r]
                key_end = seq_lens[r] - num_queries + min(first + block_q, num_queries)
                private_tokens += (key_end - kv_start[r]) * head_tiles
    token_bytes = 2 * num_kv_heads * head_dim * (cache_bytes or dtype.itemsize)
    return KVReads(shared_tokens, private_tokens, (shared_tokens + private_tokens) * token_bytes, units)


def shared_reads(plan: SharedPlan) -> int:
    """Tokens that the programs read, a head's worth each: every tile of rows reads each key of its node once."""
    nodes = plan.nodes.cpu()
    return int((nodes[:, FIRST_TILE].diff() * nodes[:-1, NUM_KEYS].long()).sum())


def program_units(plan: SharedPlan) -> list[int]:
    """Units of each program; see share_begin in shared_prefix."""
    programs = min(plan.num_programs, plan.num_units)
    begin = [p * plan.num_units // programs for p in range(programs + 1)]
    return [b - a for a, b in itertools.pairwise(begin)]
