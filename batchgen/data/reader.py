"""Parquet files as one table that is never in memory: batches of a few rows, in a fixed order. Knows no prompt.

Read with `ParquetFile.iter_batches` alone: `read_row_group` fails on nested text beyond 2 GB, and the dataset scanner keeps
what it has read. A batch is bounded in rows and, as far as can be foreseen, in bytes.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchgen.data.files import InputFile, find_files
from batchgen.data.rows import id_keys
from batchgen.errors import InputError
from batchgen.job import InputSection

_BATCH_BYTES = 32 * 2**20
_PROBE_ROWS = 16
_STREAM_BYTES = 2**20  # a column chunk is read in pieces of this size, not whole


class SourceBatch(NamedTuple):
    """Consecutive rows of one file."""

    source: str  # the file's name below the input's base folder
    source_row: int  # position of the first row in that file
    row: int  # position of the first row among all rows of the input
    batch: pa.RecordBatch


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


def open_reader(source: InputSection) -> ParquetReader:
    """Find the files, unify their schemas, and check the columns that the input section names.

    Raises InputError: no file matches, a file that is not Parquet, schemas that do not fit, a missing column, an id column
    with a null or a duplicate (8 bytes of memory a row while it is checked).
    """
    reader = ParquetReader(find_files(source.path, ".parquet"))
    named = {f"input.columns[{i}]": name for i, name in enumerate(source.columns or [])}
    if source.id_column is not None:
        named["input.id_column"] = source.id_column
    require_columns(reader.schema, named)
    if source.id_column is not None:
        check_ids(reader, source.id_column)
    return reader


def require_columns(schema: pa.Schema, named: Mapping[str, str]) -> None:
    """`named`: key of the job file -> column it names. Raises InputError for the first that the input lacks."""
    for key, name in named.items():
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"{key}: the input has no column {name}; {hint}It has {', '.join(schema.names) or 'no columns'}"
            )


class ParquetReader:
    def __init__(self, files: list[InputFile]):
        self.files = files
        self._file_rows: list[int] = []
        schemas: list[tuple[str, pa.Schema]] = []
        for file in files:
            with _open(file) as parquet:
                self._file_rows.append(parquet.metadata.num_rows)
                schemas.append((file.path, parquet.schema_arrow))
        self._schema = unify_schemas(schemas)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def num_rows(self) -> int:
        return sum(self._file_rows)

    def batches(self, columns: list[str] | None, batch_rows: int = 1024) -> Iterator[SourceBatch]:
        """See Reader. Raises InputError for a column that is not there or a file that turns out to be damaged."""
        names = self._schema.names if columns is None else columns
        for name in names:
            require_columns(self._schema, {"columns": name})
        wanted = pa.schema([self._schema.field(name) for name in names])
        file_start = 0
        for file, num_rows in zip(self.files, self._file_rows, strict=True):
            source_row = 0
            for batch in _read_batches(file, wanted, num_rows, batch_rows):
                yield SourceBatch(file.source, source_row, file_start + source_row, batch)
                source_row += batch.num_rows
            if source_row != num_rows:
                raise InputError(f"{file.path}: changed while it was read: {source_row} rows instead of {num_rows}")
            file_start += num_rows

    def fingerprint(self) -> dict[str, str]:
        """See Reader. Reads every byte once, in bounded memory."""
        hashes = {}
        for file in self.files:
            digest = xxhash.xxh3_128()
            with file.fs.open(file.path, "rb") as stream:
                while piece := stream.read(_STREAM_BYTES):
                    digest.update(piece)
            hashes[file.source] = digest.hexdigest()
        return hashes


def _read_batches(file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    with _open(file) as parquet:
        there = [name for name in wanted.names if name in parquet.schema_arrow.names]
        if num_rows == 0:
            return
        if not wanted.names:  # rows without columns: only their number counts
            for start in range(0, num_rows, batch_rows):
                empty = pa.array([{}] * min(batch_rows, num_rows - start), pa.struct([]))
                yield pa.RecordBatch.from_struct_array(empty)
            return
        size = min(batch_rows, _rows_in_budget(parquet, there, num_rows))
        for batch in parquet.iter_batches(size, columns=there):
            if batch.num_rows:
                yield _to_schema(batch, wanted)


def _rows_in_budget(parquet: pq.ParquetFile, columns: list[str], num_rows: int) -> int:
    """Rows that fit in _BATCH_BYTES, by the footer's sizes and by a few real rows.

    The footer alone is not enough: text that repeats is stored once there, and many times in a batch.
    """
    wanted, total = set(columns), 0
    meta = parquet.metadata
    for group in range(meta.num_row_groups):
        chunks = meta.row_group(group)
        for i in range(chunks.num_columns):
            chunk = chunks.column(i)
            if chunk.path_in_schema.split(".")[0] in wanted:
                total += chunk.total_uncompressed_size
    probe = next(parquet.iter_batches(_PROBE_ROWS, columns=columns))
    row_bytes = max(total / num_rows, probe.get_total_buffer_size() / max(1, probe.num_rows), 1)
    return max(1, int(_BATCH_BYTES / row_bytes))


def _to_schema(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Columns in the wanted order; where this file has only nulls, nulls of the type that others have."""
    arrays = []
    for field in wanted:
        array = batch.column(field.name)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


