"""JSON lines: exact values, one fault a bad line, files packed and damaged."""

import gzip
import json
import re

import pyarrow as pa
import pytest

from batchgen.data.json_shapes import Shape
from batchgen.data.rows import faults_of, iter_rows
from batchgen.errors import InputError
from batchgen.records import RowFault


@pytest.fixture
def put(tmp_path):
    """Write bytes, or rows as JSON lines, below tmp_path."""

    def put(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = content if isinstance(content, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in content)
        path.write_bytes(lines)
        return path

    return put


def rows_of(reader, columns=None, batch_rows=1024):
    names = reader.schema.names if columns is None else columns
    return [row for source in reader.batches(names, batch_rows) for row in iter_rows(source.batch, names)]


def types_of(reader):
    return {field.name: "json" if field.metadata else str(field.type) for field in reader.schema}


EXACT = [
    {"id": 2**63, "n": 1, "x": 1.5, "text": "007", "when": "2024-01-01T00:00:00Z", "ok": True, "gone": None, "tags": []},
    {"id": 2**64 - 1, "n": -(2**63), "x": -0.0, "text": "é 👩‍👧 ", "when": "", "ok": False, "gone": None, "tags": ["a"]},
    {"id": 0, "n": 2**63 - 1, "x": 1e300, "text": "", "when": "", "ok": True, "gone": None, "tags": ["b", "c"]},
]


def test_values_come_back_as_they_were(put, read_input):
    reader = read_input(put("a.jsonl", EXACT))
    assert types_of(reader) == {
        **{"id": "uint64", "n": "int64", "x": "double", "text": "string", "when": "string", "ok": "bool", "gone": "null"},
        "tags": "list<item: string>",
    }
    assert rows_of(reader) == EXACT and rows_of(reader, batch_rows=1) == EXACT
    assert rows_of(reader, ["when", "id"]) == [{"when": row["when"], "id": row["id"]} for row in EXACT]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.5], "double"),
        ([2**53, 0.5], "double"),
        ([2**53 + 1, 0.5], "json"),
        ([-1, 2**63], "json"),
        ([10**30, 1], "json"),
        ([1, "a"], "json"),
        ([True, 1], "json"),
        ([[1], [2.5], []], "list<item: double>"),
        ([[1], ["a"]], "json"),
        ([{"a": 1, "b": 2}, {"a": 3, "b": None}, None], "struct<a: int64, b: int64>"),
        ([{"a": 1, "b": 2}, {"b": 1, "a": 2}], "json"),  # templates print keys in their order
        ([{"a": 1}, {}], "json"),
        ([{}, {}], "json"),  # Parquet has no such struct
        ([{str(i): i for i in range(2000)}], "json"),
        ([json.loads("[" * 40 + "]" * 40)], "json"),
        ([json.loads('{"a":' * 40 + "1" + "}" * 40)], "json"),
    ],
)
def test_a_type_holds_all_values_exactly_or_they_are_text_of_json(put, read_input, values, kind):
    reader = read_input(put("a.jsonl", [{"v": value} for value in values]))
    assert types_of(reader) == {"v": kind}
    assert [row["v"] for row in rows_of(reader)] == values
    assert [json.dumps(row["v"]) for row in rows_of(reader)] == [
        json.dumps(float(value) if kind == "double" else value) if not isinstance(value, list) else json.dumps(row["v"])
        for value, row in zip(values, rows_of(reader), strict=True)
    ]


MESSAGES = [
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": [{"type": "text", "text": "b"}]}, {"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "tool", "name": "f", "content": '{"z": 1, "a": null}', "args": {"z": 1, "a": None}}],
]


def test_messages_are_seen_without_padding(put, read_input):
    """Keys that only other messages have, null that was written, and the order of keys: as in the file."""
    seen = [row["messages"] for row in rows_of(read_input(put("a.jsonl", [{"messages": one} for one in MESSAGES])))]
    assert seen == MESSAGES and [json.dumps(one) for one in seen] == [json.dumps(one) for one in MESSAGES]
    alike = read_input(put("b.jsonl", [{"messages": MESSAGES[0]}] * 2))
    assert types_of(alike) == {"messages": "list<item: struct<role: string, content: string>>"}


def test_keys_of_all_files_are_columns(put, read_input, tmp_path):
    put("in/a.jsonl", [{"x": 1, "a.b": 1}, {"y": "t"}])
    put("in/b.ndjson", [{"x": 2.5, "a b": [1]}])
    put("in/c.json", b"")
    reader = read_input(tmp_path / "in")
    assert types_of(reader) == {"x": "double", "a.b": "int64", "y": "string", "a b": "list<item: int64>"}
    assert [row["x"] for row in rows_of(reader)] == [1, None, 2.5]


def test_lines_as_editors_and_tools_leave_them(put, read_input):
    reader = read_input(put("a.jsonl", b'\xef\xbb\xbf{"x": 1}\r\n\r\n  \n{"x": 2}\n\n\t{"x": 3} \r\n{"x": 4}'))
    assert [row["x"] for row in rows_of(reader)] == [1, 2, 3, 4]
    assert [(source.source_row, source.row) for source in reader.batches(["x"], 3)] == [(0, 0), (3, 3)]


