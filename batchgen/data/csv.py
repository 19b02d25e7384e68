"""CSV and TSV with a header line. Every column is text: "007" stays "007", and an empty field is an empty text, not null.

A record that does not fit is a bad row; a quote that is never closed is a bad job, as nothing after it can be told apart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from batchgen.data.files import PACKED, InputFile
from batchgen.data.files_reader import BATCH_BYTES, FilesReader
from batchgen.data.rows import with_faults
from batchgen.data.text_files import open_text
from batchgen.data.unify import to_batch
from batchgen.errors import InputError
from batchgen.records import RowFault

_MAX_FIELD = 2**30  # characters


class Record(NamedTuple):
    """A data record: its fields, one for each column, or why it has others."""

    num_chars: int
    fields: list[str] | RowFault


class CsvReader(FilesReader):
    suffixes = tuple(kind + packed for kind in (".csv", ".tsv") for packed in ("", *PACKED))
    title = "CSV"

    def scan(self) -> tuple[pa.Schema, list[int]]:
        schemas, file_rows = [], []
        for file in self.files:
            records = self._records(file)
            header = next(records).fields
            if isinstance(header, RowFault):
                raise InputError(f"{file.path}: the header: {header.message}")
            if not all(_is_utf8(name) for name in header):
                raise InputError(f"{file.path}: the header holds bytes that are not UTF-8; write the file as UTF-8")
            schemas.append(pa.schema([(name, pa.string()) for name in header]))
            file_rows.append(sum(1 for _ in records))
        return self.unified(schemas, file_rows), file_rows

    def read(self, file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        records = self._records(file)
        header = next(records).fields
        if isinstance(header, RowFault) or not set(wanted.names) <= set(header):
            raise InputError(f"{file.path}: changed while it was read: its header is another one")
        places = [header.index(name) for name in wanted.names]
        held: list[list[str] | RowFault] = []
        num_chars = 0
        for record in records:
            held.append(record.fields)
            num_chars += record.num_chars
            if len(held) == batch_rows or num_chars >= BATCH_BYTES:
                yield _to_batch(held, places, wanted)
                held, num_chars = [], 0
        if held:
            yield _to_batch(held, places, wanted)

    def _records(self, file: InputFile) -> Iterator[Record]:
        """The header, then each record. Bytes that are not UTF-8 are lone surrogates, as `surrogateescape` has them."""
        csv.field_size_limit(_MAX_FIELD)
        delimiter = "\t" if ".tsv" in file.path.lower()[-8:] else ","
        with self._explained(file), open_text(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            width: int | None = None
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    break
                except csv.Error as error:
                    if "end of data" in str(error) or "field larger" in str(error):
                        raise InputError(
                            f"{file.path}: line {line}: a quote is opened and never closed; close it, or double it if it is "
                            "part of the text"
                        ) from None
                    yield Record(0, RowFault("bad_csv", f"line {line}: {error}"))
                    continue
                if not fields:
                    continue
                if width is None:
                    width = len(fields)
                if len(fields) != width:
                    say = f"line {line} has {len(fields)} fields, but the header has {width}"
                    yield Record(0, RowFault("bad_csv", say))
                else:
                    yield Record(sum(map(len, fields)), fields)
            if width is None:
                raise InputError(f"{file.path}: empty: not even a header line with the names of the columns")


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)


def _to_batch(records: list[list[str] | RowFault], places: list[int], wanted: pa.Schema) -> pa.RecordBatch:
    faults = {i: record for i, record in enumerate(records) if isinstance(record, RowFault)}
    arrays = []
    for place in places:
        values = [None if isinstance(record, RowFault) else record[place] for record in records]
        try:
            arrays.append(pa.array(values, pa.string()))
        except UnicodeEncodeError:  # bytes that are not UTF-8 stay as they are, and spoil their row only
            raw = [value if value is None else value.encode("utf-8", "surrogateescape") for value in values]
            arrays.append(pa.array(raw, pa.binary()).view(pa.string()))
    return with_faults(to_batch(arrays, wanted, len(records)), faults)
