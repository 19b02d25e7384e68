"""What flows between the stages: Prompt -> (token store) -> Window -> Completion -> Part. Knows no stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np


class RowStatus(StrEnum):
    """How a row ended. Every row of the job ends in exactly one of these."""

    OK = "ok"
    ERROR = "error"
    SKIPPED = "skipped"


class FinishReason(StrEnum):
    """Why generation ended: an end token or stop string, or the length limit."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class RowFault(NamedTuple):
    """Why one row has no answer. `code` is one of the documented error codes, `message` is a sentence for the user."""

    code: str
    message: str


class Prompt(NamedTuple):
    """One input row after the template. Exactly one of `text` and `fault` is set.

    `segments` is set instead of `text` only where the row's own content held the text of a control token: pieces that
    alternate between (text to be encoded as plain text, False) and (one control token of the template, True).
    """

    row: int  # position among all rows of the input, before `input.where` and `input.limit`
    row_key: int  # uint64 identity for seeds: hash of the user's id, else of (source file, position in that file)
    text: str | None = None
    fault: RowFault | None = None
    segments: list[tuple[str, bool]] | None = None


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The prompts of consecutive entries of a token store, end to end in one array. Called with an entry: its token ids."""

    values: np.ndarray  # [num_tokens] int32
    offsets: np.ndarray  # [n + 1] int64, where each prompt begins in `values`, and the end
    first: int = 0  # the entry that comes first

    @classmethod
    def pack(cls, prompts: Iterable[np.ndarray]) -> PackedTokens:
        """One copy of each of `prompts` ([length] int32)."""
        parts = list(prompts)
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32, copy=False), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __call__(self, entry: int) -> np.ndarray:
        """[length] int32, a view."""
        i = entry - self.first
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def select(self, entries: np.ndarray) -> PackedTokens:
        """The prompts of `entries` ([n] int64, increasing) as entries 0..n-1; no copy if only empty ones are left out."""
        kept = np.zeros(len(self), bool)
        kept[entries - self.first] = True
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths[kept])])
        values = self.values if offsets[-1] == self.offsets[-1] else self.values[np.repeat(kept, lengths)]
        return PackedTokens(values, offsets)


@dataclass(frozen=True, eq=False)
class Window:
    """The rows that are planned together, in the order in which they will be admitted.

    In prefix order they form a depth-first walk of the tree of full blocks. Block d of row i is read again by the rows
    after i as long as each of them shares more than d blocks with its predecessor:

        i                0   1   2   3   4   5
        shared_blocks    0   3   3   1   4   0      block 2 of row 0 has two uses to come: rows 1 and 2
    """

    tokens: Callable[[int], np.ndarray]  # row index in the token store -> [length] int32
    index: np.ndarray  # [n] int64, position in the token store
    lengths: np.ndarray  # [n] int32, prompt tokens
    shared_tokens: np.ndarray  # [n] int32, tokens shared with the row before
    shared_blocks: np.ndarray  # [n] int32, full blocks shared with the row before
    next_smaller: np.ndarray  # [n] int64, the next row that shares fewer blocks than this one (n if there is none)
    block_size: int
    unit_starts: np.ndarray | None = None  # [m] int64, first rows of subtrees that may be admitted in any order; None: one

    def __len__(self) -> int:
        return len(self.index)

    def prompt(self, i: int) -> np.ndarray:
        return self.tokens(int(self.index[i]))

    def num_cached(self) -> np.ndarray:
        """[n] int32: prompt tokens that each row finds in the cache, if the pool holds the path and the running set.

        Whole blocks, and never the last token: it is computed again for its logits.
        """
        return np.minimum(self.shared_blocks, (self.lengths - 1) // self.block_size) * self.block_size

    def num_computed(self) -> int:
        """Prompt tokens to compute = tokens on the edges of the block-aligned prefix tree."""
        return int((self.lengths - self.num_cached()).sum())


@dataclass(slots=True)
class Completion:
    """The answer to (row, sample_index), or the reason why there is none."""

    row: int
    sample_index: int
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # end token included if it was emitted
    text: str | None = None
    finish_reason: FinishReason = FinishReason.ERROR
    stop_reason: str | None = None  # the stop string, or the id of the end token as text
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    fault: RowFault | None = None

    @property
    def status(self) -> RowStatus:
        return RowStatus.OK if self.fault is None else RowStatus.ERROR


class Part(NamedTuple):
    """One committed output file, as commit.log records it."""

    name: str
    num_rows: int  # answers in it, one for each (row, sample)
    num_bytes: int
    checksum: str  # xxh3-128 of the file, hex
    min_row: int = 0  # row numbers in it lie between these, both included
    max_row: int = 0
    num_failed: int = 0  # answers whose status is not ok
    committed_at: float = 0.0  # seconds since 1970

    @property
    def number(self) -> int:
        """7 of part-000007.parquet. Later parts have higher ones."""
        return int(self.name[5:-8])