BAD_LINES = {
    b"{bad": ("bad_json", "line 2 is not JSON: Expecting property name"),
    b'{"x": 1}{"x": 2}': ("bad_json", "line 2 is not JSON: Extra data at character 9"),
    b"[1, 2]": ("bad_json", "line 2 is a list, not an object"),
    b"null": ("bad_json", "line 2 is null, not an object"),
    b'{"x": 1, "y": {"k": 1, "k": 2}}': ("bad_json", "line 2 is not JSON: the key k is there twice"),
    b'{"x": "caf\xe9"}': ("not_utf8", "line 2 holds bytes that are not UTF-8 .at byte 10"),
    b'{"x": "\\ud83d"}': ("not_utf8", "line 2 holds half of a surrogate pair"),
    b'{"x": ' + b"[" * 100_000: ("bad_json", "line 2 is nested too deeply"),
    b'{"x": ' + b"9" * 5000 + b"}": ("bad_json", "line 2 is not JSON: Exceeds the limit"),
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("columns", [["x"], ["other"], ["x", "other", "lang"], []])
def test_a_bad_line_is_a_bad_row_and_the_others_stay(put, read_input, tmp_path, bad, columns):
    put("in/lang=de/a.jsonl", b'{"x": "\\ud83d\\ude00"}\n' + bad + b'\n{"x": "b", "other": 1}\n')
    reader = read_input(tmp_path / "in")
    first, fault, last = rows_of(reader, columns)
    assert isinstance(fault, RowFault) and fault.code == BAD_LINES[bad][0]
    assert re.search(BAD_LINES[bad][1], fault.message)
    whole = [{"x": "😀", "other": None, "lang": "de"}, {"x": "b", "other": 1, "lang": "de"}]
    assert [first, last] == [{name: row[name] for name in columns} for row in whole]
    assert [row if isinstance(row, dict) else None for row in rows_of(reader, columns, 1)] == [first, None, last]


def test_a_bad_line_has_no_id_and_goes_by_its_position(put, read_input):
    path = put("a.jsonl", b'{"id": "a"}\n{\n{"id": "b"}\n{\n')
    reader = read_input(path, id_column="id")
    assert [sorted(faults_of(source.batch)) for source in reader.batches(["id"])] == [[1, 3]]
    with pytest.raises(InputError, match="id is null in row 2"):
        read_input(put("b.jsonl", b'{"id": "a"}\n{\n{"x": 1}\n'), id_column="id")


def test_a_fault_does_not_move_to_another_row_of_a_slice(put, read_input):
    (source,) = read_input(put("a.jsonl", b'{"x": 1}\n{\n{"x": 3}\n{"x": 4}\n')).batches(["x"])
    assert list(iter_rows(source.batch.slice(2), ["x"])) == [{"x": 3}, {"x": 4}]
    assert list(iter_rows(source.batch.take(pa.array([0, 0, 2, 2])), ["x"])) == [{"x": 1}, {"x": 1}, {"x": 3}, {"x": 3}]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_packed_files(put, read_input, tmp_path, codec):
    """Whatever their suffix says; several members end to end; and cut off, which is a bad job and not fewer rows."""
    plain = b"".join(b'{"x": %d, "pad": "%s"}\n' % (i, b"abc" * (i % 90)) for i in range(5000))
    pack = gzip.compress if codec == "gzip" else (lambda text: pa.compress(text, codec, asbytes=True))
    suffix = {"gzip": "gz", "zstd": "zst"}[codec]
    cut = plain.index(b"\n", len(plain) // 2) + 1
    for name in (f"a.jsonl.{suffix}", "a.jsonl"):
        reader = read_input(put(name, pack(plain[:cut]) + pack(plain[cut:])))
        assert [row["x"] for row in rows_of(reader, ["x"])] == list(range(5000))
    packed = pack(plain)
    for damaged in (packed[:-20], packed[: len(packed) // 2], packed[:200] + b"\x00" * 200 + packed[400:]):
        with pytest.raises(InputError, match=rf"b.jsonl.{suffix}: cannot be read"):
            read_input(put(f"b.jsonl.{suffix}", damaged))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json\nat all\n", "a.jsonl: no line of it is a JSON object: line 1 is not JSON"),
        (b'[{"x": 1},\n {"x": 2}]\n', "a.jsonl: no line of it is a JSON object"),
        (b"PAR1 not really", "a.jsonl: is a Parquet file; set input.format"),
        (b"ARROW1\0\0", "a.jsonl: is an Arrow file"),
        (b"PK\x03\x04 zip", "a.jsonl: is a zip archive"),
        ('{"x": 1}'.encode("utf-16"), "a.jsonl: is UTF-16 text"),
    ],
)
def test_files_that_are_something_else(put, read_input, content, said):
    with pytest.raises(InputError, match=said):
        read_input(put("a.jsonl", content))


def test_a_format_that_the_suffix_does_not_tell(put, read_input):
    path = put("part-00000", [{"x": 1}])
    with pytest.raises(InputError, match=r"set input.format \(parquet, jsonl"):
        read_input(path)
    assert rows_of(read_input(path, format="jsonl")) == [{"x": 1}]


def test_a_file_without_rows_has_no_columns(put, read_input):
    for content in (b"", b"\n \n"):
        reader = read_input(put("a.jsonl", content))
        assert (reader.num_rows, reader.schema.names, list(reader.batches([]))) == (0, [], [])


def test_a_file_that_changes_while_it_is_read(put, read_input):
    path = put("a.jsonl", [{"x": 1}])
    reader = read_input(path)
    put("a.jsonl", [{"x": "text"}])
    with pytest.raises(InputError, match="changed while it was read: x is no longer int64"):
        list(reader.batches(None))
    put("a.jsonl", [{"x": 1}] * 2)
    with pytest.raises(InputError, match="changed while it was read: 2 rows instead of 1"):
        list(reader.batches(None))


def test_a_huge_line_is_a_row_and_batches_are_bounded(put, read_input):
    put("in/a.jsonl", b'{"x": "' + b"a" * (100 << 20) + b'"}\n' + b'{"x": "b"}\n' * 3)
    put("in/b.jsonl", [{"x": "y" * (10 << 20)}] * 8)
    batches = [source.batch for source in read_input(put("in/c.jsonl", []).parent).batches(None)]
    assert [batch.num_rows for batch in batches] == [1, 3, 4, 4]


def test_a_marked_column_that_holds_something_else_is_a_bad_row():
    field = pa.field("v", pa.string(), metadata={b"batchgen.values": b"json"})
    batch = pa.RecordBatch.from_arrays([pa.array(["[1]", "oops", None])], schema=pa.schema([field]))
    good, bad, null = iter_rows(batch, ["v"])
    assert (good, null) == ({"v": [1]}, {"v": None}) and isinstance(bad, RowFault) and bad.code == "unreadable_value"


def test_the_marks_travel_through_parquet(put, read_input, write):
    """Results of one job are the input of the next: templates see the same values again."""
    reader = read_input(put("a.jsonl", [{"v": 1}, {"v": "a"}, {"v": {"k": None}}]))
    table = pa.Table.from_batches([source.batch for source in reader.batches(None)], reader.schema)
    assert rows_of(read_input(write("a.parquet", table))) == [{"v": 1}, {"v": "a"}, {"v": {"k": None}}]


def test_shapes_forget_what_cannot_matter():
    shape = Shape()
    for i in range(100):
        shape.see({f"k{i}": i})
    assert shape.arrow_type() is None and shape.fields is None


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("piece", [1, 7, 2**18])
def test_a_json_file_that_is_one_list(name, piece, put, read_input, monkeypatch):
    """As many tools write it; read in pieces of any size, with the same rules for what is a bad row."""
    monkeypatch.setattr("batchgen.data.json_list._PIECE_BYTES", piece)
    text = '\n [ {"x": 1.5, "t": "é ]"},{"x": -12, "t": null} , 123,\n {"x": 1, "x": 2}, {"t": "\\ud83d"}, {} ] \n'.encode()
    reader = read_input(put(name, gzip.compress(text) if name.endswith("gz") else text))
    rows = [row for source in reader.batches(None) for row in iter_rows(source.batch, reader.schema.names)]
    assert rows[:2] == [{"x": 1.5, "t": "é ]"}, {"x": -12.0, "t": None}] and rows[5] == {"x": None, "t": None}
    assert [row.code for row in rows[2:5]] == ["bad_json", "bad_json", "not_utf8"]
    assert "item 3 of the list is a number" in rows[2].message and "the key x is there twice" in rows[3].message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"x": 1}, {"x": 2', "after item 1"),
        ('[{"x": 1} {"x": 2}]', "after item 1: a comma or ] is missing"),
        ('[{"x": 1},', "after item 1"),
        ('[{"x": 1}', "after item 1: it ends before its ]"),
        ('[{"x": 1}] x', "after item 1: something follows"),
        ('[{"x": 1}, ' + "[" * 100_000, "nested too deeply"),
        ('[{"x": 1}, {"x": "\udcff"}]', "bytes that are not UTF-8"),
    ],
)
def test_a_broken_list_is_a_bad_file(text, said, put, read_input):
    with pytest.raises(InputError, match=r"a\.json: ") as told:
        read_input(put("a.json", text.encode("utf-8", "surrogateescape")))
    assert said in str(told.value)


def test_a_list_without_items_and_a_line_that_is_a_list(put, read_input):
    assert read_input(put("a.json", b"[ ]")).num_rows == 0
    assert read_input(put("b.jsonl", b'[1]\n{"x": 1}\n')).num_rows == 2, "in lines, a list is a bad row"
