"""results/ = input rows in input order, as they were, beside exactly one answer for each (row, sample)."""

import datetime
import decimal
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rows import some_rows

from batchgen.data import answers, results_writer
from batchgen.data.commit_log import CommitLog
from batchgen.data.merge import merge
from batchgen.data.run_folder import RunFolder
from batchgen.data.schema import ANSWER_SCHEMA, results_schema
from batchgen.data.status import read_status
from batchgen.data.writer import PartWriter
from batchgen.errors import BatchgenError, CorruptRunError, InputError, UsageError

ROWS = some_rows(16_000)


@pytest.fixture
def run(folder, read_input, make_job, answer):
    """Answer `rows` x n in random order, in small parts, and merge. Returns (table, summary)."""

    def run(path, rows=None, n=1, text=None, faults=(), commit_rows=5, columns=None, **output):
        reader = read_input(path, columns=columns)
        rows = np.arange(reader.num_rows) if rows is None else np.array(rows, np.int64)
        owed = [(int(row), sample) for row in rows for sample in range(n)]
        random.Random(0).shuffle(owed)
        with PartWriter(folder, ROWS, commit_rows=commit_rows) as writer:
            for row, sample in owed:
                fault = "too_long" if row in faults else None
                writer.add(answer(row, sample, text=text[row] if text else None, fault=fault))
        summary = merge(reader, make_job(path, columns=columns, **output), folder, some_rows(rows), n)
        return pq.read_table(folder.results), summary

    return run


@pytest.fixture(params=["one bucket", "many buckets"])
def buckets(request, monkeypatch):
    if request.param == "many buckets":
        monkeypatch.setattr(answers, "BUCKET_ANSWERS", 7)
        monkeypatch.setattr(answers, "BUCKET_BYTES", 2000)  # spill often, several streams a file
        monkeypatch.setattr(answers, "GRID_ANSWERS", 4)
    return request.param


@pytest.mark.parametrize("n", [1, 3])
def test_input_order_with_all_columns(write, run, tmp_path, n, buckets):
    write("in/a.parquet", {"x": list(range(40)), "t": [f"text {i}" for i in range(40)]}, row_group_size=9)
    write("in/b.parquet", {"t": [f"text {i}" for i in range(40, 60)], "x": list(range(40, 60))})
    table, summary = run(tmp_path / "in", n=n, faults={3, 41})
    assert table.schema.names == ["x", "t", *ANSWER_SCHEMA.names]
    expected = [(row, sample) for row in range(60) for sample in range(n)]
    assert list(zip(table["row"].to_pylist(), table["sample_index"].to_pylist())) == expected
    assert table["x"].to_pylist() == [row for row, _ in expected]
    assert table["t"].to_pylist() == [f"text {row}" for row, _ in expected]
    told = [None if row in (3, 41) else f"answer {row}.{sample}" for row, sample in expected]
    assert table["generated_text"].to_pylist() == told
    assert table["token_ids"].to_pylist()[4 * n] == [0, 1, 2, 3, 4]
    assert summary.by_status == {"ok": 58 * n, "error": 2 * n} and summary.by_error_code == {"too_long": 2 * n}
    assert summary.num_answers == 60 * n and summary.accuracy is None
    assert not list(tmp_path.glob("run/results.*")) and not (tmp_path / "run/results/spill").exists()
    assert read_status(tmp_path / "run").is_finished


def test_rows_that_where_and_limit_chose(write, run, buckets):
    path = write("a.parquet", {"x": list(range(100))}, row_group_size=10)
    rows = [0, 3, 4, 5, 17, 40, 41, 42, 43, 99]
    table, _ = run(path, rows=rows, n=2)
    assert table["x"].to_pylist() == table["row"].to_pylist() == [row for row in rows for _ in range(2)]


