"""Rows with equal prompts have equal answers where answers depend on nothing else: they run once and fan out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchgen.plan.window import next_smaller
from batchgen.records import Window


@dataclass(frozen=True)
class Distinct:
    """A window without repeats, and who repeats each of its rows."""

    window: Window
    entries: np.ndarray  # [n] int64, positions in the token store of all rows, repeats behind their first
    start: np.ndarray  # [d] int64, and
    end: np.ndarray  # [d] int64: row i of the window stands for entries[start[i] : end[i]], itself first

    def rows(self, i: int) -> np.ndarray:
        """Positions in the token store of the rows that get the answer of the window's row i."""
        return self.entries[self.start[i] : self.end[i]]

    def in_order_of(self, window: Window) -> Distinct:
        """The same with `window`, which has the rows of this one in another order."""
        by_index = np.argsort(self.window.index)
        was = by_index[np.searchsorted(self.window.index, window.index, sorter=by_index)]
        return Distinct(window, self.entries, self.start[was], self.end[was])


def each_alone(window: Window) -> Distinct:
    """Where answers depend on more than the prompt: every row stands for itself."""
    start = np.arange(len(window))
    return Distinct(window, window.index, start, start + 1)


def repeats(window: Window) -> np.ndarray:
    """[n] bool: whether a row's prompt is that of the row before. In prefix order equal prompts are neighbours."""
    same = np.zeros(len(window), bool)
    same[1:] = (window.lengths[1:] == window.lengths[:-1]) & (window.shared_tokens[1:] == window.lengths[1:])
    return same


def without_duplicates(window: Window) -> Distinct:
    """`window` must be in prefix order."""
    first = np.flatnonzero(~repeats(window))
    # a row shares with the last of some equal rows what it shares with their first, so the counts stay true
    blocks = window.shared_blocks[first]
    distinct = Window(
        window.tokens, window.index[first], window.lengths[first], window.shared_tokens[first], blocks,
        next_smaller(blocks), window.block_size,
    )  # fmt: skip
    return Distinct(distinct, window.index, first, np.append(first[1:], len(window))[: len(first)])
