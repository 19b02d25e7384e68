"""JSON lines: one object a line; of a .json file also one list of them. A line that is none is a bad row, a file that cannot
be opened or unpacked a bad job.

Read twice: once for the type of every column, which must hold all rows, and once for each use. pyarrow.json is not used: it
guesses types from the first block, takes text for dates, fills in keys, and fails as a whole for one bad line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import BufferedReader
from os.path import splitext
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa

from batchgen.data.files import PACKED, InputFile
from batchgen.data.files_reader import BATCH_BYTES, FilesReader
from batchgen.data.json_list import begins_list, items, unique_keys
from batchgen.data.json_shapes import Shape
from batchgen.data.rows import JSON_VALUES, with_faults
from batchgen.data.text_files import open_text
from batchgen.data.unify import to_batch
from batchgen.errors import InputError
from batchgen.records import RowFault

_MAX_COLUMNS = 10_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Line(NamedTuple):
    number: int  # from 1, as editors count
    num_bytes: int
    row: dict[str, Any] | RowFault


class JsonlReader(FilesReader):
    """Columns are the keys of all rows, in the order in which they first come; a row without one has null there.

    A column whose values no Arrow type holds exactly (text beside numbers, objects of differing keys, whole numbers
    beyond 64 bits) is text of JSON; templates see its values, see rows.iter_rows.
    """

    suffixes = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *PACKED))
    title = "lines of JSON"

    def scan(self) -> tuple[pa.Schema, list[int]]:
        shapes: dict[str, Shape] = {}
        file_rows = []
        for file in self.files:
            num_rows, num_good = 0, 0
            first: RowFault | None = None
            for line in self._lines(file):
                num_rows += 1
                if isinstance(line.row, RowFault):
                    first = first or line.row
                    continue
                num_good += 1
                for key, value in line.row.items():
                    if key not in shapes:
                        shapes[key] = Shape()
                    shapes[key].see(value)
                if len(shapes) > _MAX_COLUMNS:
                    raise InputError(
                        f"{file.path}: line {line.number}: more than {_MAX_COLUMNS:,} different keys; put what differs by "
                        "row in an object under one key"
                    )
            if first is not None and not num_good:
                raise InputError(f"{file.path}: no line of it is a JSON object: {first.message}")
            file_rows.append(num_rows)
        return pa.schema([_field(name, shape) for name, shape in shapes.items()]), file_rows

    def read(self, file: InputFile, wanted: pa.Schema, num_rows: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        held: list[dict[str, Any] | RowFault] = []
        num_bytes = 0
        for line in self._lines(file):
            held.append(line.row)
            num_bytes += line.num_bytes
            if len(held) == batch_rows or num_bytes >= BATCH_BYTES:
                yield _to_batch(held, wanted, file)
                held, num_bytes = [], 0
        if held:
            yield _to_batch(held, wanted, file)

    def _lines(self, file: InputFile) -> Iterator[Line]:
        with self._explained(file), open_text(file) as stream:
            if _suffix(file.path) == ".json" and begins_list(cast(BufferedReader, stream).peek(1024)):
                yield from _list_items(file, stream)
                return
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield Line(number, len(line), parse(line, number))


def _suffix(path: str) -> str:
    return splitext(path.lower().removesuffix(".gz").removesuffix(".zst"))[1]


def _list_items(file: InputFile, stream: BinaryIO) -> Iterator[Line]:
    """The items of a file that is one list. Raises InputError where it is broken: nothing after that can be told apart."""
    number = 0
    try:
        for number, (size, value) in enumerate(items(stream), 1):
            place = f"item {number} of the list"
            if isinstance(value, ValueError):
                yield Line(number, size, RowFault("bad_json", f"{place} is not JSON: {_why(value)}"))
            else:
                yield Line(number, size, _checked(value, place))
    except UnicodeDecodeError:
        raise InputError(f"{file.path}: holds bytes that are not UTF-8, after item {number} of its list") from None
    except RecursionError:
        raise InputError(f"{file.path}: what follows item {number} of its list is nested too deeply") from None
    except ValueError as error:
        raise InputError(
            f"{file.path}: is no list of JSON objects: after item {number}: {error}; mend it, or write one object a line"
        ) from None


def _checked(value: Any, place: str) -> dict[str, Any] | RowFault:
    if not isinstance(value, dict):
        return RowFault("bad_json", f'{place} is {_NAMES[type(value)]}, not an object such as {{"question": ...}}')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return RowFault("not_utf8", f"{place} holds half of a surrogate pair, which is no character")
    return value


def parse(line: bytes, number: int) -> dict[str, Any] | RowFault:
    """The object that the line of that number is, or why it is none."""
    try:
        value = _DECODER.decode(line.decode())
        if _SURROGATE.search(line):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return RowFault("not_utf8", f"line {number} holds bytes that are not UTF-8 (at byte {error.start})")
    except UnicodeEncodeError:
        return RowFault("not_utf8", f"line {number} holds half of a surrogate pair, which is no character")
    except RecursionError:
        return RowFault("bad_json", f"line {number} is nested too deeply")
    except ValueError as error:
        return RowFault("bad_json", f"line {number} is not JSON: {_why(error)}")
    if not isinstance(value, dict):
        return RowFault("bad_json", f'line {number} is {_NAMES[type(value)]}, not an object such as {{"question": ...}}')
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_NAMES = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


def _why(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error).split(";")[0]


def _field(name: str, shape: Shape) -> pa.Field:
    kind = shape.arrow_type()
    return pa.field(name, pa.string(), metadata=JSON_VALUES) if kind is None else pa.field(name, kind)


def _to_batch(rows: list[dict[str, Any] | RowFault], wanted: pa.Schema, file: InputFile) -> pa.RecordBatch:
    faults = {i: row for i, row in enumerate(rows) if isinstance(row, RowFault)}
    good: list[dict[str, Any]] = [{} if isinstance(row, RowFault) else row for row in rows]
    arrays = []
    for field in wanted:
        values = [row.get(field.name) for row in good]
        if field.metadata == JSON_VALUES:
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        try:
            arrays.append(pa.array(values, field.type))
        except (pa.ArrowException, TypeError, OverflowError):
            raise InputError(f"{file.path}: changed while it was read: {field.name} is no longer {field.type}") from None
    return with_faults(to_batch(arrays, wanted, len(rows)), faults)