def test_files_of_results(write, run, folder):
    path = write("a.parquet", {"x": list(range(23))})
    table, summary = run(path, rows_per_file=5, compression="snappy")
    assert [pq.read_metadata(file).num_rows for file in summary.files] == [5, 5, 5, 5, 3]
    assert sorted(os.listdir(folder.results)) == [file.name for file in summary.files]
    assert summary.files[0].name == "part-00000.parquet" and table["x"].to_pylist() == list(range(23))
    assert pq.read_metadata(summary.files[0]).row_group(0).column(0).compression == "SNAPPY"
    assert pq.read_schema(summary.files[0]).metadata[b"batchgen.schema_version"] == b"2"
    assert pq.read_metadata(summary.files[0]).num_row_groups == 1


def test_rows_per_file_that_divides_the_rows_leaves_no_empty_file(write, run):
    _, summary = run(write("a.parquet", {"x": list(range(20))}), rows_per_file=10)
    assert [pq.read_metadata(file).num_rows for file in summary.files] == [10, 10]


def test_an_input_without_rows_gives_a_readable_empty_file(write, run):
    path = write("a.parquet", pa.schema([("x", pa.int64())]).empty_table())
    table, summary = run(path)
    assert table.num_rows == summary.num_answers == 0 and len(summary.files) == 1
    assert table.schema.names == ["x", *ANSWER_SCHEMA.names]


@pytest.mark.parametrize("n", [1, 2])
def test_every_type_passes_through_bit_by_bit(write, run, n):
    def dictionary(*values):
        return pa.array(values).dictionary_encode()

    rows = 5
    columns = {
        "ns": pa.array([1700000000123456789] * rows, pa.int64()).cast(pa.timestamp("ns", "UTC")),
        "decimal": pa.array(
            [decimal.Decimal("123456789012345678.90"), None] * 2 + [decimal.Decimal("-1")], pa.decimal128(38, 2)
        ),
        "binary": pa.array([b"\x00\xff", b"", None, b"a", b"b"]),
        "map": pa.array([[("a", 1), ("a", 2)], [], None, [("b", None)], []], pa.map_(pa.string(), pa.int64())),
        "uint64": pa.array([2**64 - 1, 0, None, 1, 2], pa.uint64()),
        "large": pa.array(["é", None, "", "b", "👩‍👩‍👧"], pa.large_string()),
        "not_utf8": pa.array([b"ok", b"\xf0\x9f\x98", b"caf\xe9", None, b""]).view(pa.string()),
        "messages": pa.array([[{"role": "user", "content": None}], [], None, [{"role": None, "content": "c"}] * 2, []]),
        "fixed": pa.array([b"ab"] * rows, pa.binary(2)),
        "date": pa.array([datetime.date(2024, 1, 1), None] * 2 + [datetime.date(1, 1, 1)]),
        "half": pa.array(np.array([1.5, np.nan, -0.0, np.inf, 0], np.float16)),
        "null": pa.nulls(rows),
        "struct": pa.array([{"a": 1, "b": [None, 2.5]}, None] * 2 + [{"a": None, "b": None}]),
    }
    path = write("a.parquet", pa.table(columns), row_group_size=2)
    before = pq.read_table(path).combine_chunks()
    table, _ = run(path, n=n)
    assert table.schema.names[: len(columns)] == before.schema.names
    first_samples = table.take(pa.array(range(0, rows * n, n))).combine_chunks()
    for name in columns:
        after, right = first_samples[name].chunk(0), before[name].chunk(0)
        assert after.type == right.type, name
        if name == "not_utf8":
            after, right = after.view(pa.binary()), right.view(pa.binary())
        if name == "half":  # NaN differs from itself
            after, right = after.view(pa.int16()), right.view(pa.int16())
        assert after.equals(right), name


def test_dictionaries_that_differ_from_row_group_to_row_group(tmp_path, run):
    path = tmp_path / "a.parquet"
    schema = pa.schema([("d", pa.dictionary(pa.int32(), pa.string()))])
    with pq.ParquetWriter(path, schema) as writer:
        for group in (["a", "b", "a"], ["c", None], ["b", "d", "a", "c"]):
            values = pa.array(group).dictionary_encode().cast(schema.field("d").type)
            writer.write_table(pa.table({"d": values}, schema=schema))
    table, _ = run(path)
    assert table["d"].to_pylist() == ["a", "b", "a", "c", None, "b", "d", "a", "c"]


