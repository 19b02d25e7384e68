"""results/ in every format: exact values, one file or several, and one line to load it with what people use."""

import base64
import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pytest
from some_rows import some_rows

from batchgen.data.merge import merge
from batchgen.data.show import first_rows
from batchgen.data.writer import PartWriter

NUM_ROWS = 7
COLUMNS = {
    "q": pa.array([f"Frage {i}: ä \n\u2028 \U0001f600" for i in range(NUM_ROWS)], pa.large_string()),
    "big": pa.array([2**64 - 1 - i for i in range(NUM_ROWS)], pa.uint64()),
    "price": pa.array([decimal.Decimal("0.10") + i for i in range(NUM_ROWS)], pa.decimal128(20, 2)),
    "kind": pa.array(["a", "b", None] * 2 + ["a"]).dictionary_encode(),
    "turns": pa.array([[{"role": "user", "content": f"c{i}"}, {"role": "x", "content": None}] for i in range(NUM_ROWS)]),
}
MORE = {
    "bytes": pa.array([bytes([i, 255]) for i in range(NUM_ROWS)]),
    "at": pa.array([1_700_000_000_123_456_789 + i for i in range(NUM_ROWS)], pa.timestamp("ns")),
    "day": pa.array([datetime.date(2026, 1, 1 + i) for i in range(NUM_ROWS)]),
    "took": pa.array([datetime.timedelta(seconds=i) for i in range(NUM_ROWS)], pa.duration("us")),
    "ratio": pa.array([0.1, float("nan"), float("inf"), None, 1e300, -0.0, 5e-324]),
    "map": pa.array([[("k", i), ("k", i + 1)] for i in range(NUM_ROWS)], pa.map_(pa.string(), pa.int64())),
    "nested": pa.array([{"t": datetime.datetime(2026, 1, 2, 3), "b": b"x", "f": [float("nan")]}] * NUM_ROWS),
}


@pytest.fixture
def results(write, folder, read_input, make_job, answer):
    """Merge answers to `columns`; returns the results folder."""

    def results(columns, **output):
        path = write("in.parquet", columns)
        rows = np.arange(NUM_ROWS)
        with PartWriter(folder, some_rows(rows)) as writer:
            for row in rows.tolist():
                writer.add(answer(row, 0, fault="too_long" if row == 3 else None))
        merge(read_input(path), make_job(path, **output), folder, some_rows(rows), 1)
        return folder.results

    return results


def test_json_lines_say_exactly_what_the_columns_hold(results):
    out = results(COLUMNS | MORE, format="jsonl", rows_per_file=None)
    assert [path.name for path in out.iterdir()] == ["part-00000.jsonl"]
    lines = (out / "part-00000.jsonl").read_text().split("\n")
    assert lines.pop() == "" and len(lines) == NUM_ROWS
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in lines]
    for i, row in enumerate(rows):
        assert row["q"] == COLUMNS["q"][i].as_py() and row["big"] == 2**64 - 1 - i
        assert (row["price"], row["kind"]) == (f"{i}.10", COLUMNS["kind"][i].as_py())
        assert row["turns"] == [{"role": "user", "content": f"c{i}"}, {"role": "x", "content": None}]
        assert base64.b64decode(row["bytes"]) == bytes([i, 255])
        assert row["at"] == f"2023-11-14T22:13:20.{123456789 + i}" and row["day"] == f"2026-01-0{1 + i}"
        assert row["took"] == i * 1_000_000 and row["map"] == [["k", i], ["k", i + 1]]
        assert row["nested"] == {"t": "2026-01-02T03:00:00", "b": "eA==", "f": [None]}
        assert (row["row"], row["status"]) == (i, "error" if i == 3 else "ok")
        assert row["token_ids"] == ([] if i == 3 else [0, 1, 2, 3, 4][: len(row["token_ids"])])
    assert [row["ratio"] for row in rows] == [0.1, None, None, None, 1e300, 0.0, 5e-324]


def test_files_hold_so_many_rows(results, folder):
    out = results(COLUMNS, format="jsonl", rows_per_file=3)
    counts = {path.name: path.read_bytes().count(b"\n") for path in sorted(out.iterdir())}
    assert counts == {"part-00000.jsonl": 3, "part-00001.jsonl": 3, "part-00002.jsonl": 1}


def test_one_line_loads_the_results(results, tmp_path, monkeypatch):
    """As in the README: pandas, polars, DuckDB and datasets, from Parquet in several files."""
    import datasets
    import duckdb
    import pandas
    import polars

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    out = results(COLUMNS, rows_per_file=3)
    tables = {
        "pandas": pandas.read_parquet(out, dtype_backend="pyarrow").to_dict("records"),
        "polars": polars.read_parquet(out / "*.parquet").to_dicts(),
        "duckdb": duckdb.sql(f"from '{out}/*.parquet'").to_arrow_table().to_pylist(),
        "datasets": list(datasets.load_dataset("parquet", data_dir=str(out), split="train")),
    }
    for name, rows in tables.items():
        assert [row["row"] for row in rows] == list(range(NUM_ROWS)), name
        assert [row["big"] for row in rows] == [2**64 - 1 - i for i in range(NUM_ROWS)], name
        assert [row["price"] for row in rows] == COLUMNS["price"].to_pylist(), name
        assert [row["q"] for row in rows] == COLUMNS["q"].to_pylist(), name
        assert [row["turns"][0]["content"] for row in rows] == [f"c{i}" for i in range(NUM_ROWS)], name
        assert [str(row["kind"]) for row in rows][:2] == ["a", "b"], name


def test_one_line_loads_json_lines(results, tmp_path, monkeypatch):
    import datasets
    import duckdb
    import pandas
    import polars

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    out = results(COLUMNS, format="jsonl", rows_per_file=None) / "part-00000.jsonl"
    tables = {
        "pandas": pandas.read_json(out, lines=True).to_dict("records"),
        "polars": polars.read_ndjson(out).to_dicts(),
        "duckdb": duckdb.sql(f"from '{out}'").to_arrow_table().to_pylist(),
        "datasets": list(datasets.load_dataset("json", data_files=str(out), split="train")),
    }
    for name, rows in tables.items():
        assert [row["q"] for row in rows] == COLUMNS["q"].to_pylist(), name
        assert [row["row"] for row in rows] == list(range(NUM_ROWS)), name


def test_show_prints_json_lines(results, folder, make_job):
    results(COLUMNS, format="jsonl")
    folder.begin({"x": 1}, {})
    lines = first_rows(folder.path, 2, 60)
    assert "part-00000.jsonl" in lines[0] and sum(line.startswith("  big ") for line in lines) == 2
