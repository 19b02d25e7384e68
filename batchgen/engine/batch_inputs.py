"""A StepPlan as tensors: numpy arithmetic on the host, then one copy an array to the device."""

from __future__ import annotations

import numpy as np
import torch
from batchgen_kernels import AttentionMetadata

from batchgen.engine.batch_state import BatchState
from batchgen.engine.step import StepPlan
from batchgen.models.inputs import BatchInputs


def build_batch_inputs(step: StepPlan, state: BatchState, device: torch.device) -> BatchInputs:
    """The tensors of `step`, tokens laid out request after request in the step's (plan) order."""
    slots, counts, first = step.slots, step.num_scheduled, step.first_position
    block_size = state.block_size
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    request = np.repeat(np.arange(len(slots)), counts)  # of each token
    positions = np.arange(query_start[-1]) - query_start[request] + first[request]
    token_ids = state.last_token[slots][request]
    for r in np.flatnonzero(first + 1 < state.num_tokens[slots]).tolist():  # not a decode: its tokens are known
        begin = int(first[r])
        token_ids[query_start[r] : query_start[r + 1]] = state.known[slots[r]][begin : begin + int(counts[r])]
    end = first + counts
    table = state.block_table[slots, : -(-int(end.max()) // block_size)]
    slot_mapping = table[request, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    g = step.groups
    blocks = [table[r, a:b] for r, a, b in zip(g.request_start, g.block_start, g.block_end)]
    on_host = torch.device("cpu")
    attention = AttentionMetadata(
        block_size=block_size,
        block_table=tensor(table, torch.int32),
        query_start=tensor(query_start, torch.int32),
        seq_lens=tensor(end, torch.int32),
        kv_start=tensor(g.private_start * block_size, torch.int32),
        decode_requests=tensor(np.flatnonzero(counts == 1), torch.int64),
        prefill_requests=tensor(np.flatnonzero(counts > 1), torch.int64),
        max_query_len=int(counts.max()),
        max_seq_len=int(end.max()),
        group_query_start=torch.from_numpy(query_start[g.request_start]).to(on_host),
        group_query_end=torch.from_numpy(query_start[g.request_end]).to(on_host),
        group_block_start=torch.from_numpy(np.cumsum([0, *map(len, blocks)], dtype=np.int32)),
        group_blocks=torch.from_numpy(np.concatenate([np.empty(0, np.int32), *blocks])),
    )
    return BatchInputs(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slot_mapping, torch.int64),
        logits_indices=tensor(query_start[step.sample_requests + 1] - 1, torch.int64),
        attention=attention,
    )
