"""Which row of a window comes next, and which are still to come. Host side, numpy, no torch.

A window whose plan has set `unit_starts` is ordered by cost, the rows with most prompt tokens to compute first. It is
admitted from both ends, whole units at either, rows ascending in each: from the back while there is room, then from the
front whenever a smaller share of the prompt tokens is in than of the rows. So each step has compute-bound and memory-bound
work (BlendServe, Zhao et al. 2024), and the rows that decode for long are in before the end.

    0          front       begin        back    end          n
    | admitted |  to come  |  admitted  | to come | admitted |        the unit at the back is [begin, end)
"""

from __future__ import annotations

import numpy as np

from batchgen.records import Window

ROOM = 1 / 8  # of the memory; with less left, beside the next row at the front, it counts as full
MIN_PACE = 64  # tokens: less than this costs a step as much
UNLIMITED = 1 << 30


class AdmissionOrder:
    """`next_row` is the position to admit next, None when all rows are in; `take` admits it.

    hidden_tokens: query tokens of a step whose FLOPs take no longer than the reading of all weights.
    """

    def __init__(self, window: Window, hidden_tokens: int = 0) -> None:
        self.window, self.hidden_tokens = window, hidden_tokens
        n = len(window)
        starts = np.zeros(min(n, 1), np.int64) if window.unit_starts is None else window.unit_starts
        self._starts = starts
        self.front = 0
        self._begin = self._back = self._end = n
        self._previous_smaller = _previous_smaller(window.shared_blocks)
        self._computed = window.lengths - window.num_cached()
        self.num_tokens = self.tokens_left = int(self._computed.sum())
        self._is_light = self._computed * n <= self.num_tokens  # no more to compute than the mean
        self.num_taken = 0  # rows
        self._num_done = self._num_steps = 0
        self._has_room = True
        none = np.empty(0, np.int64)
        self._sharers_of: tuple[int, np.ndarray, np.ndarray] = (-1, none, none)  # of the row asked for last

    def next_step(self) -> None:
        self._num_steps += 1

    def observe(self, num_running: int, room: float, num_blocks: int) -> None:
        """Rows that are in; blocks that they neither hold nor are expected to want; blocks of the pool."""
        self._num_done = max(0, self.num_taken - num_running)
        front = self.window.lengths[min(self.front, len(self.window) - 1)] / self.window.block_size
        self._has_room = room - front > ROOM * num_blocks

    @property
    def next_row(self) -> int | None:
        if self.front >= self._begin:
            return self._back if self._back < self._end else None
        tokens = self.num_tokens - self.tokens_left
        if not self._has_room and tokens * len(self.window) <= self.num_taken * self.num_tokens:
            return self.front
        if self._back < self._end:
            return self._back
        last = int(self._starts[np.searchsorted(self._starts, self._begin) - 1])  # the last unit before what is admitted
        return last if last > self.front else self.front

    def take(self) -> None:
        row = self.next_row
        assert row is not None
        self.tokens_left -= int(self._computed[row])
        self.num_taken += 1
        if row == self.front:
            self.front += 1
            return
        if row != self._back:
            self._end, self._begin = self._begin, row
        self._back = row + 1

    def pace(self, num_behind: int, decoding: np.ndarray, left: np.ndarray) -> int:
        """Prompt tokens that the next step should compute at most.

        Only for a window in the order of cost. With little room, so many that they last as long as the decodes do. With
        room, all that the rows of the back want, whose decodes the step is short of; then, for the prompts of the front, no
        more than what hides behind the reading of weights that the back's decodes wait for anyway, or than what lets them
        hide all of it.
        num_behind: prompt tokens that running requests have yet to compute; decoding: [D] rows of those with one token to
        compute, and left: [D] how many each may still take.
        """
        row = self.next_row
        if self.window.unit_starts is None:
            return UNLIMITED
        if self._has_room and row != self.front:
            if len(decoding) >= self.hidden_tokens or (row is not None and self._is_light[row]):
                return UNLIMITED
            left = left[self._is_light[decoding]]
            if not len(left):
                return UNLIMITED
            return max(MIN_PACE, self.hidden_tokens - len(decoding), (self.tokens_left + num_behind) // int(left.max()))
        steps_left = (len(self.window) - self._num_done) * self._num_steps / max(1, self._num_done)
        return max(MIN_PACE, int((self.tokens_left + num_behind) / max(1.0, steps_left)))

    def uses(self, position: int) -> tuple[np.ndarray, int]:
        """Rows still to come that share each full block of this row ([length // block_size] int32, not increasing), and
        how many of the blocks rows before it have shared: those that count it as a use, until it is taken."""
        left, right = self._sharers(position)
        front = np.minimum(right, self._begin) - np.maximum(left, self.front)
        back = np.minimum(right, self._end) - np.maximum(left, self._back)
        to_come = np.maximum(front, 0) + np.maximum(back, 0)
        return to_come.astype(np.int32), int(np.count_nonzero(to_come < right - left))

    def _sharers(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows [left, right) that share each full block of this one: [length // block_size] int64 each."""
        if self._sharers_of[0] == position:
            return self._sharers_of[1:]
        shared, size = self.window.shared_blocks, self.window.block_size
        num_blocks = int(self.window.lengths[position]) // size
        left, right = np.full(num_blocks, position), np.full(num_blocks, position + 1)  # rows that share each block
        row = position
        while (depth := int(shared[row])) > 0:
            row = int(self._previous_smaller[row])
            left[int(shared[row]) : depth] = row
        row = position + 1
        while row < len(shared) and (depth := int(shared[row])) > 0:
            row = int(self.window.next_smaller[row])
            right[int(shared[row]) if row < len(shared) else 0 : depth] = row
        self._sharers_of = (position, left, right)
        return left, right


def _previous_smaller(values: np.ndarray) -> np.ndarray:
    """[n] int64: for each i the last j < i with values[j] < values[i], else 0. One stack, O(n)."""
    result = np.zeros(len(values), np.int64)
    stack: list[tuple[int, int]] = []
    for i, value in enumerate(values.tolist()):
        while stack and stack[-1][1] >= value:
            stack.pop()
        if stack:
            result[i] = stack[-1][0]
        stack.append((i, value))
    return result