def test_columns_prefix_and_collisions(write, run, read_input, make_job):
    path = write("a.parquet", {"status": ["mine"], "x": [1], "y": [2]})
    with pytest.raises(UsageError, match=r"output.prefix: the column status would be in the output twice"):
        results_schema(read_input(path).schema, make_job(path))
    table, _ = run(path, prefix="bg_", columns=["y", "status"], extract={"pattern": "."})
    assert table.schema.names == ["y", "status", *(f"bg_{name}" for name in ANSWER_SCHEMA.names), "bg_extracted"]
    assert (table["status"].to_pylist(), table["bg_status"].to_pylist()) == (["mine"], ["ok"])
    with pytest.raises(UsageError, match=r"output.prefix: the column y would be"):
        results_schema(read_input(path).schema, make_job(path, columns=["y"], extract={"pattern": ".", "column": "y"}))
    with pytest.raises(UsageError, match=r"output.prefix: the column row would be"):
        results_schema(read_input(path).schema, make_job(path, columns=["y"], extract={"pattern": ".", "column": "row"}))


EXTRACT = {"pattern": r"answer is ([0-9.,]+)", "take": "first", "expected": "right", "as": "number"}


def test_extract_and_accuracy(write, run):
    text = ["answer is 1,080. answer is 7.", "answer is 18.0", "answer is 3", "no idea", "answer is 5", "answer is ,"]
    path = write("a.parquet", {"x": list(range(6)), "right": ["1080", "18", "4", "4", None, "6"]})
    table, summary = run(path, text=text, columns=["x"], extract=EXTRACT)
    assert table.schema.names == ["x", *ANSWER_SCHEMA.names, "extracted", "correct"]
    assert table["extracted"].to_pylist() == ["1,080.", "18.0", "3", None, "5", ","]
    assert table["correct"].to_pylist() == [True, True, False, False, None, False]
    assert (summary.num_correct, summary.num_scored, summary.accuracy) == (2, 5, 0.4)


def test_extract_as_text_last_match_without_a_group_and_failed_rows_are_wrong(write, run):
    extract = {"pattern": "[a-z]+", "take": "last", "column": "word", "expected": "right"}
    path = write("a.parquet", {"right": ["b", "b", "b"]})
    table, summary = run(path, text=["a b", "b a", "b"], faults={2}, extract=extract)
    assert table["word"].to_pylist() == ["b", "a", None]
    assert table["correct"].to_pylist() == [True, False, False]
    assert summary.accuracy == 1 / 3


def test_expected_column_that_is_not_there(write, run):
    with pytest.raises(InputError, match=r"output.extract.expected: the input has no column right"):
        run(write("a.parquet", {"x": [1]}), extract=EXTRACT)


def test_missing_answers_are_told(write, read_input, make_job, folder, answer, buckets):
    path = write("a.parquet", {"x": list(range(20))})
    with PartWriter(folder, ROWS, commit_rows=3) as writer:
        for row in range(20):
            for sample in range(2):
                if (row, sample) not in ((3, 1), (8, 0)):
                    writer.add(answer(row, sample))
    said = r"no answer to 2 \(row, sample\) .*such as \(3, 1\), \(8, 0\)"
    if buckets == "many buckets":
        said = r"no answer to 1 \(row, sample\) .*such as \(3, 1\)"  # one bucket at a time
    with pytest.raises(CorruptRunError, match=said):
        merge(read_input(path), make_job(path), folder, some_rows(20), 2)
    assert not folder.results.exists() and not read_status(folder.path).is_finished


