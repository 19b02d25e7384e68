"""The block pool of a serving engine, for comparison: the least recently used block goes first."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from batchgen.engine.block_pool import BlockPool


class LruBlockPool(BlockPool):
    """What is computed stays in the cache until memory is short, then the block that was used least recently goes, the
    deepest of a prompt first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.last_use = np.zeros(num_blocks, np.int64)
        self.clock = 0
        self._num_idle = 0  # cached, and held by nobody
        # (blocks left idle, time) of each release, oldest first. A block's place in the order is where the time is that of
        # its last use; entries before that are void.
        self._queue: deque[tuple[np.ndarray, int]] = deque()

    @property
    def num_free(self) -> int:
        return self._num_free + self._num_idle

    def allocate(self, n: int, consecutive: bool = False) -> np.ndarray:
        if n > self._num_free:
            self._forget(n - self._num_free)
        return super().allocate(n, consecutive)

    def acquire(self, blocks: np.ndarray) -> None:
        self._num_idle -= int(np.count_nonzero(self.ref_count[blocks] == 0))
        self.ref_count[blocks] += 1

    def release_hit(self, blocks: np.ndarray) -> None:
        super().release_hit(blocks)
        self._num_idle += int(np.count_nonzero(self.ref_count[blocks] == 0))

    def release(self, blocks: np.ndarray) -> None:
        self.clock += 1
        self.last_use[blocks] = self.clock
        idle = blocks[(self.ref_count[blocks] == 1) & self.is_cached[blocks]]
        self._num_idle += len(idle)
        # a parent is used no earlier than its children and lies less deep, so it goes after them
        self._queue.append((idle[np.argsort(-self.depth[idle])], self.clock))
        super().release(blocks)

    def insert(self, blocks: np.ndarray, first: int, token_ids: np.ndarray, remaining_uses: np.ndarray) -> None:
        super().insert(blocks, first, token_ids, np.ones_like(remaining_uses))

    def use(self, blocks: Any) -> None:
        pass

    def expect(self, blocks: Any) -> int:
        return 0

    def evict(self, n: int) -> int:
        return 0  # what could go counts as free already

    def _forget(self, n: int) -> None:
        if n > self._num_idle:
            raise ValueError(f"{n} blocks asked for, {self._num_idle} idle")
        parts, missing = [], n
        while missing:
            blocks, time = self._queue.popleft()
            # One that is held by now comes back to the queue when it is released. (release_hit follows acquire with no
            # allocation between them, so it finds the block's entry where it was.)
            blocks = blocks[(self.last_use[blocks] == time) & (self.ref_count[blocks] == 0)]
            if len(blocks) > missing:
                self._queue.appendleft((blocks[missing:], time))
                blocks = blocks[:missing]
            parts.append(blocks)
            missing -= len(blocks)
        evicted = np.concatenate(parts)
        for digest in map(self.hash_of.pop, evicted.tolist()):
            del self.cache[digest]
        self.is_cached[evicted] = False
        self._entered_at[evicted] = 0
        self.remaining_uses[evicted] = 0
        np.subtract.at(self.num_children, self.parent[evicted], 1)
        self._free[self._num_free : self._num_free + n] = evicted
        self._num_free += n
        self._num_idle -= n
        self._sorted = False
