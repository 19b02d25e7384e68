"""Every format up to the results: columns as they were, beside the answers; bad rows null, in their place."""

import datetime
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rows import some_rows

from batchgen.data import answers
from batchgen.data.merge import merge
from batchgen.data.rows import iter_rows, row_keys
from batchgen.data.schema import results_schema
from batchgen.data.writer import PartWriter
from batchgen.errors import UsageError


@pytest.fixture(params=[4, 4096])
def run(request, folder, read_input, make_job, answer, monkeypatch):
    """Answer all rows n times in random order, merge, and return the results and the summary."""
    monkeypatch.setattr(answers, "GRID_ANSWERS", request.param)

    def run(path, n=1, faults=(), text=None, **output):
        reader = read_input(path)
        owed = [(row, sample) for row in range(reader.num_rows) for sample in range(n)]
        random.Random(0).shuffle(owed)
        with PartWriter(folder, some_rows(reader.num_rows), commit_rows=5) as writer:
            for row, sample in owed:
                writer.add(answer(row, sample, text=text, fault="bad_json" if row in faults else None))
        summary = merge(reader, make_job(path, **output), folder, some_rows(reader.num_rows), n)
        return pq.read_table(folder.results), summary

    return run


@pytest.mark.parametrize("n", [1, 3])
def test_bad_lines_are_null_and_no_other_row_is_taken_for_one(tmp_path, run, n):
    """Results are cut from batches in pieces, and rows repeated: which rows are bad may not slip to others."""
    bad = {0, 5, 6, 11, 29}
    lines = ["{bad" if i in bad else json.dumps({"x": i, "right": "a" if i % 2 else "b"}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    extract = {"pattern": "[ab]", "expected": "right"}
    table, summary = run(tmp_path / "a.jsonl", n, bad, text="a", extract=extract)
    rows = [row for row in range(30) for _ in range(n)]
    assert table["x"].to_pylist() == [None if row in bad else row for row in rows]
    assert table["status"].to_pylist() == ["error" if row in bad else "ok" for row in rows]
    assert table["correct"].to_pylist() == [None if row in bad else row % 2 == 1 for row in rows]
    assert summary.num_scored == 25 * n and summary.by_error_code == {"bad_json": 5 * n}


def test_arrow_columns_come_out_as_they_went_in(tmp_path, run):
    rows = 50
    table = pa.table(
        {
            "a.b": pa.array(range(2**63, 2**63 + rows), pa.uint64()),
            "a b": pa.array([datetime.timedelta(microseconds=i) for i in range(rows)], pa.duration("us")),
            "ns": pa.array(range(rows), pa.timestamp("ns", "Europe/Berlin")),
            "large": pa.array([None, "é"] * 25, pa.large_string()),
            "map": pa.array([[("k", None)], []] * 25, pa.map_(pa.string(), pa.int8())),
            "fixed": pa.array([[1, 2]] * rows, pa.list_(pa.int8(), 2)),
            "struct": pa.array([{"x": None, "y": [1]}, None] * 25),
            "half": pa.array(np.arange(rows, dtype=np.float16)),
            "": pa.array([b"\xff"] * rows),
        }
    )
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        for batch in table.to_batches(7):
            writer.write(batch)
    got, _ = run(tmp_path / "a.arrow")
    assert got.select(table.schema.names).cast(table.schema).equals(table)
    assert got.schema.names[: len(table.schema.names)] == table.schema.names
    assert [field.type for field in got.schema][: len(table.schema)] == [field.type for field in table.schema]


def test_csv_and_json_text_come_out_as_they_went_in(tmp_path, run, read_input):
    (tmp_path / "a.csv").write_bytes(b'id,t\n007,"x\r\ny"\n,caf\xe9\n')
    table, _ = run(tmp_path / "a.csv")
    assert table["id"].to_pylist() == ["007", ""]
    assert table["t"].cast(pa.binary()).to_pylist() == [b"x\r\ny", b"caf\xe9"]


def test_json_values_come_out_as_values(tmp_path, run, read_input, folder):
    values = [1, "1", [1], {"b": 1, "a": None}, None, 10**30]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    table, _ = run(tmp_path / "a.jsonl")
    assert [None if text is None else json.loads(text) for text in table["v"].to_pylist()] == values
    again = read_input(folder.results)
    assert [row["v"] for source in again.batches(["v"]) for row in iter_rows(source.batch, ["v"])] == values


def test_columns_named_like_ours_are_told_of_the_prefix(tmp_path, read_input, make_job):
    (tmp_path / "a.jsonl").write_text('{"status": 1}\n')
    (tmp_path / "b.csv").write_text("generated_text\nx\n")
    for name in ("a.jsonl", "b.csv"):
        with pytest.raises(UsageError, match=r"output.prefix: the column \w+ would be in the output twice"):
            results_schema(read_input(tmp_path / name).schema, make_job(tmp_path / name))
        results_schema(read_input(tmp_path / name).schema, make_job(tmp_path / name, prefix="bg_"))


def test_keys_of_bad_rows_are_those_of_their_place():
    ids = pa.array(["a", None, "c", None])
    keys, places = row_keys("f", 10, 4, ids), row_keys("f", 10, 4)
    assert keys[[1, 3]].tolist() == places[[1, 3]].tolist()
    assert keys[[0, 2]].tolist() == row_keys("elsewhere", 0, 2, pa.array(["a", "c"])).tolist()
