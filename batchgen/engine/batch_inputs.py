"""A StepPlan as tensors: numpy arithmetic on the host, one copy to the device.

Nothing here grows with the context of the requests: their block tables are on the device, which picks the rows it needs.
"""

from __future__ import annotations

import numpy as np
import torch
from batchgen_kernels import AttentionMetadata

from batchgen.engine.batch_state import BatchState
from batchgen.engine.device_state import DeviceState, to_device
from batchgen.engine.step import StepPlan
from batchgen.models.inputs import BatchInputs


def build_batch_inputs(
    step: StepPlan, state: BatchState, there: DeviceState, before: BatchInputs | None = None
) -> BatchInputs:
    """The tensors of `step`, tokens laid out request after request in the step's (plan) order.

    before: those of the last step, of which most serve again if the step repeats it.
    """
    if step.repeats and before is not None:
        return _a_token_on(step, state, there, before)
    slots, counts, first = step.slots, step.num_scheduled, step.first_position
    block_size, num_requests = state.block_size, len(slots)
    query_start = np.zeros(num_requests + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    end = first + counts
    if query_start[-1] == num_requests:  # a token each
        positions, of_slot = first, slots
    else:
        request = np.repeat(np.arange(num_requests), counts)  # of each token
        positions, of_slot = np.arange(query_start[-1], dtype=np.int32) - (query_start[:-1] - first)[request], slots[request]
    slot_mapping = state.block_table[of_slot, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # What was generated the device knows, and the host perhaps not yet: ~slot stands for it
    token_ids = ~of_slot.astype(np.int64)
    generated = first >= state.num_known[slots]
    for r in np.flatnonzero(~generated).tolist():
        begin = int(first[r])
        token_ids[query_start[r] : query_start[r + 1]] = state.known[slots[r]][begin : begin + int(counts[r])]

    g = step.groups
    (
        ids,
        slots_there,
        positions_there,
        slot_mapping_there,
        logits_indices,
        decodes,
        prefills,
        starts,
        seq_lens,
        kv_start,
    ) = to_device(
        [
            token_ids,
            slots.astype(np.int64),
            positions.astype(np.int64),
            slot_mapping,
            query_start[step.sample_requests + 1].astype(np.int64) - 1,
            np.flatnonzero(counts == 1),
            np.flatnonzero(counts > 1),
            query_start,
            end,
            g.private_start * block_size,
        ],
        there.device,
    )
    if generated.any():
        ids = torch.where(ids < 0, there.last_token[(~ids).clamp_(min=0)], ids)
    longest = int(end.max())
    attention = AttentionMetadata(
        block_size=block_size,
        block_table=there.tables(slots, slots_there, -(-longest // block_size)),
        query_start=starts,
        seq_lens=seq_lens,
        kv_start=kv_start,
        decode_requests=decodes,
        prefill_requests=prefills,
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        group_query_start=torch.from_numpy(query_start[g.request_start]),
        group_query_end=torch.from_numpy(query_start[g.request_end]),
        group_block_start=torch.from_numpy(g.block_ids_start),
        group_blocks=torch.from_numpy(g.block_ids),
    )
    return BatchInputs(ids, positions_there, slot_mapping_there, logits_indices, attention, slots_there)


def _a_token_on(step: StepPlan, state: BatchState, there: DeviceState, before: BatchInputs) -> BatchInputs:
    assert before.slots is not None
    slots, positions, block_size = step.slots, step.first_position, state.block_size
    slot_mapping = state.block_table[slots, positions // block_size].astype(np.int64) * block_size + positions % block_size
    mapping, positions_there, seq_lens = to_device([slot_mapping, positions.astype(np.int64), positions + 1], there.device)
    longest = before.attention.max_seq_len + 1
    attention = before.attention._replace(
        block_table=there.tables(slots, before.slots, -(-longest // block_size)), seq_lens=seq_lens, max_seq_len=longest
    )
    return before._replace(
        token_ids=there.last_token.index_select(0, before.slots), positions=positions_there, slot_mapping=mapping,
        attention=attention,
    )  # fmt: skip
