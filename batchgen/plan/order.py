"""The order of a window: prompts sorted by token ids, so that equal prefixes are neighbours.

Any lexicographic order is a depth-first walk of the prefix tree and computes each shared prefix once, if the cache holds
one path (SGLang's theorem 3.1, Zheng et al. 2024). Token ids written big-endian sort as bytes do, so the sort is Arrow's for
binary arrays (stable, memcmp, no Python object a row). It needs the tokens of the window twice: as they are and swapped.
"""

from __future__ import annotations

import numpy as np

from batchgen.records import PackedTokens

CHUNK = 64  # tokens compared at a time
PIECE = 1 << 14  # pairs compared at a time: two matrices of PIECE * CHUNK tokens, 4 MiB each


def prefix_order(tokens: PackedTokens) -> np.ndarray:
    """[n] int64: entries 0..n-1 sorted by token ids (int32 >= 0), a prefix before its extensions, equals as given."""
    import pyarrow as pa  # here, as a GPU machine that only checks kernels may lack it
    import pyarrow.compute as pc

    swapped = tokens.values.astype(">i4")
    offsets = tokens.offsets * swapped.itemsize
    prompts = pa.Array.from_buffers(pa.large_binary(), len(tokens), [None, pa.py_buffer(offsets), pa.py_buffer(swapped)])
    return pc.array_sort_indices(prompts).to_numpy().astype(np.int64)


def common_prefix_lengths(tokens: PackedTokens, order: np.ndarray) -> np.ndarray:
    """[n] int32: tokens that entry order[i] shares with entry order[i - 1]; 0 for the first.

    Pairs that are still equal advance by CHUNK tokens together, so each shared token is read once.
    """
    shared = np.zeros(len(order), np.int32)
    starts, lengths = tokens.offsets[:-1], np.diff(tokens.offsets)
    # a row of this view is the CHUNK tokens that begin there; what lies past a prompt's end is cut off by `limit`
    chunks = np.lib.stride_tricks.sliding_window_view(np.append(tokens.values, np.zeros(CHUNK, np.int32)), CHUNK)
    for begin in range(1, len(order), PIECE):
        pairs = np.arange(begin, min(begin + PIECE, len(order)))
        a, b = order[pairs - 1], order[pairs]
        limit = np.minimum(lengths[a], lengths[b])
        a, b, depth = starts[a], starts[b], 0
        while len(pairs):
            different = chunks[a + depth] != chunks[b + depth]
            first = np.where(different.any(axis=1), different.argmax(axis=1), CHUNK) + depth
            shared[pairs] = np.minimum(first, limit)
            depth += CHUNK
            go_on = (first == depth) & (limit > depth)
            pairs, a, b, limit = pairs[go_on], a[go_on], b[go_on], limit[go_on]
    return shared
