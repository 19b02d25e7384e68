"""results/: the merged rows in the format that output.format names.

A format is a class with `write` and `close` over an open file; `FORMATS` is the table of them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.durable import explain_os_errors
from batchgen.data.json_values import json_lines
from batchgen.data.openai_batch import OUTPUT_FILE, OpenAIBatchWriter
from batchgen.errors import BatchgenError
from batchgen.job import OutputSection

_ROW_GROUP_ROWS = 65_536
_ROW_GROUP_BYTES = 128 * 2**20


class _Format(Protocol):
    def write(self, table: pa.Table) -> None: ...
    def close(self) -> None: ...


class _Parquet:
    """One row group a table, with statistics."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, output: OutputSection) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression=output.compression)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)

    def close(self) -> None:
        self._writer.close()


class _JsonLines:
    """One object a row."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, output: OutputSection) -> None:
        self._file = file

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=1024):
            self._file.writelines(json_lines(batch))

    def close(self) -> None:
        pass


# name of a file by its number, and what writes it
FORMATS: dict[str, tuple[str, type[_Parquet] | type[_JsonLines] | type[OpenAIBatchWriter]]] = {
    "parquet": ("part-{:05d}.parquet", _Parquet),
    "jsonl": ("part-{:05d}.jsonl", _JsonLines),
    "openai-batch": (OUTPUT_FILE, OpenAIBatchWriter),  # always one
}


class ResultsWriter:
    """Files of `rows_per_file` rows each (None: one file), durable when closed. At least one file.

    write raises BatchgenError if the disk refuses, or the format cannot hold a column.
    """

    def __init__(self, folder: Path, schema: pa.Schema, output: OutputSection):
        self.folder, self.schema, self.output = folder, schema, output
        self._name, self._make = FORMATS[output.format]
        self._rows_per_file = None if output.format == "openai-batch" else output.rows_per_file
        self.names: list[str] = []
        self._file: BinaryIO | None = None
        self._format: _Format | None = None
        self._rows_in_file = 0
        self._held: list[pa.RecordBatch] = []
        self._bytes_held = 0

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
            if not self.names:
                self._open_next()
            self._close_file()
        elif self._file is not None:
            with contextlib.suppress(OSError):  # what it writes on closing; the error that led here is the one to tell
                self._file.close()

    def write(self, batch: pa.RecordBatch, num_bytes: int) -> None:
        """num_bytes: of the batch, by which row groups are kept small."""
        bytes_per_row = num_bytes // max(1, batch.num_rows)
        while batch.num_rows:
            room = batch.num_rows
            if self._rows_per_file is not None:
                room = self._rows_per_file - self._rows_in_file - self._rows_held
            if room == 0:
                self._flush()
                self._close_file()
                continue
            taken = batch.slice(0, min(room, _ROW_GROUP_ROWS - self._rows_held))
            self._held.append(taken)
            self._bytes_held += taken.num_rows * bytes_per_row
            batch = batch.slice(taken.num_rows)
            if self._rows_held == _ROW_GROUP_ROWS or self._bytes_held >= _ROW_GROUP_BYTES:
                self._flush()

    @property
    def _rows_held(self) -> int:
        return sum(one.num_rows for one in self._held)

    def _flush(self) -> None:
        if not self._held:
            return
        if self._file is None:
            self._open_next()
        assert self._format is not None
        table = pa.Table.from_batches(self._held, self.schema)
        try:
            with explain_os_errors(self.folder / self.names[-1]):
                self._format.write(table)
        except pa.ArrowException as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise BatchgenError(f"{self.folder}: {self.output.format} cannot hold a column of the input: {said}") from error
        self._rows_in_file += table.num_rows
        self._held, self._bytes_held = [], 0

    def _open_next(self) -> None:
        self.names.append(self._name.format(len(self.names)))
        path = self.folder / self.names[-1]
        with explain_os_errors(path):
            self._file = open(path, "wb")  # noqa: SIM115 (held open between writes)
            self._format = self._make(self._file, self.schema, self.output)

    def _close_file(self) -> None:
        if self._file is None or self._format is None:
            return
        with explain_os_errors(self.folder / self.names[-1]), self._file as file:
            self._format.close()
            file.flush()
            os.fsync(file.fileno())
        self._file, self._rows_in_file = None, 0
