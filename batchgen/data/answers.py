"""Committed answers back in input order, one bucket of rows at a time, in memory that does not grow with the job.

Parts are in the order in which rows ended. If all answers fit in one bucket they are sorted there; else a first pass deals
them out to one spill file a bucket, and a second pass sorts each. Of two answers to one (row, sample) the one committed last
counts. Every bucket is checked: each (row, sample) has one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.durable import explain_os_errors
from batchgen.data.job_rows import JobRows
from batchgen.data.part import read_part
from batchgen.data.part_store import PartStore
from batchgen.data.schema import ANSWER_SCHEMA
from batchgen.errors import CorruptRunError
from batchgen.records import Part

BUCKET_ANSWERS = 65_536
BUCKET_BYTES = 256 * 2**20
GRID_ANSWERS = 1024


class SortedAnswers:
    """The answers to `rows` with `n` samples each.

    `spill` is a folder for temporary files; the caller deletes it.
    """

    def __init__(self, store: PartStore, parts: list[Part], rows: JobRows, n: int, spill: Path):
        self.store, self.parts, self.rows, self.n, self.spill = store, parts, rows, n, spill
        self.grid_rows = max(1, GRID_ANSWERS // n)  # buckets are multiples of it
        self.bucket_rows = self._rows_in_a_bucket()
        self.num_buckets = -(-len(rows) // self.bucket_rows)

    def buckets(self) -> Iterator[pa.Table]:
        """Tables in ANSWER_SCHEMA, sorted by (row, sample_index); together all of `rows`, `bucket_rows` rows each.

        Raises CorruptRunError if an answer is missing, or if a part is damaged.
        """
        if self.num_buckets <= 1:
            tables = [self._placed(part) for part in self.parts]
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
            path = self.store.parts / part.name
            try:
                meta = pq.read_metadata(path)
            except (OSError, pa.ArrowInvalid):
                continue  # read_part says what is wrong with it
            num_answers += meta.num_rows
            num_bytes += sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        fit = BUCKET_ANSWERS
        if num_answers:
            fit = min(fit, int(BUCKET_BYTES / max(1, num_bytes / num_answers)))
        return max(1, fit // self.n // self.grid_rows) * self.grid_rows

    def _placed(self, part: Part) -> pa.Table:
        """The answers in a part that are those of a row now, `row` being where it stands now, in ANSWER_SCHEMA."""
        table = read_part(self.store, part)
        index = self.rows.find(table["row_key"].to_numpy(), table["prompt_hash"].to_numpy())
        sample = table["sample_index"].to_numpy()
        place = (index * self.n + sample)[index >= 0]
        if len(np.unique(place)) < len(place) or np.any((sample < 0) | (sample >= self.n)):
            raise CorruptRunError(
                f"{self.store.parts / part.name}: holds two answers to one (row, sample), or a sample that the job does "
                "not have; move this file away and run the job again, which computes its answers anew"
            )
        table = table.filter(pa.array(index >= 0)).select(ANSWER_SCHEMA.names)
        row = pa.array(self.rows.rows[index[index >= 0]])
        return table.set_column(0, ANSWER_SCHEMA.field("row"), row).cast(ANSWER_SCHEMA)

    def _deal_out(self) -> None:
        self.spill.mkdir(parents=True)
        held: dict[int, list[pa.Table]] = {}
        num_bytes = 0
        for part in self.parts:
            table = self._placed(part)
            if not table.num_rows:
                continue
            bucket = self.rows.index(table["row"].to_numpy()) // self.bucket_rows
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
        rows = self.rows.rows[bucket * self.bucket_rows :][: self.bucket_rows]
        table = pa.concat_tables([ANSWER_SCHEMA.empty_table(), *tables]).combine_chunks()
        place = np.searchsorted(rows, table["row"].to_numpy()) * self.n + table["sample_index"].to_numpy()
        newest = np.full(len(rows) * self.n, -1)
        np.maximum.at(newest, place, np.arange(len(place)))  # tables come in the order of the log
        missing = np.flatnonzero(newest < 0)
        if len(missing):
            raise CorruptRunError(
                f"{self.store.path}: no answer to {len(missing)} (row, sample) of rows {rows[0]} to {rows[-1]}, "
                f"such as {_pairs(rows[missing // self.n], missing % self.n)}; "
                "run the same command again to compute what is missing, or start in a new output.path"
            )
        return table.take(newest)


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
