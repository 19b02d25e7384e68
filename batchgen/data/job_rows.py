"""The rows of a job as they stand in the input now, and which committed answers are theirs. Knows no file.

An answer belongs to a row if it was given to the same row key and to the same prompt. Positions do not matter, so rows may
be added, files renamed and their order changed; a row whose prompt has changed under its key is owed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from batchgen.errors import InputError


class JobRows:
    """`rows` int64 [n], sorted positions in the input; `keys` uint64 [n], see data.rows; `prompt_hashes` uint64 [n].

    Raises InputError if two rows have one key, which for ids that differ needs some 10^9 rows.
    """

    def __init__(self, rows: np.ndarray, keys: np.ndarray, prompt_hashes: np.ndarray) -> None:
        order = np.argsort(rows, kind="stable")
        self.rows, self.keys, self.prompt_hashes = rows[order], keys[order], prompt_hashes[order]
        self._by_key = np.argsort(self.keys, kind="stable")
        self._sorted_keys = self.keys[self._by_key]
        twice = np.flatnonzero(self._sorted_keys[1:] == self._sorted_keys[:-1])
        if len(twice):
            one, other = self.rows[self._by_key[twice[0] : twice[0] + 2]]
            raise InputError(f"input.id_column: the ids of rows {one} and {other} have one hash; change one of them")

    @classmethod
    def of(cls, rows: np.ndarray, keys: np.ndarray, prompts: Iterable[Any]) -> JobRows:
        """`prompts`: bytes or a contiguous array a row, that stand for what it asks: its token ids, or why it has none."""
        digest = xxhash.xxh3_64_intdigest
        return cls(rows, keys, np.fromiter((digest(prompt) for prompt in prompts), np.uint64, count=len(rows)))

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, rows: np.ndarray) -> np.ndarray:
        """[k] int64: where positions `rows`, which are rows of the job, stand in the arrays here."""
        return np.searchsorted(self.rows, rows)

    def find(self, keys: np.ndarray, prompt_hashes: np.ndarray) -> np.ndarray:
        """[k] int64: which row each answer belongs to, as an index into the arrays here; -1 for one that is nobody's now."""
        if not len(self):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self) - 1)
        index = self._by_key[at]
        return np.where((self.keys[index] == keys) & (self.prompt_hashes[index] == prompt_hashes), index, -1)
