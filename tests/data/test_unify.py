"""Files whose schemas drift: widened without loss, or refused before any work."""

import pyarrow as pa
import pytest

from batchgen.data.unify import may_not_fit, widen
from batchgen.errors import InputError


def read(reader, column="x"):
    batches = [source.batch for source in reader.batches([column])]
    assert {batch.schema.field(0).type for batch in batches} == {reader.schema.field(column).type}
    return [value for batch in batches for value in batch.column(0).to_pylist()]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40], pa.int64()), pa.int64()),
        (pa.array([1], pa.uint32()), pa.array([-1], pa.int32()), pa.int64()),
        (pa.array([2**53], pa.int64()), pa.array([0.5], pa.float64()), pa.float64()),
        (pa.array([0.5], pa.float32()), pa.array([0.1], pa.float64()), pa.float64()),
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), pa.large_string()),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), pa.string()),
        (pa.array(["a"], pa.string_view()), pa.array(["b"]), pa.string()),
        (pa.nulls(1), pa.array([[{"role": "user"}]]), pa.list_(pa.struct([("role", pa.string())]))),
        (pa.array([1], pa.timestamp("s")), pa.array([1], pa.timestamp("ns")), pa.timestamp("ns")),
        (pa.array([[1]], pa.list_(pa.int8())), pa.array([[1.5]]), pa.list_(pa.float64())),
    ],
)
def test_drift_that_arrow_can_widen(write, read_input, tmp_path, one, other, kind):
    for order in ((one, other), (other, one)):
        write("in/a.parquet", pa.table({"x": order[0]}))
        write("in/b.parquet", pa.table({"x": order[1]}))
        reader = read_input(tmp_path / "in")
        assert reader.schema.field("x").type == kind
        assert read(reader) == [value for array in order for value in array.to_pylist()]


def test_structs_get_each_others_keys(write, read_input, tmp_path):
    write("in/a.parquet", {"x": [[{"role": "user", "content": "a"}]]})
    write("in/b.parquet", {"x": [[{"role": "user", "content": "a", "name": "n"}]]})
    assert read(read_input(tmp_path / "in"))[0] == [{"role": "user", "content": "a", "name": None}]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (pa.array(["a"]), pa.array([b"a"]), "column x is binary, but string in .*a.parquet"),
        (pa.array([True]), pa.array([1]), "column x is int64, but bool in .*a.parquet"),
        (pa.array([2**53 + 1]), pa.array([0.5]), "a.parquet: column x is int64, but double with .* not all of it fits"),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), "a.parquet: column x is uint64, but int64 with .* not all of"),
        (pa.array([2**60], pa.timestamp("us")), pa.array([1], pa.timestamp("ns")), "a.parquet: column x is timestamp"),
    ],
)
def test_drift_that_would_lose_values_is_told_before_work(write, read_input, tmp_path, one, other, said):
    write("in/a.parquet", pa.table({"x": one}))
    write("in/b.parquet", pa.table({"x": other}))
    with pytest.raises(InputError, match=said):
        read_input(tmp_path / "in")


def test_what_is_read_for_doubt_and_what_is_not():
    """Only types that can lose a value are worth a look at every value."""
    for narrow in (pa.null(), pa.int8(), pa.uint32()):
        assert not may_not_fit(narrow, pa.int64())
    assert not may_not_fit(pa.int32(), pa.float64()) and not may_not_fit(pa.float32(), pa.float64())
    assert may_not_fit(pa.int64(), pa.float64()) and may_not_fit(pa.uint64(), pa.int64())
    assert may_not_fit(pa.list_(pa.int64()), pa.list_(pa.float64()))
    assert widen(pa.timestamp("s", "UTC"), pa.timestamp("s")) is None
