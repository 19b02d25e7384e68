"""The order of a window by cost: subtrees of the prefix tree from the most prompt tokens to compute a row to the fewest.

The children of a node may run in any order: the walk is depth-first in each of them, so the tokens computed stay those of
the tree's edges. A window in this order has work for the compute units at one end and work for the memory at the other,
and whoever admits from both (BlendServe, Zhao et al. 2024) mixes the two in each step. Nothing is known of the answers'
lengths here, so each row counts the same for decode. Where both halves cost about the same the window stays as it is.

Only subtrees of more than 1 / UNITS of the rows are opened. What lies below stays together, as a *unit*.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from batchgen.plan.window import next_smaller
from batchgen.records import Window

UNITS = 64
UNEVEN = 1.5  # times the other half's tokens a row, from which two ends pay


def cost_order(window: Window) -> Window:
    """`window` (in prefix order) with its subtrees ordered by cost, and `unit_starts` set; or as it is, if it is even."""
    n = len(window)
    if n < 2:
        return window
    starts = _unit_starts(window)
    ends = np.append(starts[1:], n)
    order = _order(window, starts, ends)
    rows = np.concatenate([np.arange(starts[u], ends[u]) for u in order])
    unit_starts = np.concatenate([[0], np.cumsum((ends - starts)[order])[:-1]]).astype(np.int64)
    tokens = (window.lengths - window.num_cached())[rows].astype(np.int64)
    if tokens[: n // 2].mean() < UNEVEN * tokens[n // 2 :].mean():
        return window
    index, shared = window.index[rows], window.shared_tokens[rows]
    moved = unit_starts[np.append(False, np.diff(order) != 1)]  # their unit follows another one than it did
    for i in moved.tolist():
        shared[i] = _common_prefix(window.tokens(int(index[i - 1])), window.tokens(int(index[i])))
    shared[0] = 0
    blocks = (shared // window.block_size).astype(np.int32)
    return replace(
        window,
        index=index,
        lengths=window.lengths[rows],
        shared_tokens=shared,
        shared_blocks=blocks,
        next_smaller=next_smaller(blocks),
        unit_starts=unit_starts,
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _unit_starts(window: Window) -> np.ndarray:
    """[m] int64: rows whose smallest subtree with the row before is more than 1 / UNITS of the window; the first is 0.

    A node at which a prompt ends stays closed: after its extensions that prompt would find all of its blocks, and compute
    the last one again for its logits.
    """
    n, shared, after = len(window), window.shared_blocks, window.next_smaller
    before = n - 1 - next_smaller(shared[::-1])[::-1]  # the last row before that shares fewer blocks; -1 if there is none
    opened = (after - np.maximum(before, 0)) * UNITS > n
    ends = np.flatnonzero((window.lengths[:-1] == shared[1:] * window.block_size) & (shared[1:] > 0)) + 1
    closed = np.zeros(n + 1, np.int64)
    np.add.at(closed, ends, 1)
    np.add.at(closed, after[ends], -1)
    opened &= closed.cumsum()[:n] == 0
    opened[0] = True
    return np.flatnonzero(opened)


def _order(window: Window, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[m] int64: units in the order of a depth-first walk that enters the costliest child of each node first.

    The nodes are found with one stack, as the LCP-interval tree (Abouelhoda et al. 2004): (depth in blocks, children).
    """
    depth = window.shared_blocks[starts].tolist() + [-1]  # where each unit leaves the one before
    size = window.block_size
    computed = (window.lengths - window.num_cached()).astype(np.int64)
    totals = np.add.reduceat(computed, starts) - computed[starts] + window.lengths[starts]  # each from the root
    stack: list[tuple[int, list[_Child]]] = []
    for u, (rows, tokens) in enumerate(zip((ends - starts).tolist(), totals.tolist())):
        child = _Child([u], rows, tokens)
        leaves = depth[u + 1]
        while stack and stack[-1][0] > leaves:
            node_depth, children = stack.pop()
            child = _merged([*children, child], node_depth * size)
        if stack and stack[-1][0] == leaves:
            stack[-1][1].append(child)
        else:
            stack.append((leaves, [child]))
    return np.array(_merged(stack[0][1], 0).units, np.int64)


class _Child(NamedTuple):
    """A subtree: its units in order, rows, and tokens to compute with all of its path from the root."""

    units: list[int]
    rows: int
    tokens: int


def _merged(children: list[_Child], path: int) -> _Child:
    """One subtree of children that part after `path` tokens, the costliest a row first."""
    ordered = sorted(children, key=lambda c: -(c.tokens - path) / c.rows)
    units = [u for c in ordered for u in c.units]
    return _Child(units, sum(c.rows for c in children), sum(c.tokens - path for c in children) + path)
