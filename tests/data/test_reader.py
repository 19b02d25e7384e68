"""Reading: order, bounded batches, schemas that drift, files that are not what they seem."""

import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.parquet import ParquetReader
from batchgen.data.reader import open_reader, require_columns
from batchgen.errors import InputError
from batchgen.job import InputSection


def values(reader, column, batch_rows=1024):
    return [value for source in reader.batches([column], batch_rows) for value in source.batch.column(0).to_pylist()]


def test_rows_come_in_the_order_of_the_full_path_whatever_the_order_of_writing(write, read_input, tmp_path):
    for number in (10, 2, 1, 12, 3):
        write(f"in/part-{number}.parquet", {"x": [number]})
    reader = read_input(tmp_path / "in")
    assert values(reader, "x") == [1, 10, 12, 2, 3]
    assert [file.source for file in reader.files][:2] == ["part-1.parquet", "part-10.parquet"]


def test_two_copies_of_an_input_have_the_same_sources_and_fingerprint(write, read_input, tmp_path):
    write("one/a/x.parquet", {"x": [1]})
    write("one/b.parquet", {"x": [2]})
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere/two")
    one, two = read_input(tmp_path / "one"), read_input(tmp_path / "elsewhere/two")
    assert [file.source for file in one.files] == ["a/x.parquet", "b.parquet"]
    assert one.fingerprint() == two.fingerprint() and len(set(one.fingerprint().values())) == 2
    write("elsewhere/two/b.parquet", {"x": [3]})
    changed = read_input(tmp_path / "elsewhere/two").fingerprint()
    assert {name for name in changed if changed[name] != one.fingerprint()[name]} == {"b.parquet"}


def test_positions(write, read_input, tmp_path):
    write("in/a.parquet", {"x": list(range(5))}, row_group_size=3)
    write("in/b.parquet", {"x": list(range(5, 9))})
    for batch_rows in (1, 2, 3, 100):
        for source in read_input(tmp_path / "in").batches(["x"], batch_rows):
            assert source.batch.num_rows <= batch_rows
            assert source.batch.column(0).to_pylist()[0] == source.row
            assert source.source_row == source.row - (5 if source.source == "b.parquet" else 0)


def test_folder_skips_what_tools_leave_beside_their_data(write, read_input, tmp_path):
    write("in/a.parquet", {"x": [1]})
    for name in ("_temporary/0/b.parquet", ".hidden/b.parquet", "_metadata.parquet", ".b.parquet"):
        write(f"in/{name}", {"x": [9]})
    (tmp_path / "in/_SUCCESS").touch()
    (tmp_path / "in/a.parquet.crc").touch()
    assert values(read_input(tmp_path / "in"), "x") == [1]


def test_globs_lists_and_names_that_look_like_globs(write, read_input, tmp_path):
    write("in/a[1].parquet", {"x": [1]})
    write("in/b.parquet", {"x": [2]})
    write("other/c.parquet", {"x": [3]})
    assert values(read_input(tmp_path / "in/a[1].parquet"), "x") == [1]
    assert values(read_input(tmp_path / "*/?.parquet"), "x") == [2, 3]
    both = read_input([str(tmp_path / "other"), str(tmp_path / "in"), str(tmp_path / "in/b.parquet")])
    assert values(both, "x") == [1, 2, 3]  # each file once
    assert [file.source for file in both.files] == ["in/a[1].parquet", "in/b.parquet", "other/c.parquet"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("in/none.parquet", "none.parquet does not exist; .*in holds a.txt"),
        ("in", r"no \*.parquet.* in the folder .*1 other files, such as .*a.txt"),
        ("in/*.parquet", r"no file matches .*in/\*.parquet"),
        ("out/*.parquet", "no file matches .*; the folder .*out does not exist"),
    ],
)
def test_no_files(read_input, tmp_path, path, said):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").touch()
    with pytest.raises(InputError, match=said):
        read_input(tmp_path / path)


