"""Make a window: put rows into prefix order and count what neighbours share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchgen.plan.order import common_prefix_lengths, prefix_order
from batchgen.records import Window


def plan_window(
    tokens: Callable[[int], np.ndarray], index: np.ndarray, lengths: np.ndarray, block_size: int, sort: bool = True
) -> Window:
    """Order the rows `index` ([n] int64) of a token store, whose prompt lengths are `lengths` ([n] int32).

    sort=False keeps the order given: what an engine without a plan would do, for comparison and tests.
    """
    index = np.asarray(index, np.int64)
    if sort:
        order = prefix_order(lambda i: tokens(int(index[i])), lengths)
        index, lengths = index[order], lengths[order]
    shared_tokens = common_prefix_lengths(tokens, index)
    shared_blocks = (shared_tokens // block_size).astype(np.int32)
    return Window(
        tokens, index, lengths.astype(np.int32), shared_tokens, shared_blocks, next_smaller(shared_blocks), block_size
    )


def next_smaller(values: np.ndarray) -> np.ndarray:
    """[n] int64: for each i the first j > i with values[j] < values[i], else n. One stack, O(n)."""
    result = np.full(len(values), len(values), np.int64)
    stack: list[int] = []
    for j, v in enumerate(values.tolist()):
        while stack and values[stack[-1]] > v:
            result[stack.pop()] = j
        stack.append(j)
    return result
