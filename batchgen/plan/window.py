"""Make a window: put rows into prefix order and count what neighbours share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchgen.plan.order import common_prefix_lengths, prefix_order
from batchgen.records import PackedTokens, Window


def plan_window(
    tokens: Callable[[int], np.ndarray], index: np.ndarray, lengths: np.ndarray, block_size: int, sort: bool = True
) -> Window:
    """Order the rows `index` ([n] int64) of a token store, whose prompt lengths are `lengths` ([n] int32).

    sort=False keeps the order given: what an engine without a plan would do, for comparison and tests. Tokens are packed
    for planning; where `tokens` is a PackedTokens and `index` all of it, they are taken as they lie.
    """
    index = np.asarray(index, np.int64)
    packed = tokens.select(index) if isinstance(tokens, PackedTokens) else PackedTokens.pack(map(tokens, index.tolist()))
    order = prefix_order(packed) if sort else np.arange(len(index))
    index, lengths = index[order], lengths[order]
    shared_tokens = common_prefix_lengths(packed, order)
    shared_blocks = (shared_tokens // block_size).astype(np.int32)
    return Window(
        tokens, index, lengths.astype(np.int32), shared_tokens, shared_blocks, next_smaller(shared_blocks), block_size
    )


def next_smaller(values: np.ndarray) -> np.ndarray:
    """[n] int64: for each i the first j > i with values[j] < values[i], else n. One stack, O(n)."""
    result = np.full(len(values), len(values), np.int64)
    stack: list[tuple[int, int]] = []
    for j, v in enumerate(values.tolist()):
        while stack and stack[-1][1] > v:
            result[stack.pop()[0]] = j
        stack.append((j, v))
    return result
