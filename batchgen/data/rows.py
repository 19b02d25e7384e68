"""Arrow rows as Python values for templates, one fault at a time; and the identity of a row. Knows no file.

A value that Python cannot take (bytes that are not UTF-8 in a text column, a date beyond year 9999) spoils its own row only.
So does a row that its format could not read: it is null in all columns, and its batch says why (`with_faults`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from batchgen.records import RowFault

JSON_VALUES = {b"batchgen.values": b"json"}  # metadata of a text field: its values are JSON, and stand for what that says
_FAULTS = b"batchgen.faults"


def iter_rows(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[dict[str, Any] | RowFault]:
    """Each row as {column: value}, or its RowFault: the reader's, or `not_utf8` or `unreadable_value` that names the column.

    In lists of structs (messages), keys whose value is null are left out: Arrow gives every message the keys of all others.
    """
    values: list[list[Any]] = []
    faults: dict[int, RowFault] = {}
    for name in columns:
        values.append(_to_python(batch.column(name), name, faults))
        if (batch.schema.field(name).metadata or {}).items() >= JSON_VALUES.items():
            values[-1] = [_parsed(value, i, name, faults) for i, value in enumerate(values[-1])]
    for i, told in faults_of(batch).items():
        # a slice keeps what was said of the whole, where i was another row: a bad row is null, or this makes no difference
        if i < batch.num_rows and all(column[i] is None for column in values):
            faults[i] = told
    for i in range(batch.num_rows):
        fault = faults.get(i)
        yield fault if fault is not None else {name: column[i] for name, column in zip(columns, values, strict=True)}


def with_faults(batch: pa.RecordBatch, faults: Mapping[int, RowFault]) -> pa.RecordBatch:
    """`batch` with a note of its bad rows (position in it -> why); all their columns must be null."""
    if not faults:
        return batch
    noted = json.dumps({str(i): list(fault) for i, fault in faults.items()})
    return batch.replace_schema_metadata({_FAULTS: noted})


def faults_of(batch: pa.RecordBatch) -> dict[int, RowFault]:
    """The bad rows of a batch as its reader gave it (not of a slice): position -> why."""
    noted = (batch.schema.metadata or {}).get(_FAULTS)
    return {int(i): RowFault(*fault) for i, fault in json.loads(noted).items()} if noted else {}


def row_key(source: str, source_row: int, id_value: object = None) -> int:
    """uint64 identity of a row: of its id where the job names an id column, else of (file, position in the file)."""
    if id_value is None:
        return xxhash.xxh3_64_intdigest(f"row\0{source}\0{source_row}".encode())
    return xxhash.xxh3_64_intdigest(_id_bytes(id_value))


def row_keys(source: str, source_row: int, num_rows: int, ids: pa.Array | None = None) -> np.ndarray:
    """row_key of `num_rows` consecutive rows: uint64 [num_rows]. A bad row, whose id is null, has that of its position.
    Raises TypeError as id_keys does."""
    if ids is not None and ids.null_count:
        keys = row_keys(source, source_row, num_rows)
        there = ids.is_valid().to_numpy(zero_copy_only=False)
        keys[there] = id_keys(ids.drop_null())
        return keys
    if ids is not None:
        return id_keys(ids)
    positions = (row_key(source, source_row + i) for i in range(num_rows))
    return np.fromiter(positions, np.uint64, count=num_rows)


def id_keys(ids: pa.Array) -> np.ndarray:
    """uint64 [len(ids)]. Ids without nulls; text, bytes or whole numbers, else TypeError."""
    ids = without_text(ids)
    kind = ids.type
    if not (pa.types.is_integer(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise TypeError(f"ids of type {kind}")
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(_id_bytes(value)) for value in ids.to_pylist()), np.uint64, count=len(ids))


def without_text(ids: pa.Array) -> pa.Array:
    """Text as its bytes: those that are not UTF-8 are an id like any other. Dictionaries as their values."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_string(ids.type) or pa.types.is_string_view(ids.type):
        return ids.cast(pa.binary())
    return ids.cast(pa.large_binary()) if pa.types.is_large_string(ids.type) else ids


def _id_bytes(value: object) -> bytes:
    """Text and its UTF-8 bytes are one id, whatever the file's width of integers or kind of text column."""
    if isinstance(value, int):
        return b"int\0%d" % value
    if isinstance(value, str):
        return b"text\0" + value.encode()
    if isinstance(value, bytes):
        return b"text\0" + value
    raise TypeError(f"ids of type {type(value).__name__}")


def _to_python(array: pa.Array, name: str, faults: dict[int, RowFault]) -> list[Any]:
    """Values of one column; rows that cannot be had become None here and an entry in `faults`."""
    kind = array.type
    is_messages = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)
    try:
        values = array.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        values = [_one(array, i, name, faults) for i in range(len(array))]
    return [_without_nulls(value) for value in values] if is_messages else values


def _one(array: pa.Array, i: int, name: str, faults: dict[int, RowFault]) -> Any:
    try:
        return array[i].as_py()
    except UnicodeDecodeError as error:
        fault = RowFault("not_utf8", f"column {name} holds bytes that are not UTF-8 (at byte {error.start})")
    except (ValueError, OverflowError, pa.ArrowException) as error:
        fault = RowFault("unreadable_value", f"column {name}: {(str(error).splitlines() or ['cannot be read'])[0]}")
    faults.setdefault(i, fault)
    return None


def _parsed(value: Any, i: int, name: str, faults: dict[int, RowFault]) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError:
        faults.setdefault(i, RowFault("unreadable_value", f"column {name} is marked as JSON, but holds something else"))
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
