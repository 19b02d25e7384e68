"""Parquet files as batches of a few rows.

Read with `ParquetFile.iter_batches` alone: `read_row_group` fails on nested text beyond 2 GB, and the dataset scanner keeps
what it has read. A batch is bounded in rows and, as far as can be foreseen, in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.files import InputFile
from batchgen.data.files_reader import BATCH_BYTES, STREAM_BYTES, FilesReader, rows_only
from batchgen.data.unify import conform

_PROBE_ROWS = 16


class ParquetReader(FilesReader):
    suffixes = (".parquet",)
    title = "Parquet"

    def scan(self) -> tuple[pa.Schema, list[int]]:
        file_rows, schemas = [], []
        for file in self.files:
            with self._open(file) as parquet:
                file_rows.append(parquet.metadata.num_rows)
                schemas.append(parquet.schema_arrow)
        return self.unified(schemas, file_rows), file_rows

    def read(self, file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        if not wanted.names:
            yield from rows_only(num_rows, batch_rows)
            return
        with self._open(file) as parquet:
            size = min(batch_rows, _rows_in_budget(parquet, wanted.names, num_rows))
            for batch in parquet.iter_batches(size, columns=wanted.names):
                if batch.num_rows:
                    yield conform(batch, wanted, file.path)

    @contextlib.contextmanager
    def _open(self, file: InputFile) -> Iterator[pq.ParquetFile]:
        with self._explained(file):
            stream = file.open()
            # pre_buffer, on by default, keeps every column chunk that was read: memory would grow to the size of the file
            with pq.ParquetFile(stream, buffer_size=STREAM_BYTES, pre_buffer=False) as parquet:
                yield parquet


def _rows_in_budget(parquet: pq.ParquetFile, columns: list[str], num_rows: int) -> int:
    """Rows that fit in BATCH_BYTES, by the footer's sizes and by a few real rows.

    The footer alone is not enough: text that repeats is stored once there, and many times in a batch. Its sizes are taken of
    all columns together: to ask for those of one ends the process where its metadata are damaged (pyarrow 26).
    """
    meta = parquet.metadata
    total = sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))
    probe = next(parquet.iter_batches(_PROBE_ROWS, columns=columns))
    row_bytes = max(total / num_rows, probe.get_total_buffer_size() / max(1, probe.num_rows), 1)
    return max(1, int(BATCH_BYTES / row_bytes))
