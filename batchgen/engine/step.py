"""What goes between scheduler, model runner and caller in one step. Host side, numpy, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.engine.prefix_groups import PrefixGroups
from batchgen.records import FinishReason, RowFault


class StepPlan(NamedTuple):
    """What one step computes. R requests in plan order, K sampled tokens."""

    slots: np.ndarray  # [R] int32
    num_scheduled: np.ndarray  # [R] int32, query tokens of each
    first_position: np.ndarray  # [R] int32, position of its first query token
    sample_requests: np.ndarray  # [K] int32, index into the R requests whose last token's logits are sampled
    sample_slots: np.ndarray  # [K] int32, the slot that gets the token (a fork samples its parent's logits)
    new_blocks: np.ndarray  # [n] int32, handed out for this step, content undefined
    block_copies: np.ndarray  # [m, 2] int32, source and destination, before this step's KV write
    groups: PrefixGroups


class Finished(NamedTuple):
    """A request that needs no more steps."""

    position: int
    sample_index: int
    token_ids: np.ndarray
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    fault: RowFault | None


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: int
    max_running_requests: int
    max_model_len: int
    max_tokens: int  # generated per request
    num_samples: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    prefix_cache: bool = True
    prefix_groups: bool = True
    output_reserve: float = 1.0  # share of the expected growth that admission keeps free


@dataclass
class SchedulerStats:
    """Exact counts, in tokens unless said otherwise."""

    num_steps: int = 0
    num_prefill: int = 0  # prompt tokens computed for the first time
    num_recomputed: int = 0  # tokens computed again after a preemption
    num_decode: int = 0
    num_cached: int = 0  # prompt tokens found in the cache (forks included)
    num_preemptions: int = 0
    num_kv_read: int = 0  # key/value tokens read, each shared prefix once a step
    num_kv_visible: int = 0  # the same without sharing
    max_running: int = 0
