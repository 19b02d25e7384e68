"""Arrow rows as lines of JSON that lose nothing JSON can say, and read back as what they were.

whole numbers        as numbers, all their digits (uint64 past 2^53 too)
floating point       the shortest number that reads back as the same; NaN and the infinities, which JSON has not, are null
decimals             text, all their digits
dates, times         text, ISO 8601, with every digit of the column's unit
binary               text, base64
durations            whole numbers of the column's unit
lists, structs       arrays, objects
maps                 arrays of [key, value], as keys may be of any type and occur twice
text that says JSON  what it says (columns of JSON lines that no Arrow type fits)
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchgen.data.rows import JSON_VALUES


def json_lines(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Each row as one line, its end included."""
    columns = [_values(column, field) for column, field in zip(batch.columns, batch.schema)]
    names = batch.schema.names
    for row in zip(*columns):
        try:
            line = json.dumps(dict(zip(names, row)), ensure_ascii=False, allow_nan=False, default=_other)
        except ValueError:  # a number that JSON has not
            line = json.dumps(_finite(dict(zip(names, row))), ensure_ascii=False, default=_other)
        yield line.encode("utf-8", "replace") + b"\n"


def _values(column: pa.Array, field: pa.Field) -> list[Any]:
    """Python values that json.dumps or `_other` can take."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _values(column.dictionary_decode(), field)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return _times(column)
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [None if text is None else text.decode("utf-8", "replace") for text in column.cast(pa.binary()).to_pylist()]
    if (field.metadata or {}).items() >= JSON_VALUES.items():
        return [value if value is None else json.loads(value) for value in values]
    return values


def _times(column: pa.Array) -> list[str | None]:
    """Arrow's own text has every digit of the unit; what Python's types cannot hold, it can."""
    if pa.types.is_duration(column.type):
        return column.cast(pa.int64()).to_pylist()
    texts = column.cast(pa.string()).to_pylist()
    return [text and text.replace(" ", "T", 1) for text in texts] if pa.types.is_timestamp(column.type) else texts


def _other(value: Any) -> Any:
    """For json.dumps, of what it does not know: values inside lists and structs, and those of columns."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