@contextlib.contextmanager
def _open(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Turns everything that can be wrong with the file, on opening and on reading, into InputError."""
    try:
        stream = file.open()
        # pre_buffer, on by default, keeps every column chunk that was read: memory would grow to the size of the file
        with pq.ParquetFile(stream, buffer_size=_STREAM_BYTES, pre_buffer=False) as parquet:
            yield parquet
    except pa.ArrowException as error:
        if file.fs.size(file.path) == 0:
            raise InputError(f"{file.path}: empty (0 bytes), so not a Parquet file; remove it or write it again") from None
        raise InputError(f"{file.path}: cannot be read as Parquet: {_first_line(error)}") from None
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read: {error.strerror or _first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def unify_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for all files (name, schema). A column that holds only nulls in one file takes its type from the others.

    Raises InputError that names file and column: a column missing in a file, or of another type.
    """
    (first, base), *others = schemas
    fields: dict[str, pa.Field] = {}
    for field in base:
        if field.name in fields:
            raise InputError(f"{first}: has two columns named {field.name}; rename one")
        fields[field.name] = field
    for name, schema in others:
        if len(set(schema.names)) != len(schema.names):
            twice = next(column for column in schema.names if schema.names.count(column) > 1)
            raise InputError(f"{name}: has two columns named {twice}; rename one")
        for column in fields.keys() - set(schema.names):
            raise InputError(f"{name}: has no column {column}, but {first} has; make the files alike")
        for field in schema:
            if field.name not in fields:
                raise InputError(f"{name}: has a column {field.name} that {first} has not; make the files alike")
            one = fields[field.name]
            kind = _widen(one.type, field.type)
            if kind is None:
                raise InputError(
                    f"{name}: column {field.name} is {field.type}, but {one.type} in {first}; give it one type in all files"
                )
            fields[field.name] = pa.field(field.name, kind, one.nullable or field.nullable, one.metadata)
    return pa.schema(list(fields.values()))


def _widen(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type of both, where `null` (no value seen yet) gives way, also inside lists and structs; None if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = _widen(one.value_type, other.value_type)
        return item and pa.list_(one.value_field.with_type(item))
    if pa.types.is_struct(one) and pa.types.is_struct(other) and [f.name for f in one] == [f.name for f in other]:
        kinds = [_widen(a.type, b.type) for a, b in zip(one, other, strict=True)]
        return None if None in kinds else pa.struct([f.with_type(kind) for f, kind in zip(one, kinds, strict=True)])
    return None


def check_ids(reader: Reader, column: str) -> None:
    """Raises InputError if a value of `column` is null or comes twice, with an example and its two rows."""
    kind = reader.schema.field(column).type
    hashes = np.empty(reader.num_rows, np.uint64)
    for source in reader.batches([column]):
        ids = source.batch.column(0)
        if ids.null_count:
            row = source.row + ids.is_null().to_pylist().index(True)
            raise InputError(
                f"input.id_column: {column} is null in row {row}; every row needs an id, or leave id_column out"
            )
        try:
            hashes[source.row : source.row + len(ids)] = id_keys(ids)
        except TypeError:
            raise InputError(f"input.id_column: {column} is {kind}; an id is text or a whole number") from None
    order = np.sort(hashes)
    suspects = order[1:][order[1:] == order[:-1]]
    if len(suspects):
        _report_duplicate(reader, column, suspects)


def _report_duplicate(reader: Reader, column: str, suspects: np.ndarray) -> None:
    """Equal hashes are only a suspicion: compare the values."""
    seen: dict[object, int] = {}
    for source in reader.batches([column]):
        ids = source.batch.column(0)
        for i in np.flatnonzero(np.isin(id_keys(ids), suspects)):
            value = ids.slice(i, 1).to_pylist()[0]
            if value in seen:
                raise InputError(
                    f'input.id_column: {column} "{value}" is in row {seen[value]} and in row {source.row + i}; '
                    "ids must be unique, or leave id_column out to use positions"
                )
            seen[value] = source.row + int(i)
