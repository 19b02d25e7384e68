"""The one chained block hash. Plan and pool use it, so that a block has the same name in every run and on every shard.

hash(block i) = xxh3-128(hash(block i - 1) || token ids of block i), with a fixed seed; the first block chains on ROOT.
A hash only *finds* a block: whoever uses it compares parent and token ids before trusting it, so no collision can make
one prompt read another's keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

ROOT = b"\0" * 16


def block_hash(parent: bytes, token_ids: np.ndarray) -> bytes:
    """16-byte hash of one full block. token_ids: [block_size] int32, C-contiguous; parent: the previous block's hash."""
    return xxhash.xxh3_128_digest(parent + token_ids.tobytes())


def block_hashes(token_ids: np.ndarray, block_size: int, parent: bytes = ROOT) -> Iterator[bytes]:
    """The hash of each full block of token_ids ([n] int32), one after another; `parent` is the hash before the first."""
    digest, data, size = parent, token_ids.tobytes(), 4 * block_size
    for begin in range(0, len(data) - size + 1, size):
        digest = xxhash.xxh3_128_digest(digest + data[begin : begin + size])
        yield digest
