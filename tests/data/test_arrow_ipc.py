"""Arrow IPC: both kinds of file, batches of any size, what Parquet cannot hold."""

import decimal

import numpy as np
import pyarrow as pa
import pytest

from batchgen.data.rows import iter_rows
from batchgen.errors import InputError
from batchgen.records import RowFault


@pytest.fixture
def put(tmp_path):
    def put(batches, name="a.arrow", kind="file", **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        open_writer = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with open_writer(path, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            for batch in batches:
                writer.write(batch)
        return path

    return put


def numbers(*values):
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def read(reader, batch_rows=1024):
    return pa.Table.from_batches([source.batch for source in reader.batches(None, batch_rows)], reader.schema)


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"compression": "lz4"}])
def test_files_and_streams(put, read_input, kind, options):
    reader = read_input(put([numbers(0, 1, 2), numbers(), numbers(3)], "a.feather", kind, **options))
    assert reader.num_rows == 4
    for batch_rows in (1, 2, 100):
        sources = list(reader.batches(["x"], batch_rows))
        assert [source.batch.column(0)[0].as_py() for source in sources] == [source.row for source in sources]
        assert max(source.batch.num_rows for source in sources) <= batch_rows
    assert [source.batch.num_rows for source in reader.batches([])] == [3, 1]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_any_schema_comes_back_bit_by_bit(put, read_input, kind):
    table = pa.table(
        {
            "d": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(38, 2)),
            "ns": pa.array([1, 2**62], pa.timestamp("ns", "UTC")),
            "u": pa.array([2**64 - 1, 2**53 + 1], pa.uint64()),
            "large": pa.array(["a", None], pa.large_string()),
            "bytes": pa.array([b"\xff", b""]),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
            "a.b c": pa.array([[{"role": "u", "name": None}], []]),
            "f": pa.array([float("nan"), -0.0]),
        }
    )
    dictionaries = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", None]).dictionary_encode()]
    batches = [table.append_column("dict", one).to_batches()[0] for one in dictionaries]
    if kind == "file":  # which has one dictionary for all batches
        batches = [batches[0]] * 2
    reader = read_input(put(batches, kind=kind))
    expected = pa.Table.from_batches(batches)
    assert reader.schema.equals(expected.schema)
    for batch_rows in (1, 100):
        got = read(reader, batch_rows)
        got.validate(full=True)
        assert repr(got.to_pylist()) == repr(expected.to_pylist())


def test_parts_of_a_big_batch_hold_only_their_own_memory(put, read_input):
    reader = read_input(put([pa.record_batch({"t": ["x" * 1000] * 5000})]))
    for source in reader.batches(None, 100):
        assert source.batch.get_total_buffer_size() < 200_000


def test_batches_are_bounded_in_bytes(put, read_input):
    reader = read_input(put([pa.record_batch({"t": ["x" * 2**20] * 100})]))
    assert max(source.batch.nbytes for source in reader.batches(None)) < 40 * 2**20


def test_nothing_is_read_into_memory(put, read_input):
    path = put([pa.record_batch({"x": np.arange(2**20)})] * 8)
    before = pa.total_allocated_bytes()
    held = max(pa.total_allocated_bytes() - before for _ in read_input(path).batches(None, 1024))
    assert held < 2**20, held


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_damaged_files(put, read_input, kind):
    path = put([numbers(*range(1000))] * 3, kind=kind)
    image = path.read_bytes()
    for content, said in [
        (b"", "empty .0 bytes., so not Arrow IPC"),
        (b"FEA1 old", "is Feather version 1"),
        (b'{"x": 1}\n', "cannot be read"),
        (image[:200], "cannot be read"),
        (image[: len(image) // 2], "cannot be read"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"a.arrow: {said}"):
            read_input(path)


def with_text(offsets, content):
    text = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(content))
    return pa.record_batch({"t": text, "deep": pa.ListArray.from_arrays(list(range(len(text) + 1)), text)})


def test_offsets_that_lead_out_of_the_data_are_told_not_followed(put, read_input):
    """Arrow itself follows them when a value is taken, which ends the process."""
    for offsets in ([0, 2, 1], [0, 2**30, 2], [0, -5, 2]):
        with pytest.raises(InputError, match=r"a.arrow: cannot be read as Arrow IPC: .*offset"):
            read_input(put([with_text(offsets, b"ab")]))


def test_text_that_is_not_utf8_spoils_its_row_only(put, read_input):
    reader = read_input(put([with_text([0, 1, 2, 3], b"a\xffc")]))
    for column in ("t", "deep"):
        (source,) = reader.batches([column])
        first, bad, last = iter_rows(source.batch, [column])
        assert isinstance(bad, RowFault) and bad.code == "not_utf8"
        assert (first, last) == (({"t": "a"}, {"t": "c"}) if column == "t" else ({"deep": ["a"]}, {"deep": ["c"]}))


def test_files_that_drift(put, read_input, tmp_path):
    put([pa.record_batch({"x": pa.array([1], pa.int8())})], "in/a.arrow")
    put([numbers(2**40)], "in/b.arrow", "stream")
    assert read(read_input(tmp_path / "in")).to_pydict() == {"x": [1, 2**40]}


def test_what_parquet_cannot_hold_is_told_before_work(put, read_input):
    interval = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    path = put([pa.record_batch({"x": [1], "i": interval})])
    with pytest.raises(InputError, match=r"input.columns: the column i is month_day_nano_interval, which Parquet cannot"):
        read_input(path)
    assert read_input(path, columns=["x"]).num_rows == 1


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.list_(pa.timestamp("s", "UTC"))])
def test_a_value_that_parquet_cannot_hold_is_told_before_work(put, read_input, kind):
    """Parquet has no seconds: 10^17 of them are more milliseconds than 64 bits hold."""
    values = [1, 10**17] if pa.types.is_timestamp(kind) else [[1], [10**17]]
    batches = [pa.record_batch({"x": [1], "t": pa.array([value], kind)}) for value in values]
    with pytest.raises(InputError, match=r"input.columns: the column t is .* has a value after row 0 that Parquet cannot"):
        read_input(put(batches))
    assert read_input(put(batches), columns=["x"]).num_rows == 2
    assert read_input(put(batches[:1])).num_rows == 1


def test_a_dictionary_with_a_null_among_its_words(put, read_input):
    """Valid Arrow, and what Parquet's writer refuses: it becomes a null of the row."""
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1], pa.int8()), pa.array([None, "x"]))
    reader = read_input(put([pa.record_batch({"d": words})]))
    got = read(reader).column("d")
    assert got.type == words.type and got.to_pylist() == [None, "x", None, "x"]
    assert got.chunk(0).dictionary.null_count == 0
