"""Which key/value tokens each query token of a step may see: the index tensors that attention reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionMetadata(NamedTuple):
    """Index tensors of one step (R requests, T query tokens, laid out request after request).

    Request r owns query tokens [query_start[r], query_start[r+1]); they are the *last* tokens of its seq_lens[r]
    tokens, and query token i of them (0-based, of n) sees positions [0, seq_lens[r] - n + i]. With shared-prefix groups,
    positions [0, kv_start[r]) of request r are covered by groups and positions from kv_start[r] on are its private part.
    A group covers whole blocks, lies before every query of its members, and its members' query tokens are one
    contiguous range; groups of different levels of the prefix tree may cover the same queries (disjoint key ranges).

    All int tensors are on the device of the cache except the `group_*` ones, which are on the CPU.
    """

    block_size: int
    block_table: torch.Tensor  # [R, max_blocks] int32; entries past a request's last block are 0, the null block
    query_start: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32, tokens in the cache after this step's KV write
    kv_start: torch.Tensor  # [R] int32, a multiple of block_size; all zero without groups
    decode_requests: torch.Tensor  # [num_decodes] int64, requests with exactly one query token
    prefill_requests: torch.Tensor  # [num_prefills] int64, requests with more than one query token
    max_query_len: int
    max_seq_len: int
    group_query_start: torch.Tensor  # [G] int32 (CPU): first query token of the group's members
    group_query_end: torch.Tensor  # [G] int32 (CPU): one past their last query token
    group_block_start: torch.Tensor  # [G + 1] int32 (CPU): offsets into group_blocks
    group_blocks: torch.Tensor  # [sum of blocks] int32 (CPU): block ids of each group, in sequence order
