"""Completions to committed parts. The order of durability is the whole point: file, name, folder, then the log.

Write the part aside, fsync, os.replace, fsync the folder, then append its record to the log and fsync that. A crash
before the record leaves a file that nothing names, deleted on the next start; its rows are simply still owed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchgen.data.budget import ErrorBudget
from batchgen.data.commit_log import CommitLog
from batchgen.data.durable import write_atomically
from batchgen.data.job_rows import JobRows
from batchgen.data.ledger import Ledger
from batchgen.data.part import part_table
from batchgen.data.part_store import PartStore
from batchgen.data.recover import next_number, part_name, recover
from batchgen.records import Completion, Part, RowStatus


class PartWriter:
    """Collects completions and commits them every `commit_rows` or `commit_seconds`. One process at a time: the lock
    of a run folder sees to that, and a worker's store is nobody else's.

    Opening it deletes what a crash left in parts/ and sets damaged parts aside, see recover; `repairs` tells of those.
    """

    def __init__(
        self,
        store: PartStore,
        rows: JobRows,
        commit_rows: int = 256,
        commit_seconds: float = 30.0,
        compression: str = "zstd",
    ) -> None:
        self.store = store
        self.rows = rows
        self.commit_rows = commit_rows
        self.commit_seconds = commit_seconds
        self.compression = compression
        self.log = CommitLog(store.commit_log)
        self.parts, self.repairs = recover(store)
        self.ledger = Ledger(store, self.parts, rows)
        self.budget = ErrorBudget(None)
        self.on_commit: Callable[[Sequence[Completion]], None] | None = None  # told what was committed
        self._waiting: list[Completion] = []
        self._oldest_since = 0.0  # time.monotonic() of the oldest completion that waits

    def learn(self, rows: JobRows) -> None:
        """More rows of the job are known than when this was opened; everything it was given is committed first."""
        self.commit()
        self.rows = rows
        self.ledger = Ledger(self.store, self.parts, rows)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, *completions: Completion) -> None:
        """Take completions that belong into one part; commits if it is time.

        Raises BatchgenError if the disk refuses, TooManyFailedRows, after a commit, if the error budget is spent.
        """
        if not self._waiting:
            self._oldest_since = time.monotonic()
        self._waiting.extend(completions)
        self.budget.count(completions)
        if self.budget.is_spent:
            self.commit()
            self.budget.check()
        self.commit_if_due()

    def commit_if_due(self) -> bool:
        """For a loop in which no row ends for a while. True if something was committed."""
        if not self._waiting:
            return False
        if len(self._waiting) < self.commit_rows and time.monotonic() - self._oldest_since < self.commit_seconds:
            return False
        return self.commit() is not None

    def commit(self) -> Part | None:
        """Make all that waits safe, as one part; None if nothing waits. Raises BatchgenError; the rows then wait on."""
        if not self._waiting:
            return None
        name = part_name(next_number(self.store))
        image = self._encode(part_table(self._waiting, self.rows))
        write_atomically(self.store.parts / name, lambda file: file.write(image))
        rows = [one.row for one in self._waiting]
        part = Part(
            name=name,
            num_rows=len(rows),
            num_bytes=len(image),
            checksum=xxhash.xxh3_128_hexdigest(image),
            min_row=min(rows),
            max_row=max(rows),
            num_failed=sum(one.status is not RowStatus.OK for one in self._waiting),
            committed_at=time.time(),
        )
        self.log.append(part)
        self.parts.append(part)
        committed, self._waiting = self._waiting, []
        if self.on_commit is not None:
            self.on_commit(committed)
        return part

    def close(self) -> None:
        """Commit the rest. Also right after an exception: a completion handed over is a finished row."""
        self.commit()

    def expect(self, owed: np.ndarray, max_failed_rows: int | None = None) -> dict[str, int]:
        """Say which rows (their positions) will be answered now. Returns what stands without them, for the folder's state.

        Raises TooManyFailedRows if more of the others have failed than `max_failed_rows`.
        """
        standing = self.ledger.is_answered & ~np.isin(self.rows.rows, owed)
        num_failed = int((standing & self.ledger.is_failed).sum())
        self.budget = ErrorBudget(max_failed_rows, num_failed)
        self.budget.check()
        last_part = max((part.number for part in self.parts), default=0)
        return {"standing_rows": int(standing.sum()), "standing_failed": num_failed, "standing_since_part": last_part}

    def finished(self) -> np.ndarray:
        """[n] int64: positions of the job's rows that were answered when this was opened."""
        return self.rows.rows[self.ledger.is_answered]

    def _encode(self, table: pa.Table) -> memoryview:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=self.compression)
        return memoryview(sink.getvalue())
