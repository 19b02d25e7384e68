"""The running requests as arrays: one slot a request, one array a property. Host side, numpy, no torch.

Token ranges of one request (all counts in tokens from the start of the sequence):

    0 ........ num_cached ........ num_computed ........ num_tokens ........ max_tokens
    | found in the cache | computed by earlier steps | known, to compute | may still be generated |

A request is behind by num_tokens - num_computed. One behind is a decode, more is a prefill; there are no phases. A step that
is scheduled counts as computed, and its sampled tokens as known, though the host has seen only `num_outputs` of them.
"""

from __future__ import annotations

import numpy as np


class BatchState:
    """Slots for `max_requests` requests of at most `max_len` tokens, `max_output` of them generated."""

    def __init__(self, max_requests: int, max_len: int, max_output: int, block_size: int) -> None:
        n = max_requests
        self.max_requests, self.block_size = n, block_size
        self.position = np.zeros(n, np.int64)  # in the window
        self.sample_index = np.zeros(n, np.int32)
        self.num_prompt = np.zeros(n, np.int32)
        self.num_cached = np.zeros(n, np.int32)
        self.num_computed = np.zeros(n, np.int32)
        self.num_tokens = np.zeros(n, np.int32)
        self.max_tokens = np.zeros(n, np.int32)
        self.num_recompute = np.zeros(n, np.int32)  # tokens below this were computed before a preemption
        self.num_preemptions = np.zeros(n, np.int32)
        self.num_outputs = np.zeros(n, np.int32)  # generated tokens that the host has seen
        self.num_blocks = np.zeros(n, np.int32)
        self.block_table = np.zeros((n, -(-max_len // block_size)), np.int32)
        self.output_ids = np.zeros((n, max_output), np.int32)
        self.known: list[np.ndarray] = [np.empty(0, np.int32)] * n  # to prefill: prompt, and outputs before a preemption
        self.num_known = np.zeros(n, np.int32)  # their number
        self.running = np.empty(0, np.int32)  # slots in (position, sample) order
        self.admission = np.zeros(n, np.int64)  # which one, from 1, of all that ever got a slot: tells its owners apart
        self._num_admissions = 0
        self._common = np.zeros(n, np.int32)  # blocks that the slot has in common with the one before it in the step
        self._before = np.zeros(n, np.int64)  # the admission of that one
        self._free = list(range(n - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        slot = self._free.pop()
        self._num_admissions += 1
        self.admission[slot] = self._num_admissions
        return slot

    def free_slot(self, slot: int) -> None:
        self.block_table[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = self.admission[slot] = self._before[slot] = 0
        self.known[slot] = np.empty(0, np.int32)
        self._free.append(slot)

    def set_running(self, slots: np.ndarray) -> None:
        """Keep `slots` ([n] int32) as the running set, in the order of the plan."""
        self.running = slots[np.lexsort((self.sample_index[slots], self.position[slots]))].astype(np.int32)

    def blocks(self, slot: int) -> np.ndarray:
        return self.block_table[slot, : self.num_blocks[slot]]

    def append_blocks(self, slot: int, blocks: np.ndarray) -> None:
        n = int(self.num_blocks[slot])
        self.block_table[slot, n : n + len(blocks)] = blocks
        self.num_blocks[slot] = n + len(blocks)

    def outputs(self, slot: int) -> np.ndarray:
        """[num_outputs] int32, a view."""
        return self.output_ids[slot, : self.num_outputs[slot]]

    def common_with_previous(self, slots: np.ndarray) -> np.ndarray:
        """[R] int32: leading blocks that each of `slots` ([R] int32) has in common with the one before it.

        The blocks that two requests share are those they were admitted with: what either gets later is its own. So only
        neighbours that are new to each other are compared.
        """
        before = np.zeros(len(slots), np.int64)
        before[1:] = self.admission[slots[:-1]]
        new = np.flatnonzero(self._before[slots] != before)
        if len(new):
            self._before[slots[new]] = before[new]
            self._common[slots[new]] = 0
            new = new[new > 0]
            slot, other = slots[new], slots[new - 1]
            most = np.minimum(self.num_blocks[slot], self.num_blocks[other])
            width = int(most.max(initial=0)) + 1  # with a column in which they differ or both have no block
            different = self.block_table[slot, :width] != self.block_table[other, :width]
            first = np.where(different.any(1), different.argmax(1), width)
            self._common[slot] = np.minimum(first, most)
        return self._common[slots]
