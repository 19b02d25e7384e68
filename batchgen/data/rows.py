"""Arrow rows as Python values for templates, one fault at a time; and the identity of a row. Knows no file.

A value that Python cannot take (bytes that are not UTF-8 in a text column, a date beyond year 9999) spoils its own row only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from batchgen.records import RowFault


def iter_rows(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[dict[str, Any] | RowFault]:
    """Each row as {column: value}, or the RowFault `not_utf8` or `unreadable_value` that names the column.

    In lists of structs (messages), keys whose value is null are left out: Arrow gives every message the keys of all others.
    """
    values: list[list[Any]] = []
    faults: dict[int, RowFault] = {}
    for name in columns:
        array = batch.column(name)
        values.append(_to_python(array, name, faults))
    for i in range(batch.num_rows):
        fault = faults.get(i)
        yield fault if fault is not None else {name: column[i] for name, column in zip(columns, values, strict=True)}


def row_key(source: str, source_row: int, id_value: object = None) -> int:
    """uint64 identity of a row: of its id where the job names an id column, else of (file, position in the file)."""
    if id_value is None:
        return xxhash.xxh3_64_intdigest(f"row\0{source}\0{source_row}".encode())
    return xxhash.xxh3_64_intdigest(_id_bytes(id_value))


def row_keys(source: str, source_row: int, num_rows: int, ids: pa.Array | None = None) -> np.ndarray:
    """row_key of `num_rows` consecutive rows: uint64 [num_rows]. Raises TypeError as id_keys does."""
    if ids is not None:
        return id_keys(ids)
    keys = (row_key(source, source_row + i) for i in range(num_rows))
    return np.fromiter(keys, np.uint64, count=num_rows)


def id_keys(ids: pa.Array) -> np.ndarray:
    """uint64 [len(ids)]. Ids without nulls; text, bytes or whole numbers, else TypeError."""
    kind = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_string(kind):
        ids = ids.cast(pa.binary())  # bytes that are not UTF-8 are an id like any other
    elif pa.types.is_large_string(kind):
        ids = ids.cast(pa.large_binary())
    elif not (pa.types.is_integer(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise TypeError(f"ids of type {kind}")
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(_id_bytes(value)) for value in ids.to_pylist()), np.uint64, count=len(ids))


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


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
