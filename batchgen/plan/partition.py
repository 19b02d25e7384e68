"""How a job's rows are cut into windows that are planned one at a time, so that no sort is larger than memory.

Rows go to partitions by the hash of their first tokens, so rows that share at least `depth` tokens meet in one partition.
What is lost against one sort of everything: each partition but one computes again what its rows share with others, which is
one path of fewer than `depth` tokens. `depth` is taken from the first rows, because where every prompt begins alike (a long
system prompt) the first tokens would tell nothing apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchgen.prefix import ROOT, block_hash
from batchgen.records import Window

MIN_DEPTH, MAX_DEPTH = 64, 1 << 14  # tokens hashed
MAX_SHARE = 0.125  # of the sampled rows that may fall together before more tokens are hashed
WINDOW_TOKENS = 1 << 25  # 128 MiB: what partitions are made and merged for
WINDOW_ROWS = 1 << 19


@dataclass(frozen=True)
class Partitioning:
    """Which partition a prompt goes to."""

    num_partitions: int
    depth: int

    def __call__(self, token_ids: np.ndarray) -> int:
        """token_ids: [n] int32, C-contiguous."""
        return int.from_bytes(block_hash(ROOT, token_ids[: self.depth])[:8], "big") % self.num_partitions


def choose_partitioning(sample: Window, num_rows: int) -> Partitioning:
    """For `num_rows` rows like those of `sample`, which is in prefix order and not empty.

    Partitions of half a window on average: hashing does not fill them evenly, and small ones are merged again.
    """
    num_tokens = int(sample.lengths.sum()) * num_rows // max(1, len(sample))
    num_partitions = max(1, -(-2 * num_tokens // WINDOW_TOKENS), -(-2 * num_rows // WINDOW_ROWS))
    depth = MIN_DEPTH
    while depth < MAX_DEPTH and num_partitions > 1 and largest_share(sample, depth) > MAX_SHARE:
        depth *= 2
    return Partitioning(num_partitions, depth)


def largest_share(window: Window, depth: int) -> float:
    """Of the rows of `window`, the largest part that shares its first `depth` tokens."""
    first = np.flatnonzero(window.shared_tokens < depth)
    return float(np.diff(np.append(first, len(window))).max(initial=0)) / max(1, len(window))


def merge_small(num_rows: Iterable[int], num_tokens: Iterable[int]) -> list[range]:
    """Consecutive partitions that make one window: as many as stay below WINDOW_ROWS and WINDOW_TOKENS, at least one."""
    windows: list[range] = []
    rows = tokens = 0
    for i, (more_rows, more_tokens) in enumerate(zip(num_rows, num_tokens, strict=True)):
        rows, tokens = rows + more_rows, tokens + more_tokens
        if windows and rows <= WINDOW_ROWS and tokens <= WINDOW_TOKENS:
            windows[-1] = range(windows[-1].start, i + 1)
        else:
            windows.append(range(i, i + 1))
            rows, tokens = more_rows, more_tokens
    return windows


def cut_large(first: int, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of entries of one window, whose prompt lengths are `lengths` ([n] int32), that do not exceed twice its size.

    More than one only where a prefix is more frequent than the first rows let expect; the pieces are planned apart and
    share nothing.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    cuts, begin = [], 0
    while begin < len(lengths):
        done = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, done + 2 * WINDOW_TOKENS, side="right"))
        end = min(max(end, begin + 1), begin + 2 * WINDOW_ROWS, len(lengths))
        cuts.append((first + begin, first + end))
        begin = end
    return cuts
