"""A bad value spoils its own row only; a row's key does not depend on the machine."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from batchgen.data.rows import iter_rows, row_key, row_keys
from batchgen.records import RowFault


def rows(**columns):
    batch = pa.RecordBatch.from_pydict(columns)
    return list(iter_rows(batch, list(columns)))


def not_utf8(*values, kind=None):
    return pa.array(values, pa.binary()).view(kind or pa.string())


def test_bytes_that_are_not_utf8_are_a_fault_of_their_row():
    text = not_utf8(b"ok", b"\xf0\x9f\x98", b"caf\xe9", None, "👩‍👩‍👧".encode())
    first, second, third, fourth, fifth = rows(n=pa.array(range(5)), text=text)
    assert (first, fourth, fifth) == ({"n": 0, "text": "ok"}, {"n": 3, "text": None}, {"n": 4, "text": "👩‍👩‍👧"})
    assert isinstance(second, RowFault) and second.code == "not_utf8" and "column text" in second.message
    assert isinstance(third, RowFault) and "at byte 3" in third.message


def test_bytes_that_are_not_utf8_deep_inside():
    content = not_utf8(b"ok", b"\xff", b"fine")
    messages = pa.ListArray.from_arrays([0, 1, 3], pa.StructArray.from_arrays([content], ["content"]))
    first, second = rows(messages=messages)
    assert first == {"messages": [{"content": "ok"}]}
    assert isinstance(second, RowFault) and "column messages" in second.message


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_kinds_of_text(kind):
    assert rows(text=pa.array(["a", None, "a"]).cast(kind)) == [{"text": "a"}, {"text": None}, {"text": "a"}]


def test_values_that_python_cannot_hold():
    dates = pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("s"), safe=False)
    good, bad = rows(date=dates, big=pa.array([1, 2**64 - 1], pa.uint64()))
    assert good == {"date": datetime.datetime(1970, 1, 1), "big": 1}
    assert isinstance(bad, RowFault) and bad.code == "unreadable_value" and "column date" in bad.message


def test_messages_lose_the_keys_that_arrow_gave_them():
    messages = pa.array(
        [[{"role": "user", "content": "a"}, {"role": "tool", "name": "f", "args": [{"x": 1}, {"y": 2}]}], None]
    )
    first, second = rows(messages=messages, plain=pa.array([{"a": None}, {"a": 1}]))
    assert first["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "tool", "name": "f", "args": [{"x": 1}, {"y": 2}]},
    ]
    assert first["plain"] == {"a": None}  # only lists of structs are messages
    assert second["messages"] is None


def test_row_keys():
    assert row_key("a.parquet", 3) == row_key("a.parquet", 3) != row_key("b.parquet", 3)
    assert row_key("a", 11) != row_key("a1", 1)
    keys = row_keys("a.parquet", 5, 3)
    assert keys.dtype == np.uint64 and keys.tolist() == [row_key("a.parquet", i) for i in (5, 6, 7)]
    # with ids, position does not count; neither does the width or kind of the column
    for ids in (pa.array([7, 8], pa.int32()), pa.array([7, 8], pa.uint64())):
        assert row_keys("x", 99, 2, ids).tolist() == [row_key("y", 0, 7), row_key("y", 1, 8)]
    texts = pa.array(["é", ""])
    for ids in (texts, texts.cast(pa.large_string()), texts.dictionary_encode(), texts.cast(pa.binary())):
        assert row_keys("x", 0, 2, ids).tolist() == [row_key("y", 0, "é"), row_key("y", 0, "")]
    assert row_key("x", 0, 7) != row_key("x", 0, "7")


def test_row_keys_do_not_change_between_versions():
    """Seeds come from these: a change would change every sampled answer of a resumed job."""
    keys = (row_key("a.parquet", 0), row_key("", 0, "id"), row_key("", 0, 7))
    assert keys == (16123064838229968939, 4703925607616848218, 8456659139262509346)
