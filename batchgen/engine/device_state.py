"""What the device keeps from step to step: block tables and sampled tokens, a row a slot. The host sends what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchgen.engine.batch_state import BatchState

WIDTH = 32  # blocks by which the tables of a step grow, so that it has the shapes of the step before
_ALIGNMENT = 8  # bytes, of the widest dtype


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor, by one copy that the host does not wait for; on a CPU without a copy."""
    arrays = [np.ascontiguousarray(a) for a in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    starts = np.cumsum([0, *(-(-a.nbytes // _ALIGNMENT) * _ALIGNMENT for a in arrays)]).tolist()
    # torch keeps pinned memory until the copies out of it are done
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for a, start in zip(arrays, starts):
        host[start : start + a.nbytes] = a.reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape) for a, start in zip(arrays, starts)
    ]


class DeviceState:
    """block_table: [max_requests, max_blocks] int32; last_token: [max_requests] int64, sampled last in each slot."""

    def __init__(self, state: BatchState, device: torch.device) -> None:
        self.state, self.device = state, device
        self.last_token = torch.zeros(state.max_requests, dtype=torch.int64, device=device)
        # a CPU looks into the host's own table
        self._is_sent = device.type != "cpu"
        (table,) = to_device([state.block_table], device)
        self.block_table = table
        self._num_sent = np.zeros(state.max_requests, np.int32)  # blocks of each slot that are there ...
        self._sent_of = np.zeros(state.max_requests, np.int64)  # ... of this admission
        self._slots = np.empty(0, np.int32)
        self._tables = table[:0]  # block tables of `_slots`

    def tables(self, slots: np.ndarray, slots_there: torch.Tensor, width: int) -> torch.Tensor:
        """[R, width or a little more] int32: the block tables of `slots` ([R] int32; slots_there: the same as int64 on the
        device). Given the same array again, it adds what is new to the tables that it made before."""
        width = min(-(-width // WIDTH) * WIDTH, self.block_table.shape[1])
        rows, columns, blocks = self._new_blocks(slots)
        if self._is_sent and len(rows):
            self.block_table.index_put_(*_at(to_device([slots[rows].astype(np.int64), columns, blocks], self.device)))
        if slots is self._slots and width == self._tables.shape[1]:
            if len(rows):
                self._tables.index_put_(*_at(to_device([rows, columns, blocks], self.device)))
        else:
            self._slots, self._tables = slots, self.block_table[:, :width].index_select(0, slots_there)
        return self._tables

    def _new_blocks(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index into slots, column, block) of each block that came since they were asked for last."""
        s = self.state
        have = s.num_blocks[slots]
        sent = np.where(self._sent_of[slots] == s.admission[slots], self._num_sent[slots], 0)
        self._sent_of[slots], self._num_sent[slots] = s.admission[slots], have
        grown = np.flatnonzero(have != sent)
        num_new = (have - sent)[grown]
        rows = np.repeat(grown, num_new)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(num_new) - num_new - sent[grown], num_new)
        return rows, columns, s.block_table[slots[rows], columns]


def _at(index_and_values: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, columns, values = index_and_values
    return (rows, columns), values
