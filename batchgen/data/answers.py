"""Committed answers back in input order, one bucket of rows at a time, in memory that does not grow with the job.

Parts are in the order in which rows ended. If all answers fit in one bucket they are sorted there; else a first pass deals
them out to one spill file a bucket, and a second pass sorts each. Every bucket is checked: each (row, sample) exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.durable import explain_os_errors
from batchgen.data.run_folder import RunFolder
from batchgen.data.schema import ANSWER_SCHEMA
from batchgen.data.writer import read_part
from batchgen.errors import CorruptRunError
from batchgen.records import Part

BUCKET_ANSWERS = 65_536
BUCKET_BYTES = 256 * 2**20


class SortedAnswers:
    """The answers to `rows` (sorted positions, int64 [num_rows]) with `n` samples each.

    `spill` is a folder for temporary files; the caller deletes it.
    """

    def __init__(self, folder: RunFolder, parts: list[Part], rows: np.ndarray, n: int, spill: Path):
        self.folder, self.parts, self.rows, self.n, self.spill = folder, parts, rows, n, spill
        self.bucket_rows = self._rows_in_a_bucket()
        self.num_buckets = -(-len(rows) // self.bucket_rows)

    def buckets(self) -> Iterator[pa.Table]:
        """Tables in ANSWER_SCHEMA, sorted by (row, sample_index); together all of `rows`, `bucket_rows` rows each.

        Raises CorruptRunError if an answer is missing, doubled or to no row of the job, or if a part is damaged.
        """
        if self.num_buckets <= 1:
            tables = [self._known(read_part(self.folder, part)) for part in self.parts]
            if self.num_buckets == 1:
                yield self._sorted(0, tables)
            return
        self._deal_out()
        for bucket in range(self.num_buckets):
            yield self._sorted(bucket, list(_read_spill(self._spill_file(bucket))))

    def _rows_in_a_bucket(self) -> int:
        """As many as BUCKET_ANSWERS and BUCKET_BYTES allow, by the sizes that the parts' footers state."""
        num_bytes = num_answers = 0
        for part in self.parts:
            path = self.folder.parts / part.name
            try:
                meta = pq.read_metadata(path)
            except (OSError, pa.ArrowInvalid):
                continue  # read_part says what is wrong with it
            num_answers += meta.num_rows
            num_bytes += sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        fit = BUCKET_ANSWERS
        if num_answers:
            fit = min(fit, int(BUCKET_BYTES / max(1, num_bytes / num_answers)))
        return max(1, fit // self.n)

    def _known(self, table: pa.Table) -> pa.Table:
        """Refuse answers to rows that the job does not have."""
        row, sample = table["row"].to_numpy(), table["sample_index"].to_numpy()
        at = np.searchsorted(self.rows, row)
        known = np.zeros(len(row), bool)
        inside = at < len(self.rows)
        known[inside] = self.rows[at[inside]] == row[inside]
        known &= (sample >= 0) & (sample < self.n)
        if not known.all():
            pairs = _pairs(row[~known], sample[~known])
            raise CorruptRunError(f"{self.folder.path}: answers to (row, sample) that the job does not have: {pairs}")
        return table

    def _deal_out(self) -> None:
        self.spill.mkdir(parents=True)
        held: dict[int, list[pa.Table]] = {}
        num_bytes = 0
        for part in self.parts:
            table = self._known(read_part(self.folder, part))
            bucket = np.searchsorted(self.rows, table["row"].to_numpy()) // self.bucket_rows
            order = np.argsort(bucket, kind="stable")
            table = table.take(order)
            names, starts = np.unique(bucket[order], return_index=True)
            for name, start, end in zip(names, starts, [*starts[1:], len(order)], strict=True):
                held.setdefault(int(name), []).append(table.slice(start, end - start))
            num_bytes += table.nbytes
            if num_bytes > BUCKET_BYTES:
                self._write_spill(held)
                held, num_bytes = {}, 0
        self._write_spill(held)

    def _write_spill(self, held: dict[int, list[pa.Table]]) -> None:
        """Append one IPC stream to the file of each bucket: no file stays open, however many buckets there are."""
        for bucket, tables in held.items():
            path = self._spill_file(bucket)
            with explain_os_errors(path), open(path, "ab") as file, pa.ipc.new_stream(file, ANSWER_SCHEMA) as stream:
                stream.write_table(pa.concat_tables(tables).combine_chunks())

    def _spill_file(self, bucket: int) -> Path:
        return self.spill / f"bucket-{bucket:06d}.arrows"

    def _sorted(self, bucket: int, tables: list[pa.Table]) -> pa.Table:
        rows = self.rows[bucket * self.bucket_rows :][: self.bucket_rows]
        table = pa.concat_tables([ANSWER_SCHEMA.empty_table(), *tables]).combine_chunks()
        place = np.searchsorted(rows, table["row"].to_numpy()) * self.n + table["sample_index"].to_numpy()
        count = np.bincount(place, minlength=len(rows) * self.n)
        for wrong, what in ((count == 0, "no answer to"), (count > 1, "more than one answer to")):
            if wrong.any():
                at = np.flatnonzero(wrong)
                raise CorruptRunError(
                    f"{self.folder.path}: {what} {len(at)} (row, sample) of rows {rows[0]} to {rows[-1]}, "
                    f"such as {_pairs(rows[at // self.n], at % self.n)}; "
                    "run the same command again to compute what is missing, or start in a new output.path"
                )
        return table.take(np.argsort(place))


def _read_spill(path: Path) -> Iterator[pa.Table]:
    if not path.exists():
        return
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        while file.tell() < num_bytes:
            yield pa.ipc.open_stream(file).read_all()


def _pairs(rows: np.ndarray, samples: np.ndarray) -> str:
    shown = ", ".join(f"({row}, {sample})" for row, sample in zip(rows[:5], samples[:5]))
    return shown + (", ..." if len(rows) > 5 else "")
