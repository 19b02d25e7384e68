"""The KV block pool: who holds which block, and which blocks the plan still needs. Host side, numpy, no torch.

A block is in exactly one of four states:

    free        ref_count 0, not in the cache                       on the free list
    held        ref_count > 0, not in the cache                     private to the requests that hold it
    shared      ref_count > 0, in the cache                         found by hash, held now
    kept        ref_count 0, in the cache, uses to come             nobody holds it, but a planned request will

`remaining_uses` counts the planned requests that will still read the block, so a block is kept exactly while the plan has
a use for it, or for a block behind it, and freed at once after: Belady's choice (1966), which an offline plan knows for
free. A kept block is given up only when memory is short (`evict`), deepest first: it is reached through its parents.

A block enters the cache when it is *scheduled*, not after the step, so that siblings of one step share it: sound because
each layer writes the step's keys and values before any attention reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from batchgen.prefix import ROOT, block_hashes

NULL_BLOCK = 0  # pads block tables; always zero, never handed out
NO_PARENT = 0  # parent of a first block


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, block 0 being the null block.

    Raises ValueError when a caller breaks the contract (frees what it does not hold, asks for more than is free).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.remaining_uses = np.zeros(num_blocks, np.int32)
        self.parent = np.full(num_blocks, NO_PARENT, np.int32)
        self.depth = np.zeros(num_blocks, np.int32)  # position in its sequence, in blocks
        self.num_children = np.zeros(num_blocks, np.int32)  # cached blocks whose parent it is
        self.token_ids = np.zeros((num_blocks, block_size), np.int32)
        self.is_cached = np.zeros(num_blocks, bool)
        self.hash_of: dict[int, bytes] = {}  # cached block -> its hash
        self.cache: dict[bytes, int] = {}  # hash -> block
        self._entered_at = np.zeros(num_blocks, np.int64)  # which entry into the cache a block's is, 0: it is not there
        self._num_entered = 0
        self._digests: list[bytes] = []  # of the full blocks of the prompt that was matched last
        self._matched = np.empty(0, np.int32)  # its blocks in the cache
        self._matched_at = np.empty(0, np.int64)  # their entries
        # Free ids, sorted when `_sorted`: single blocks come off the end (high ids), runs from the front (low ids), so
        # that a prefix lands on consecutive ids and the CPU backend reads it in place.
        self._free = np.arange(1, num_blocks, dtype=np.int32)
        self._num_free = num_blocks - 1
        self._sorted = True

    # ---- sizes ------------------------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_kept(self) -> int:
        return sum(1 for b in self.hash_of if self.ref_count[b] == 0)

    # ---- allocation -------------------------------------------------------------------------------------------

    def allocate(self, n: int, consecutive: bool = False) -> np.ndarray:
        """`n` free blocks, reference count 1 each: [n] int32; on consecutive ids, if asked and if such a run is free."""
        if n > self._num_free:
            raise ValueError(f"{n} blocks asked for, {self._num_free} free")
        blocks = self._pop_run(n) if consecutive and n > 1 else self._pop(n)
        self.ref_count[blocks] = 1
        return blocks

    def _pop(self, n: int) -> np.ndarray:
        self._num_free -= n
        return self._free[self._num_free : self._num_free + n].copy()

    def _pop_run(self, n: int) -> np.ndarray:
        free = self._free[: self._num_free]
        if not self._sorted:
            free.sort()
            self._sorted = True
        # free is sorted, so free[i + n - 1] - free[i] == n - 1 exactly where n consecutive ids are free
        starts = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
        begin = int(starts[0]) if len(starts) else 0  # no run: the lowest ids
        blocks = free[begin : begin + n].copy()
        free[begin : len(free) - n] = free[begin + n :].copy()
        self._num_free -= n
        return blocks

    def release(self, blocks: np.ndarray) -> None:
        """Give up one reference to each of `blocks` ([n] int32, no repeats); what nobody holds or will use is freed."""
        if len(blocks) == 0:
            return
        self.ref_count[blocks] -= 1
        if (self.ref_count[blocks] < 0).any():
            raise ValueError("a block was released more often than it was held")
        self._free_if_unused(blocks)

    def _free_if_unused(self, blocks: np.ndarray) -> None:
        """Free those of `blocks` that have no use left, and the parents that were only kept to reach them."""
        idle = blocks[(self.ref_count[blocks] == 0) & (self.remaining_uses[blocks] == 0)]
        cached = self.is_cached[idle]
        freed: dict[int, None] = dict.fromkeys(idle[~cached].tolist())  # private: nobody else can want them
        idle = idle[cached]
        for block in idle[self.depth[idle].argsort(kind="stable")[::-1]].tolist():  # children first
            while block not in freed and self._is_unused(block):
                freed[block] = None
                del self.cache[self.hash_of.pop(block)]
                self.is_cached[block] = False
                self._entered_at[block] = 0
                block = int(self.parent[block])
                self.num_children[block] -= 1
        self._free[self._num_free : self._num_free + len(freed)] = list(freed)
        self._num_free += len(freed)
        self._sorted = self._sorted and not freed

    def _is_unused(self, block: int) -> bool:
        no_use = self.ref_count[block] == 0 and self.remaining_uses[block] == 0 and self.num_children[block] == 0
        return bool(no_use) and block != NULL_BLOCK

    # ---- the prefix cache ---------------------------------------------------------------------------------------

    def match(self, token_ids: np.ndarray, num_same: int = 0) -> np.ndarray:
        """[m] int32: the longest chain of cached blocks that spells a prefix of `token_ids` ([n] int32). Takes no reference.

        The hash only finds a block. It counts if its parent is the block matched before it and its token ids are equal.
        num_same: full blocks that the caller knows to be those of the prompt asked for last: their hashes are at hand, and
        what was found then is found again where it is still there.
        """
        num_known = self._known(num_same)
        digests = self._digests[:num_same]
        rest = token_ids[len(digests) * self.block_size :]
        digests += block_hashes(rest, self.block_size, digests[-1] if digests else ROOT)
        found = list(itertools.takewhile(lambda block: block is not None, map(self.cache.get, digests[num_known:])))
        matched = np.array(found, np.int32)
        known = self._matched[:num_known]
        good = self.parent[matched] == np.concatenate([known[-1:] if num_known else [NO_PARENT], matched[:-1]])
        tokens = token_ids[num_known * self.block_size : (num_known + len(matched)) * self.block_size]
        good &= (self.token_ids[matched] == tokens.reshape(-1, self.block_size)).all(1)
        matched = np.concatenate([known, matched if good.all() else matched[: int(good.argmin())]])
        self._digests, self._matched, self._matched_at = digests, matched, self._entered_at[matched]
        return matched

    def _known(self, num_same: int) -> int:
        """How many of the first num_same blocks matched last are in the cache as they were."""
        same = self._matched[:num_same]
        gone = self._entered_at[same] != self._matched_at[:num_same]
        return int(gone.argmax()) if gone.any() else len(same)

    def acquire(self, blocks: np.ndarray) -> None:
        """Take a reference to each of `blocks` ([n] int32, no repeats), which are held or kept."""
        self.ref_count[blocks] += 1

    def release_hit(self, blocks: np.ndarray) -> None:
        """Undo `acquire` of matched blocks whose planned use is still to come: nothing is freed."""
        self.ref_count[blocks] -= 1

    def use(self, blocks: np.ndarray) -> None:
        """One planned use of each of these cached blocks has come true (its request has acquired what it needs)."""
        uses = np.maximum(self.remaining_uses[blocks] - 1, 0)
        self.remaining_uses[blocks] = uses
        if not uses.all():
            self._free_if_unused(blocks)

    def expect(self, blocks: np.ndarray) -> int:
        """One more use to come of the leading ones of `blocks` that are in the cache; returns how many those are."""
        missing = ~self.is_cached[blocks]
        num_cached = int(missing.argmax()) if missing.any() else len(blocks)
        self.remaining_uses[blocks[:num_cached]] += 1
        return num_cached

    def insert(self, blocks: np.ndarray, first: int, token_ids: np.ndarray, remaining_uses: np.ndarray) -> None:
        """Enter full blocks first.. of a sequence into the cache, where they are not there yet and have uses to come.

        blocks: the sequence's block table; token_ids: its tokens, at least len(remaining_uses) blocks of them;
        remaining_uses[i] >= 0: planned requests that will read block first + i. Not increasing along the chain.
        """
        parent = int(blocks[first - 1]) if first else NO_PARENT
        digest = self.hash_of.get(parent, ROOT) if first else ROOT
        if first and parent not in self.hash_of:
            return  # an unreachable chain: its parent is private
        uses = remaining_uses[: int(np.count_nonzero(remaining_uses))]
        tokens = token_ids[first * self.block_size : (first + len(uses)) * self.block_size]
        # What is in the cache already, another request computes; its children hang on that one.
        fresh = [*itertools.takewhile(lambda d: d not in self.cache, block_hashes(tokens, self.block_size, digest))]
        if not fresh:
            return
        n = len(fresh)
        new = blocks[first : first + n]
        ids = new.tolist()
        self.cache.update(zip(fresh, ids))
        self.hash_of.update(zip(ids, fresh))
        self.is_cached[new] = True
        self._entered_at[new] = np.arange(self._num_entered + 1, self._num_entered + n + 1)
        self._num_entered += n
        self.parent[new] = [parent, *ids[:-1]]
        self.depth[new] = np.arange(first, first + n)
        self.num_children[parent] += 1
        self.num_children[new] = 1
        self.num_children[ids[-1]] = 0
        self.token_ids[new] = tokens[: n * self.block_size].reshape(n, -1)
        self.remaining_uses[new] = uses[:n]

    def evict(self, n: int) -> int:
        """Free up to `n` kept blocks, deepest first, and return how many. Whoever would have used them recomputes."""
        kept = np.array([b for b in self.hash_of if self.ref_count[b] == 0], np.int32)
        before = self._num_free
        for block in kept[np.argsort(-self.depth[kept], kind="stable")].tolist():
            if self._num_free - before >= n:
                break
            if block in self.hash_of and self.num_children[block] == 0:  # else a child took it along
                self.remaining_uses[block] = 0
                self._free_if_unused(np.array([block], np.int32))
        return self._num_free - before

    # ---- invariants ---------------------------------------------------------------------------------------------

    def check(self, block_tables: Sequence[np.ndarray]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all running requests."""
        held = np.zeros(self.num_blocks, np.int32)
        for table in block_tables:
            assert len(np.unique(table)) == len(table), f"a block twice in one table: {table}"
            held[table] += 1
        assert held[NULL_BLOCK] == 0, "the null block was handed out"
        assert (held == self.ref_count).all(), f"reference counts differ at {np.flatnonzero(held != self.ref_count)}"
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a block twice on the free list"
        assert (self.ref_count[free] == 0).all() and not any(b in self.hash_of for b in free.tolist())
        assert {h: b for b, h in self.hash_of.items()} == self.cache, "cache and hash_of disagree"
        cached = set(self.hash_of)
        assert (np.flatnonzero(self.is_cached) == sorted(cached)).all(), "is_cached and hash_of disagree"
        for b in cached:
            assert self.depth[b] == 0 or int(self.parent[b]) in cached, f"block {b} is cached without its parent"
            assert self.num_children[b] == sum(1 for c in cached if self.depth[c] and self.parent[c] == b)
            assert self.ref_count[b] or self.remaining_uses[b] or self.num_children[b], f"block {b} is kept for nobody"
        num_held = int((self.ref_count > 0).sum())
        assert self._num_free + num_held + self.num_kept == self.num_usable, "a block is in no state"