@pytest.mark.parametrize("samples", [(0, 0), (0, 2)])
def test_a_part_that_answers_twice_or_a_sample_too_many_is_told(write, read_input, make_job, folder, answer, samples):
    path = write("a.parquet", {"x": [1]})
    with PartWriter(folder, ROWS) as writer:
        writer.add(*(answer(0, sample) for sample in samples))
    with pytest.raises(CorruptRunError, match=r"part-000001.parquet: holds two answers .* move this file away"):
        merge(read_input(path), make_job(path), folder, some_rows(1), 2)


def test_the_newest_of_several_answers_counts(write, read_input, make_job, folder, answer, buckets):
    path = write("a.parquet", {"x": list(range(20))})
    order = random.Random(1).choices(range(20), k=100) + list(range(20, 0, -1)) + [0, 5, 9]
    with PartWriter(folder, some_rows(21), commit_rows=1) as writer:
        for number, row in enumerate(order):
            writer.add(*(answer(row, sample, text=f"{number}.{sample}") for sample in range(2)))
    merge(read_input(path), make_job(path), folder, some_rows(20), 2)
    newest = {row: number for number, row in enumerate(order)}
    expected = [f"{newest[row]}.{sample}" for row in range(20) for sample in range(2)]
    assert pq.read_table(folder.results)["generated_text"].to_pylist() == expected


def test_answers_follow_key_and_prompt_to_where_the_row_is_now(write, read_input, make_job, folder, answer, buckets):
    """Rows reversed, three gone, two new, one with another prompt: it has only what is answered to just that."""
    before = some_rows(range(10))
    with PartWriter(folder, before, commit_rows=3) as writer:
        for row in range(10):
            writer.add(answer(row))
    ids = [11, 6, 5, 4, 3, 10, 2, 1]
    now = some_rows(len(ids), ids=ids.__getitem__, prompt=lambda row: "other" if ids[row] == 4 else str(ids[row]))
    with PartWriter(folder, now, commit_rows=3) as writer:
        done = sorted(writer.finished().tolist())
        assert [ids[row] for row in done] == [6, 5, 3, 2, 1]
        for row in set(range(len(ids))) - set(done):
            writer.add(answer(row, text=f"now {ids[row]}"))
    path = write("a.parquet", {"x": ids})
    merge(read_input(path), make_job(path), folder, now, 1)
    table = pq.read_table(folder.results)
    told = [f"now {x}" if x in (11, 4, 10) else f"answer {x}.0" for x in ids]
    assert table["generated_text"].to_pylist() == told and table["row"].to_pylist() == list(range(len(ids)))
    with PartWriter(folder, before) as writer:  # and back: all ten answers are there still
        assert sorted(writer.finished().tolist()) == list(range(10))


def test_two_rows_of_one_key_are_refused():
    with pytest.raises(InputError, match=r"the ids of rows 3 and 7 have one hash"):
        some_rows(9, ids=lambda row: 3 if row == 7 else row)


def test_a_damaged_part_is_told(write, read_input, make_job, folder, answer, buckets):
    path = write("a.parquet", {"x": list(range(20))})
    with PartWriter(folder, ROWS, commit_rows=10) as writer:
        for row in range(20):
            writer.add(answer(row))
    part = folder.parts / "part-000002.parquet"
    image = bytearray(part.read_bytes())
    image[20] ^= 255
    part.write_bytes(image)
    with pytest.raises(CorruptRunError, match=r"part-000002.parquet: changed since it was committed"):
        merge(read_input(path), make_job(path), folder, some_rows(20), 1)


def test_merge_may_be_repeated_and_mends_what_a_crash_left(write, run, read_input, make_job, folder):
    path = write("a.parquet", {"x": list(range(20))})
    first, _ = run(path)

    def again():
        merge(read_input(path), make_job(path), folder, some_rows(20), 1)
        assert pq.read_table(folder.results).equals(first)
        assert not list(folder.path.glob("results.*"))

    again()
    (folder.path / "results.tmp/spill").mkdir(parents=True)  # died while it wrote
    (folder.path / "results.tmp/part-00007.parquet").touch()
    again()
    os.replace(folder.results, folder.path / "results.old")  # died between the two renames
    again()