def test_empty_files_and_empty_row_groups(write, read_input, tmp_path):
    schema = pa.schema([("x", pa.int64())])
    (tmp_path / "in").mkdir()
    pq.ParquetWriter(tmp_path / "in/a_schema_only.parquet", schema).close()
    write("in/b_one_empty_group.parquet", schema.empty_table())
    with pq.ParquetWriter(tmp_path / "in/c_2_0_1.parquet", schema) as writer:
        for group in ([1, 2], [], [3]):
            writer.write_table(pa.table({"x": group}, schema=schema))
    reader = read_input(tmp_path / "in")
    assert (reader.num_rows, values(reader, "x")) == (3, [1, 2, 3])
    only_empty = read_input(tmp_path / "in/[ab]*.parquet")
    assert (only_empty.num_rows, list(only_empty.batches(None))) == (0, [])


@pytest.mark.parametrize("content", [b"", b"PAR1 not really", b"id,text\n1,a\n"])
def test_a_file_that_is_not_parquet_is_named(write, read_input, tmp_path, content):
    write("in/a.parquet", {"x": [1]})
    (tmp_path / "in/bad.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"bad.parquet: " + ("empty" if not content else "cannot be read as Parquet")):
        read_input(tmp_path / "in")


def test_truncated_and_damaged_files(write, read_input, tmp_path):
    path = write("in/a.parquet", {"x": np.random.default_rng(0).integers(0, 99, 5000)}, compression="zstd")
    image = path.read_bytes()
    path.write_bytes(image[:-100])
    with pytest.raises(InputError, match=r"a.parquet: cannot be read as Parquet"):
        read_input(path)
    path.write_bytes(image[:40] + b"\xff" * 400 + image[440:])  # the footer is whole, a page is not
    with pytest.raises(InputError, match=r"a.parquet: cannot be read: ZSTD"):
        values(read_input(path), "x")


def test_damaged_metadata_of_a_column_do_not_end_the_process(write, read_input):
    """Some damage makes pyarrow's metadata objects call std::terminate; the reader itself tells of the same."""
    code = (
        "import sys; from batchgen.data.reader import open_reader; from batchgen.job import InputSection\n"
        "for path in sys.argv[1:]:\n"
        "    try: list(open_reader(InputSection(path=path)).batches(None))\n"
        "    except Exception as error: print(type(error).__name__)"
    )
    image = write("a.parquet", {"m": [[{"role": "user"}], [], None] * 9}, row_group_size=5).read_bytes()
    footer = len(image) - 8 - int.from_bytes(image[-8:-4], "little")
    paths = []
    for at in range(footer, len(image) - 8):
        paths.append(write(f"{at}.parquet", {"x": [1]}))
        paths[-1].write_bytes(image[:at] + bytes([image[at] ^ 2]) + image[at + 1 :])
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0 and set(done.stdout.split()) == {"InputError"}, done.stderr


def test_repeated_huge_messages_are_read_in_small_batches(write, read_input):
    """One row group whose nested text is 150 MiB in memory but a few KB on disk and in the footer."""
    message = pa.array([[{"role": "user", "content": "x" * 2**20}]])
    table = pa.table({"messages": pa.concat_arrays([message] * 150)})
    reader = read_input(write("a.parquet", table, row_group_size=1000, compression="zstd"))
    sizes = [(source.batch.num_rows, source.batch.get_total_buffer_size()) for source in reader.batches(["messages"])]
    assert sum(rows for rows, _ in sizes) == 150
    assert max(size for _, size in sizes) < 70 * 2**20


def test_memory_does_not_grow_with_the_file(write, read_input):
    """Arrow's allocations in the middle of reading text that does not compress, for N and for 8 N rows."""
    held = []
    for num_groups in (10, 80):
        text = np.random.default_rng(0).bytes(num_groups * 500 * 500).hex()
        table = pa.table({"t": [text[i : i + 1000] for i in range(0, len(text), 1000)]})
        reader = read_input(write(f"{num_groups}.parquet", table, row_group_size=500, use_dictionary=False))
        del table
        before = pa.total_allocated_bytes()
        held.append(max(pa.total_allocated_bytes() - before for _ in reader.batches(None)))
    assert held[1] < 1.5 * held[0], held


def test_null_columns_take_the_type_of_other_files(write, read_input, tmp_path):
    write("in/a.parquet", pa.table({"note": pa.nulls(2), "m": pa.array([[{"a": None}], []])}))
    write("in/b.parquet", pa.table({"m": pa.array([[{"a": "y"}]]), "note": ["x"]}))
    reader = read_input(tmp_path / "in")
    assert reader.schema.field("note").type == pa.string()
    assert values(reader, "note") == [None, None, "x"]
    assert values(reader, "m") == [[{"a": None}], [], [{"a": "y"}]]
    for source in reader.batches(None):
        assert source.batch.schema.equals(reader.schema)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"x": ["text"], "y": [1]}, "b.parquet: column x is string, but int64 in .*a.parquet"),
        ({"x": [1]}, "b.parquet: has no column y, but .*a.parquet has"),
        ({"x": [1], "y": [1], "z": [1]}, "b.parquet: has a column z that .*a.parquet has not"),
    ],
)
def test_schemas_that_do_not_fit(write, read_input, tmp_path, columns, said):
    write("in/a.parquet", {"x": [1], "y": [2]})
    write("in/b.parquet", columns)
    with pytest.raises(InputError, match=said):
        read_input(tmp_path / "in")


