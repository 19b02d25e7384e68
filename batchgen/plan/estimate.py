"""What a plan can say before anything is computed: lengths, duplicates, prefix savings. numpy only."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from batchgen.prefix import ROOT, block_hash
from batchgen.records import Window


class LengthFigures(NamedTuple):
    total: int
    mean: float
    median: float
    p95: float
    longest: int


def length_figures(lengths: np.ndarray) -> LengthFigures:
    """lengths: [n] int32, n > 0."""
    median, p95 = np.quantile(lengths, [0.5, 0.95])
    return LengthFigures(int(lengths.sum()), float(lengths.mean()), float(median), float(p95), int(lengths.max()))


def lru_computed(window: Window, num_blocks: int) -> int:
    """Prompt tokens that a cache of `num_blocks` blocks with least-recently-used eviction computes, rows one after
    another in the window's order: what an engine without a plan does."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    size, computed = window.block_size, 0
    for i in range(len(window)):
        prompt = window.prompt(i)
        digest, chain = ROOT, []
        for begin in range(0, len(prompt) - size + 1, size):
            digest = block_hash(digest, prompt[begin : begin + size])
            chain.append(digest)
        hits = 0
        while hits < (len(prompt) - 1) // size and chain[hits] in cache:
            hits += 1
        computed += len(prompt) - hits * size
        for digest in reversed(chain):  # deepest first, so that parents outlive their children
            cache[digest] = None
            cache.move_to_end(digest)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return computed
