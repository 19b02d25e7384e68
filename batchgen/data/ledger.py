"""What the committed parts say of each row of the job: answered or not, and how its newest answer ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from batchgen.data.job_rows import JobRows
from batchgen.data.part import read_part_columns
from batchgen.data.part_store import PartStore
from batchgen.records import Part


class Ledger:
    """Arrays of [number of rows], in the order of `rows`; all samples of a row are in one part.

    part_number   int64   of the part with its newest answers; 0 if it is not answered
    is_failed     bool    one of its samples has another status than ok
    is_truncated  bool    one of its samples ended at max_tokens

    Raises CorruptRunError for a part that cannot be read.
    """

    def __init__(self, store: PartStore, parts: Sequence[Part], rows: JobRows) -> None:
        self.rows = rows
        self.part_number = np.zeros(len(rows), np.int64)
        self.is_failed, self.is_truncated = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        for part in parts:
            self.count(store, part)

    def count(self, store: PartStore, part: Part) -> None:
        """One part more, of this store or another's."""
        table = read_part_columns(store, part, ["row_key", "prompt_hash", "status", "finish_reason"])
        index = self.rows.find(table["row_key"].to_numpy(), table["prompt_hash"].to_numpy())
        known = index >= 0
        failed = pc.not_equal(table["status"], "ok").to_numpy()
        truncated = pc.equal(table["finish_reason"], "length").to_numpy()
        self.part_number[index[known]] = part.number
        self.is_failed[index[known]] = self.is_truncated[index[known]] = False
        self.is_failed[index[known & failed]] = True
        self.is_truncated[index[known & truncated]] = True

    @property
    def is_answered(self) -> np.ndarray:
        return self.part_number > 0