def test_two_columns_of_one_name(write, read_input):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(InputError, match="two columns named x"):
        read_input(write("a.parquet", table))


@pytest.mark.parametrize(
    ("settings", "key"), [({"columns": ["x", "questin"]}, r"columns\[1\]"), ({"id_column": "questin"}, "id_")]
)
def test_missing_column(write, read_input, settings, key):
    path = write("a.parquet", {"x": [1], "question": ["?"]})
    with pytest.raises(
        InputError, match=rf"input.{key}.*: the input has no column questin; did you mean question.*x, question"
    ):
        read_input(path, **settings)
    with pytest.raises(InputError, match=r"prompt.messages: the input has no column questin"):
        require_columns(read_input(path).schema, {"prompt.messages": "questin"})


def test_only_the_columns_asked_for_in_the_order_asked(write, read_input):
    reader = read_input(write("a.parquet", {"a": [1], "a.b": [2], "c": [3]}))
    (source,) = reader.batches(["c", "a"])
    assert source.batch.schema.names == ["c", "a"]
    assert [source.batch.num_rows for source in reader.batches([])] == [1]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["a", "b", None], "id is null in row 2"),
        (["a", "b", "c", "b"], '"b" is in row 1 and in row 3'),
        ([5, 6, 5], '"5" is in row 0 and in row 2'),
        ([1.5], "id is double; an id is text or a whole number"),
    ],
)
def test_ids_are_checked_before_any_work(write, read_input, tmp_path, ids, said):
    write("in/a.parquet", pa.table({"id": pa.array(ids[:2])}))
    if ids[2:]:
        write("in/b.parquet", pa.table({"id": pa.array(ids[2:], pa.array(ids[:2]).type)}))
    with pytest.raises(InputError, match=said):
        read_input(tmp_path / "in", id_column="id")
    assert isinstance(read_input(tmp_path / "in"), ParquetReader)


def test_unique_ids_of_every_kind(write, read_input):
    for ids in (
        pa.array(["a", "", "é"]),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([b"\xff", b"\xfe"]),
        pa.array([b"\xff", b"\xfe"]).view(pa.string()),
    ):
        read_input(write("a.parquet", pa.table({"id": ids})), id_column="id")


def test_an_id_that_comes_twice_and_is_not_utf8(write, read_input):
    path = write("a.parquet", pa.table({"id": pa.array([b"\xff", b"x", b"\xff"]).view(pa.string())}))
    with pytest.raises(InputError, match=r'"\\xff" is in row 0 and in row 2'):
        read_input(path, id_column="id")


def test_a_hash_collision_is_not_a_duplicate(write, read_input, monkeypatch):
    from batchgen.data import reader

    monkeypatch.setattr(reader, "row_keys", lambda source, source_row, num_rows, ids: np.zeros(num_rows, np.uint64))
    path = write("a.parquet", {"id": ["a", "b", "c"]})
    read_input(path, id_column="id")
    with pytest.raises(InputError, match='"b"'):
        read_input(write("b.parquet", {"id": ["a", "b", "c", "b"]}), id_column="id")


def test_relative_paths_work(write, tmp_path, monkeypatch):
    write("in/a.parquet", {"x": [1]})
    monkeypatch.chdir(tmp_path)
    assert open_reader(InputSection(path="in")).num_rows == 1
