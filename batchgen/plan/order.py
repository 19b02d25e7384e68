"""The order of a window: prompts sorted by token ids, so that equal prefixes are neighbours.

Any lexicographic order is a depth-first walk of the prefix tree and computes each shared prefix once, if the cache holds
one path (SGLang's theorem 3.1, Zheng et al. 2024). The sort refines ties by chunks of CHUNK tokens, so its memory is
num_rows * CHUNK * 4 bytes however long the prompts are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CHUNK = 64  # tokens compared at a time


def prefix_order(tokens: Callable[[int], np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """Indices 0..n-1 sorted by token ids; equal prompts stay in the order given.

    tokens(i): [lengths[i]] int32 >= 0; lengths: [n] int32. Returns [n] int64.
    """
    order = np.arange(len(lengths), dtype=np.int64)
    pending = [(0, len(order), 0)]  # ranges of `order` that are equal in their first `depth` tokens
    while pending:
        begin, end, depth = pending.pop()
        members = order[begin:end]
        keys = np.zeros((len(members), CHUNK), ">u4")
        for k, i in enumerate(members.tolist()):
            chunk = tokens(i)[depth : depth + CHUNK]
            keys[k, : len(chunk)] = chunk.astype(np.int64) + 1  # 0 pads, so a prefix sorts before its extensions
        flat = keys.view(f"V{CHUNK * 4}").ravel()
        rank = np.unique(flat, return_inverse=True)[1].ravel()
        by_rank = np.argsort(rank, kind="stable")
        order[begin:end] = members[by_rank]
        ranks = rank[by_rank]
        cuts = np.flatnonzero(np.diff(ranks)) + 1
        for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(members)]):
            if b - a > 1 and (lengths[members[by_rank[a:b]]] > depth + CHUNK).any():
                pending.append((begin + a, begin + b, depth + CHUNK))
    return order


def common_prefix_lengths(tokens: Callable[[int], np.ndarray], order: np.ndarray) -> np.ndarray:
    """[n] int32: tokens that order[i] shares with order[i - 1]; 0 for the first."""
    shared = np.zeros(len(order), np.int32)
    previous = tokens(int(order[0])) if len(order) else np.empty(0, np.int32)
    for i in range(1, len(order)):
        current = tokens(int(order[i]))
        n = min(len(previous), len(current))
        different = np.flatnonzero(previous[:n] != current[:n])
        shared[i] = different[0] if len(different) else n
        previous = current
    return shared
