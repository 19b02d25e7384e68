"""CSV: all text, one fault a bad record, files packed and damaged."""

import gzip
import re

import pytest

from batchgen.data.rows import iter_rows
from batchgen.errors import InputError
from batchgen.records import RowFault


@pytest.fixture
def put(tmp_path):
    def put(content, name="a.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def rows_of(reader, columns=None, batch_rows=1024):
    names = reader.schema.names if columns is None else columns
    return [row for source in reader.batches(names, batch_rows) for row in iter_rows(source.batch, names)]


def test_everything_is_text(put, read_input):
    reader = read_input(put('id,when,empty,quoted\n007,2024-01-01,,"a, ""b"""\nnull,NaN,"",é\n'))
    assert {str(field.type) for field in reader.schema} == {"string"}
    assert rows_of(reader) == [
        {"id": "007", "when": "2024-01-01", "empty": "", "quoted": 'a, "b"'},
        {"id": "null", "when": "NaN", "empty": "", "quoted": "é"},
    ]
    assert rows_of(reader, ["quoted", "id"], 1)[1] == {"quoted": "é", "id": "null"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_as_tools_leave_them(put, read_input, end):
    """A mark of UTF-8, blank lines, line ends inside quotes (kept as they are), a last line without an end."""
    text = f'\ufeffx,y{end}1,"two{end}{end}lines"{end}{end}2,z'
    assert rows_of(read_input(put(text))) == [{"x": "1", "y": f"two{end}{end}lines"}, {"x": "2", "y": "z"}]


@pytest.mark.parametrize(("name", "sign"), [("a.tsv", "\t"), ("A.TSV.GZ", "\t"), ("a.csv", ",")])
def test_the_suffix_tells_the_delimiter(put, read_input, name, sign):
    assert rows_of(read_input(put(f"x{sign}y\n1{sign}2;3\n", name))) == [{"x": "1", "y": "2;3"}]


BAD = {
    b"1": ("bad_csv", "line 3 has 1 fields, but the header has 2"),
    b"1,2,3": ("bad_csv", "line 3 has 3 fields, but the header has 2"),
    b'1,"a"b': ("bad_csv", "line 3: ',' expected after"),
    b"1,caf\xe9": ("not_utf8", "column y holds bytes that are not UTF-8 .at byte 3"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("batch_rows", [1, 1024])
def test_a_bad_record_is_a_bad_row_and_the_others_stay(put, read_input, bad, batch_rows):
    first, fault, last = rows_of(read_input(put(b"x,y\n0,a\n" + bad + b"\n2,c\n")), None, batch_rows)
    assert (first, last) == ({"x": "0", "y": "a"}, {"x": "2", "y": "c"})
    assert isinstance(fault, RowFault) and fault.code == BAD[bad][0]
    assert re.search(BAD[bad][1], fault.message)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "a.csv: empty: not even a header line"),
        ("\n\n", "a.csv: empty: not even a header line"),
        ('x,y\n1,2\n3,"never closed\n4,5\n', "a.csv: line 3: a quote is opened and never closed"),
        ('x,"y\n1,2\n', "a.csv: line 1: a quote is opened and never closed"),
        ("x,y,x\n1,2,3\n", "a.csv: has two columns named x"),
        (b"PAR1 not really", "a.csv: is a Parquet file"),
        ("x,y\n".encode("utf-16"), "a.csv: is UTF-16 text"),
        (b"x,caf\xe9\n1,2\n", "a.csv: the header holds bytes that are not UTF-8"),
    ],
)
def test_files_that_cannot_be_told_apart(put, read_input, content, said):
    with pytest.raises(InputError, match=said):
        read_input(put(content))


def test_header_only(put, read_input):
    reader = read_input(put("x,y\n"))
    assert (reader.num_rows, reader.schema.names, rows_of(reader)) == (0, ["x", "y"], [])


def test_files_have_the_same_columns_in_any_order(put, read_input, tmp_path):
    put("x,y\n1,2\n", "in/a.csv")
    put("y,x\n3,4\n", "in/b.csv")
    assert rows_of(read_input(tmp_path / "in")) == [{"x": "1", "y": "2"}, {"x": "4", "y": "3"}]
    put("x\n1\n", "in/c.csv")
    with pytest.raises(InputError, match=r"c.csv: has no column y, but .*a.csv has"):
        read_input(tmp_path / "in")


def test_packed_and_cut_off(put, read_input):
    packed = gzip.compress(b"x,y\n" + b"".join(b"%d,%x\n" % (i, i**9) for i in range(3000)))
    assert [row["x"] for row in rows_of(read_input(put(packed, "a.csv.gz")))] == [str(i) for i in range(3000)]
    with pytest.raises(InputError, match=r"a.csv.gz: cannot be read: Truncated"):
        read_input(put(packed[:-30], "a.csv.gz"))


def test_a_huge_field_is_a_row(put, read_input):
    text = "a" * (20 << 20)
    batches = [source.batch for source in read_input(put(f'x\n"{text}"\nb\n"{text}"\nc\n')).batches(None)]
    assert [batch.num_rows for batch in batches] == [3, 1]


def test_a_file_that_changes_while_it_is_read(put, read_input):
    reader = read_input(put("x,y\n1,2\n"))
    put("x,z\n1,2\n")
    with pytest.raises(InputError, match="changed while it was read: its header is another one"):
        rows_of(reader)
