"""What all formats of files share: rows in the order of the files, positions, fingerprint. Knows no format.

A format is a subclass with `suffixes`, `title`, `scan` and `read`, and one line in the table of reader.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import pyarrow as pa
import xxhash

from batchgen.data.files import InputFile
from batchgen.data.hive import Partitions
from batchgen.data.unify import may_not_fit, require_columns, to_batch, unify_schemas
from batchgen.errors import InputError

BATCH_BYTES = 32 * 2**20
STREAM_BYTES = 2**20  # files are read in pieces of this size, not whole


class SourceBatch(NamedTuple):
    """Consecutive rows of one file."""

    source: str  # the file's name below the input's base folder
    source_row: int  # position of the first row in that file
    row: int  # position of the first row among all rows of the input
    batch: pa.RecordBatch  # its bad rows, if any, are told by rows.faults_of


class FilesReader(ABC):
    """A Reader (see reader.py) of files of one format. Folders named lang=de give a column lang."""

    suffixes: ClassVar[tuple[str, ...]]
    title: ClassVar[str]  # of the format, in messages

    def __init__(self, files: list[InputFile]):
        self.files = files
        schema, self._file_rows = self.scan()
        self._partitions = Partitions([file.source for file in files], schema)
        self._schema = pa.schema([*schema, *self._partitions.fields])

    @abstractmethod
    def scan(self) -> tuple[pa.Schema, list[int]]:
        """One schema for all of `files`, and how many rows each has. Raises InputError for what is wrong with a file."""

    @abstractmethod
    def read(self, file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of one file of `num_rows` rows, in batches of at most `batch_rows` and about BATCH_BYTES, not empty, of
        just the schema `wanted`, some columns of what `scan` said."""

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
        stored = pa.schema([field for field in wanted if field.name not in self._partitions.names])
        file_start = 0
        for i, (file, num_rows) in enumerate(zip(self.files, self._file_rows, strict=True)):
            source_row = 0
            for batch in self.read(file, stored, num_rows, batch_rows) if num_rows else ():
                if len(stored) != len(wanted):
                    batch = self._partitions.add(batch, wanted, i)
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
            with self._explained(file), file.fs.open(file.path, "rb") as stream:
                while piece := stream.read(STREAM_BYTES):
                    digest.update(piece)
            hashes[file.source] = digest.hexdigest()
        return hashes

    def unified(self, schemas: list[pa.Schema], file_rows: list[int]) -> pa.Schema:
        """`schemas` of the files as one. Raises InputError for those that do not fit, and for a value that is lost in the
        common type: columns for which that is possible are read for it, so that it is known before any work starts."""
        schema = unify_schemas([(file.path, one) for file, one in zip(self.files, schemas, strict=True)])
        for file, own, num_rows in zip(self.files, schemas, file_rows, strict=True):
            doubtful = [field for field in schema if may_not_fit(own.field(field.name).type, field.type)]
            if doubtful and num_rows:
                for _ in self.read(file, pa.schema(doubtful), num_rows, 1024):
                    pass
        return schema

    @contextlib.contextmanager
    def _explained(self, file: InputFile) -> Iterator[None]:
        """Turns everything that can be wrong with a file, on opening and on reading, into InputError."""
        try:
            yield
        except pa.ArrowException as error:
            if file.fs.size(file.path) == 0:
                raise InputError(f"{file.path}: empty (0 bytes), so not {self.title}; remove it or write it again") from None
            raise InputError(f"{file.path}: cannot be read as {self.title}: {_first_line(error)}") from None
        except OSError as error:
            raise InputError(f"{file.path}: cannot be read: {error.strerror or _first_line(error)}") from None


def rows_only(num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Rows without columns: only their number counts."""
    for start in range(0, num_rows, batch_rows):
        yield to_batch([], pa.schema([]), min(batch_rows, num_rows - start))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
