"""What flows between the stages: Prompt -> (token store) -> Request -> Completion -> Part. Knows no stage."""

from __future__ import annotations

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


class Request(NamedTuple):
    """One thing to generate: sample `sample_index` of row `row`."""

    row: int
    sample_index: int
    row_key: int
    token_ids: np.ndarray  # [num_prompt_tokens] int32


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
