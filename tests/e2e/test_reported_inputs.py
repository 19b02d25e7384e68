"""Faults of input files that users of other batch tools have reported, from end to end: each docstring tells the fault.

What a single module shows is tested beside it: tests/data holds row groups beyond 2 GB, schema drift, and lost types.
"""

from __future__ import annotations

import decimal
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import ENTRY, environment, results, run_cold, write_job, write_rows

PEAK = f"""
{ENTRY.replace("main()", "")}
try:
    main()
finally:
    print(*[line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")], flush=True)
"""


def peak_mib(*args: str, cwd: Path) -> tuple[int, float]:
    """Exit code and peak memory of a command in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PEAK, *args], cwd=cwd, env=environment(), capture_output=True, text=True)
    return done.returncode, int(done.stdout.split()[-1]) / 1024


@pytest.mark.slow
def test_one_row_group_of_nested_text_beyond_two_gigabytes(here: Path) -> None:
    """Text beyond what 32-bit offsets reach, in one row group of a small file: read at once it is "not implemented" or
    breaks when chunks are joined. Here every row is told to be too long, and memory is that of a few batches. (To
    tokenize them whole would take long; that few of them are held then is shown in test_token_store.py.)"""
    rows = 2100
    message = pa.array([[{"role": "user", "content": "x" * 2**20}]])
    with pq.ParquetWriter(here / "rows.parquet", pa.schema([("messages", message.type)]), compression="zstd") as writer:
        chunk = pa.chunked_array([pa.concat_arrays([message] * 100)] * (rows // 100))
        writer.write_table(pa.table({"messages": chunk}), row_group_size=rows)
    assert pq.ParquetFile(here / "rows.parquet").metadata.num_row_groups == 1
    del chunk
    write_job(here, prompt={"text": "{{ messages[0].content[:600] }}"}, input={"columns": []})
    code, mib = peak_mib("run", "job.yaml", cwd=here)
    table = results(here / "out")
    assert code == 3 and table["error_code"].to_pylist() == ["prompt_too_long"] * rows
    assert mib < 1400, mib


@pytest.mark.slow
def test_memory_is_that_of_a_batch_and_not_of_the_file(here: Path) -> None:
    """An iterator over batches that keeps what it has read, so that memory climbs towards the size of the input."""
    peaks = []
    for name, num_groups in {"small": 2, "large": 20}.items():
        with pq.ParquetWriter(here / f"{name}.parquet", pa.schema([("q", pa.string())])) as writer:
            for seed in range(num_groups):
                text = np.random.default_rng(seed).bytes(2000 * 2000).hex()
                writer.write_table(pa.table({"q": [text[i : i + 4000] for i in range(0, len(text), 4000)]}))
        path = write_job(
            here,
            input={"path": f"{name}.parquet", "columns": []},  # results are held up to a row group of 128 MiB
            prompt={"text": "{{ q[:2] }}"},
            sampling={"max_tokens": 1},
            output={"path": name},
        )
        code, mib = peak_mib("run", str(path), cwd=here)
        assert code == 0 and results(here / name).num_rows == 2000 * num_groups
        peaks.append(mib)
    assert (here / "large.parquet").stat().st_size > 75 * 2**20
    assert peaks[1] < peaks[0] + 60, peaks


def test_types_that_a_first_chunk_does_not_show(here: Path, server: Any) -> None:
    """A column that is null all through the first file, then text; a later file with one more column and one more key in
    its messages. Types fixed from the first chunk refuse the rest halfway, or drop what is new without a word."""
    plain, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "ann"}
    first = [{"messages": [plain], "note": None}] * 500
    second = [{"messages": [more], "note": f"x{i}", "lang": "de"} for i in range(10)]
    for name, rows in {"1.jsonl": first, "2.jsonl": second}.items():
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = write_job(here, input={"path": ["1.jsonl", "2.jsonl"]}, prompt={"messages": "messages"})
    assert server.run("run", job, "--set", "sampling.max_tokens=1", cwd=here).code == 0
    table = results(here / "out")
    assert table["note"].to_pylist() == [None] * 500 + [f"x{i}" for i in range(10)]
    assert table["lang"].to_pylist() == [None] * 500 + ["de"] * 10
    seen = [json.loads(text) for text in table["messages"].to_pylist()]
    assert seen == [[plain]] * 500 + [[more]] * 10, "no message has a key that it did not come with"

    for name, rows in {"1.parquet": first, "2.parquet": second}.items():
        write_rows(here / name, pa.Table.from_pylist(rows))
    job = write_job(here, input={"path": "*.parquet"}, prompt={"messages": "messages"}, output={"path": "other"})
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 2 and "2.parquet: has a column lang that" in outcome.error and not (here / "other").exists()
    write_rows(here / "2.parquet", pa.Table.from_pylist(second).drop_columns(["lang"]))
    assert server.run("run", job, "--set", "sampling.max_tokens=1", cwd=here).code == 0
    assert results(here / "other")["note"].to_pylist()[499:501] == [None, "x0"]


def test_files_without_rows_and_saved_data_sets(here: Path, server: Any) -> None:
    """Code that asks for row group 0 of a file that has none; the sidecars of a saved data set taken for its rows."""
    import datasets

    schema = pa.schema([("q", pa.string()), ("n", pa.int64())])
    (here / "in").mkdir()
    pq.ParquetWriter(here / "in/a.parquet", schema).close()
    write_rows(here / "in/b.parquet", schema.empty_table())
    with pq.ParquetWriter(here / "in/c.parquet", schema) as writer:
        for group in ([0, 1], [], [2]):
            writer.write_table(pa.table({"q": [f"say {i}" for i in group], "n": group}, schema=schema))
    assert server.run("run", write_job(here, input={"path": "in"}), cwd=here).code == 0
    assert results(here / "out")["n"].to_pylist() == [0, 1, 2]
    only_empty = write_job(here, input={"path": "in/[ab].parquet"}, output={"path": "empty"})
    assert server.run("run", only_empty, cwd=here).code == 0
    assert results(here / "empty").num_rows == 0 and results(here / "empty").schema.names[:2] == ["q", "n"]
    (here / "in/0.parquet").write_bytes(b"")
    assert "0.parquet: empty (0 bytes)" in server.run("run", write_job(here, input={"path": "in"}), cwd=here).error

    saved = datasets.Dataset.from_dict({"q": [f"say {i}" for i in range(6)], "n": list(range(6))})
    for name, one in {"plain": saved, "shuffled": saved.shuffle(seed=1)}.items():
        one.save_to_disk(here / name)
        job = write_job(here, input={"path": name}, output={"path": f"of-{name}"})
        assert server.run("run", job, cwd=here).code == 0
        assert results(here / f"of-{name}")["n"].to_pylist() == one["n"][:]


def test_text_that_is_no_text_in_any_locale(here: Path) -> None:
    """Half of a surrogate pair passes the JSON parser and fails when it is encoded; text columns with other bytes than
    UTF-8 fail when they are touched; an ASCII locale fails when emoji are written. One bad value takes all rows with it."""
    family = "👨‍👩‍👧"
    lines = ['{"q": "\\ud83d"}', json.dumps({"q": family}, ensure_ascii=False), '{"q": "plain"}']
    (here / "rows.jsonl").write_text("\n".join(lines), "utf-8")
    values = [b"ok", b"\xf0\x9f\x98", b"caf\xe9", family.encode()]
    write_rows(here / "rows.parquet", pa.table({"q": pa.array(values).view(pa.string())}))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name, right in {"rows.jsonl": ["error", "ok", "ok"], "rows.parquet": ["ok", "error", "error", "ok"]}.items():
        job = write_job(here, input={"path": name}, output={"path": f"of-{name}"}, prompt={"user": f"{family} {{{{ q }}}}"})
        outcome = run_cold("run", job.name, cwd=here, variables=ascii_only)
        assert outcome.code == 3 and "Traceback" not in outcome.stderr, outcome.stderr
        table = results(here / f"of-{name}")
        assert table["status"].to_pylist() == right
        assert set(table["error_code"].to_pylist()) == {None, "not_utf8"}
        carried = [value.as_buffer().to_pybytes() for value in table["q"] if value.is_valid]
        assert carried == (values if name == "rows.parquet" else [family.encode(), b"plain"])
        for file in ("job.json", "summary.json"):
            (here / f"of-{name}" / file).read_text("utf-8")
    shown = run_cold("show", "of-rows.jsonl", "-n", "4", cwd=here, variables=ascii_only)
    assert shown.code == 0 and "\\U0001f468" in shown.stdout, shown.stderr
    write_job(here, output={"path": "é"})
    told = run_cold("run", job.name, cwd=here, variables=ascii_only)
    assert told.code == 2 and "output.path: no file can have the name" in told.error


def test_values_and_types_of_carried_columns(here: Path, server: Any) -> None:
    """Copying rows through Python objects makes microseconds of nanoseconds and overflows on uint64; dictionaries that
    differ from batch to batch are refused by the writer; a large_string prompt is not taken for text."""
    rows = 5
    table = pa.table(
        {
            "ns": pa.array([1700000000123456789] * rows).cast(pa.timestamp("ns", "UTC")),
            "money": pa.array([decimal.Decimal("123456789012345678.90")] * rows, pa.decimal128(38, 2)),
            "raw": pa.array([b"\x00\xff"] * rows),
            "map": pa.array([[("k", "1"), ("k", "2")]] * rows, pa.map_(pa.string(), pa.string())),
            "big": pa.array([2**64 - 1, 2**53 + 1, 0, 1, 2], pa.uint64()),
            "large": pa.array([f"large {i}" for i in range(rows)], pa.large_string()),
            "a.b c": pa.array(range(rows)),
        }
    )
    kind = pa.dictionary(pa.int32(), pa.string())
    schema = table.schema.append(pa.field("kind", kind))
    with pq.ParquetWriter(here / "rows.parquet", schema) as writer:
        for i, words in enumerate((["cat", "dog"], ["eel", None], ["fox"])):
            group = table.slice(2 * i, len(words))
            writer.write_table(group.append_column("kind", pa.array(words).dictionary_encode().cast(kind)))
    job = write_job(here, prompt={"text": "{{ kind | default('nothing') }}: {{ large }}"})
    shown = server.run("plan", job, cwd=here)
    assert shown.code == 0 and "cat: large 0" in shown.stdout
    assert server.run("run", job, cwd=here).code == 0
    got = results(here / "out")
    for field in schema:
        assert got[field.name].type == field.type and got[field.name].to_pylist() == (
            ["cat", "dog", "eel", None, "fox"] if field.name == "kind" else table[field.name].to_pylist()
        )
    lengths = [len(f"{word or 'nothing'}: large {i}") for i, word in enumerate(["cat", "dog", "eel", None, "fox"])]
    assert [n - m for n, m in zip(lengths, got["num_prompt_tokens"].to_pylist(), strict=True)] == [0, 0, 0, 2, 0]