def test_old_results_stay_if_a_repeat_fails(write, run, read_input, make_job, folder, monkeypatch):
    path = write("a.parquet", {"x": list(range(20))})
    first, _ = run(path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(BatchgenError, match=r"part-00000.parquet: cannot write: No space left"):
        merge(read_input(path), make_job(path), folder, some_rows(20), 1)
    assert pq.read_table(folder.results).equals(first)
    os.replace(folder.results, folder.path / "results.old")  # an earlier merge died between its two renames
    with pytest.raises(BatchgenError):
        merge(read_input(path), make_job(path), folder, some_rows(20), 1)
    assert pq.read_table(folder.results).equals(first)


def test_the_same_answers_give_the_same_bytes_however_they_were_committed(
    tmp_path, write, read_input, make_job, folder, answer, monkeypatch
):
    """Parts of other sizes and in another order make other buckets; row groups and files end where they did."""
    monkeypatch.setattr(answers, "GRID_ANSWERS", 8)
    monkeypatch.setattr(answers, "BUCKET_BYTES", 6000)
    monkeypatch.setattr(results_writer, "_ROW_GROUP_BYTES", 4000)
    path = write("a.parquet", {"x": list(range(300))}, row_group_size=70)
    text = {row: f"{row} " * (row * 7 % 50) for row in range(300)}
    images, num_buckets = [], []
    for order, commit_rows in ((range(300), 300), (reversed(range(300)), 7)):
        with RunFolder(tmp_path / f"run-{commit_rows}") as one:
            one.begin({}, {})
            with PartWriter(one, some_rows(300), commit_rows=commit_rows) as writer:
                for row in order:
                    writer.add(answer(row, text=text[row], fault="too_long" if row % 90 == 3 else None))
            merge(read_input(path), make_job(path, rows_per_file=130), one, some_rows(300), 1)
            parts = CommitLog(one.commit_log).read()
            num_buckets.append(answers.SortedAnswers(one, parts, some_rows(300), 1, tmp_path / "spill").num_buckets)
            images.append([file.read_bytes() for file in sorted(one.results.iterdir())])
            groups = [pq.read_metadata(file).num_row_groups for file in sorted(one.results.iterdir())]
    assert images[0] == images[1] and len(images[0]) == 3 and min(groups) > 1
    assert num_buckets[0] != num_buckets[1], "or nothing is shown"


def test_memory_does_not_grow_with_the_job(write, read_input, make_job, folder, answer, monkeypatch):
    """Peak Arrow memory of the merge, for N and for 8 N rows, with buckets and pieces made small."""
    monkeypatch.setattr(answers, "BUCKET_ANSWERS", 500)
    monkeypatch.setattr(answers, "GRID_ANSWERS", 100)
    monkeypatch.setattr(answers, "BUCKET_BYTES", 2**20)
    monkeypatch.setattr(results_writer, "_ROW_GROUP_BYTES", 2**20)
    peaks = []
    for num_rows in (2000, 16000):
        text = np.random.default_rng(0).bytes(4000).hex()
        path = write(f"in/{num_rows}.parquet", {"x": [f"{i} {text[i % 50 :]}" for i in range(num_rows)]}, row_group_size=500)
        reader, job = read_input(path), make_job(path)
        with PartWriter(folder, ROWS, commit_rows=500) as writer:
            done = set(writer.finished().tolist())
            for row in range(num_rows):
                if row not in done:
                    writer.add(answer(row, text=text))
        pool = pa.proxy_memory_pool(pa.default_memory_pool())
        previous = pa.default_memory_pool()
        pa.set_memory_pool(pool)
        try:
            merge(reader, job, folder, some_rows(num_rows), 1)
        finally:
            pa.set_memory_pool(previous)
        peaks.append(pool.max_memory())
    assert peaks[1] < 1.5 * peaks[0], peaks
