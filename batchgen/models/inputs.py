"""The tensors of one engine step, as `forward` gets them. Built by engine/batch_inputs.py; knows no scheduler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from batchgen_kernels import AttentionMetadata


class BatchInputs(NamedTuple):
    """One step over `num_tokens` query tokens of `num_requests` requests, laid out request after request in plan order."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64, block_id * block_size + offset
    logits_indices: torch.Tensor  # [num_sampled] int64, the token rows whose logits are wanted
    attention: AttentionMetadata
    slots: torch.Tensor | None = None  # [num_requests] int64, where the device keeps what it knows of each request
