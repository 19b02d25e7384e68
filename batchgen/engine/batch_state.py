"""The running requests as arrays: one slot a request, one array a property. Host side, numpy, no torch.

Token ranges of one request (all counts in tokens from the start of the sequence):

    0 ........ num_cached ........ num_computed ........ num_tokens ........ max_tokens
    | found in the cache | computed by earlier steps | known, to compute | may still be generated |

A request is behind by num_tokens - num_computed. One behind is a decode, more is a prefill; there are no phases.
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
        self.last_token = np.zeros(n, np.int32)
        self.num_blocks = np.zeros(n, np.int32)
        self.block_table = np.zeros((n, -(-max_len // block_size)), np.int32)
        self.output_ids = np.zeros((n, max_output), np.int32)
        self.known: list[np.ndarray] = [np.empty(0, np.int32)] * n  # to prefill: prompt, and outputs before a preemption
        self.running = np.empty(0, np.int32)  # slots in (position, sample) order
        self._free = list(range(n - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        return self._free.pop()

    def free_slot(self, slot: int) -> None:
        self.num_blocks[slot] = 0
        self.block_table[slot] = 0
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
        """[num_output_tokens] int32, a view."""
        return self.output_ids[slot, : self.num_tokens[slot] - self.num_prompt[slot]]
