"""The input as one table that is never in memory: which formats there are, and what each has to offer. Knows no prompt."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data import standard_input
from batchgen.data.arrow_ipc import ArrowReader
from batchgen.data.csv import CsvReader
from batchgen.data.files import find_files
from batchgen.data.files_reader import FilesReader, SourceBatch
from batchgen.data.hf_dataset import DatasetReader, is_dataset
from batchgen.data.jsonl import JsonlReader
from batchgen.data.openai_batch import OpenAIBatchReader
from batchgen.data.parquet import ParquetReader
from batchgen.data.rows import faults_of, row_keys, without_text
from batchgen.data.unify import require_columns
from batchgen.errors import InputError
from batchgen.job import InputSection

FORMATS: dict[str, type[FilesReader]] = {
    "parquet": ParquetReader,
    "openai-batch": OpenAIBatchReader,  # only where it is named: files with its suffixes are jsonl
    "jsonl": JsonlReader,
    "csv": CsvReader,
    "arrow": ArrowReader,
}
SUFFIXES = {suffix: name for name, reader in FORMATS.items() for suffix in reader.suffixes}


class Reader(Protocol):
    """What an input format has to offer. Rows have the same order at every call and on every machine."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def num_rows(self) -> int: ...

    def batches(self, columns: list[str] | None, batch_rows: int = 1024) -> Iterator[SourceBatch]:
        """All rows, in batches of at most `batch_rows`, with `columns` (None: all) in that order and of `schema`'s types."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """Source file -> xxh3-128 of its content, hex."""
        ...


def open_reader(source: InputSection) -> Reader:
    """Find the files, unify their schemas, and check the columns that the input section names.

    Raises InputError: no file matches, a file that is not of its format, schemas that do not fit, a missing column, a
    column that Parquet cannot hold, an id column with a null or a duplicate (8 bytes of memory a row while it is checked).
    """
    reader = _open(source)
    named = {f"input.columns[{i}]": name for i, name in enumerate(source.columns or [])}
    if source.id_column is not None:
        named["input.id_column"] = source.id_column
    require_columns(reader.schema, named)
    _refuse_unwritable(reader, reader.schema.names if source.columns is None else source.columns)
    if source.id_column is not None:
        check_ids(reader, source.id_column)
    return reader


def _refuse_unwritable(reader: Reader, carried: list[str]) -> None:
    """Raises InputError for a column that results, which are Parquet, cannot hold: the merge would find out last of all.

    What Parquet keeps as another type (seconds as milliseconds) it may not hold for each value: such columns are read once.
    """
    for name in carried:
        field = reader.schema.field(name)
        schema = pa.schema([field])
        left_out = "list the columns to carry to the results without it"
        try:
            sink = pa.BufferOutputStream()
            pq.ParquetWriter(sink, schema).close()
        except pa.ArrowException:
            raise InputError(
                f"input.columns: the column {name} is {field.type}, which Parquet cannot hold; {left_out}"
            ) from None
        if pq.read_schema(pa.BufferReader(sink.getvalue())).field(0).type == field.type:
            continue
        with open(os.devnull, "wb") as nowhere, pq.ParquetWriter(nowhere, schema) as writer:
            for source in reader.batches([name]):
                try:
                    writer.write_batch(source.batch.replace_schema_metadata(None))
                except pa.ArrowException as error:
                    raise InputError(
                        f"input.columns: the column {name} is {field.type}, and has a value after row {source.row - 1} that "
                        f"Parquet cannot hold: {(str(error).splitlines() or [''])[0]}; {left_out}"
                    ) from None


def _open(source: InputSection) -> Reader:
    if is_dataset(source):
        return DatasetReader(source)
    for key in ("config", "split", "revision"):
        if getattr(source, key) is not None:
            raise InputError(
                f"input.{key}: has no effect on files; it is for data sets, such as hf://datasets/ORG/NAME, or a folder "
                "with input.format: hf"
            )
    given = None if source.format == "auto" else source.format
    if source.path == standard_input.NAME:
        file, folder = standard_input.spool()
        reader = FORMATS[given or "jsonl"]([file])
        weakref.finalize(reader, folder.cleanup)
        return reader
    suffixes = SUFFIXES if given is None else dict.fromkeys(FORMATS[given].suffixes, given)
    files, format = find_files(source.path, suffixes, given)
    return FORMATS[format](files)


def check_ids(reader: Reader, column: str) -> None:
    """Raises InputError if a value of `column` is null or comes twice, with an example. Bad rows need none."""
    kind = reader.schema.field(column).type
    hashes = np.empty(reader.num_rows, np.uint64)
    for source in reader.batches([column]):
        ids = source.batch.column(0)
        if ids.null_count:
            nulls = set(np.flatnonzero(ids.is_null()).tolist()) - faults_of(source.batch).keys()
            if nulls:
                raise InputError(
                    f"input.id_column: {column} is null in row {source.row + min(nulls)}; "
                    "every row needs an id, or leave id_column out"
                )
        try:
            hashes[source.row : source.row + len(ids)] = _keys(source)
        except TypeError:
            raise InputError(f"input.id_column: {column} is {kind}; an id is text or a whole number") from None
    order = np.sort(hashes)
    suspects = order[1:][order[1:] == order[:-1]]
    if len(suspects):
        _report_duplicate(reader, column, suspects)


def _keys(source: SourceBatch) -> np.ndarray:
    return row_keys(source.source, source.source_row, source.batch.num_rows, source.batch.column(0))


def _report_duplicate(reader: Reader, column: str, suspects: np.ndarray) -> None:
    """Equal hashes are only a suspicion: compare the values."""
    seen: dict[object, int] = {}
    for source in reader.batches([column]):
        ids = source.batch.column(0)
        for i in np.flatnonzero(np.isin(_keys(source), suspects)):
            value = without_text(ids.slice(i, 1)).to_pylist()[0]
            if value in seen:
                shown = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
                raise InputError(
                    f'input.id_column: {column} "{shown}" is in row {seen[value]} and in row {source.row + i}; '
                    "ids must be unique, or leave id_column out to use positions"
                )
            if value is not None:
                seen[value] = source.row + int(i)
