"""Inputs that are wrong: one bad row costs that row, one bad job costs one line that says what to do. Never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import WarmServer, results, write_job, write_rows

from batchgen.data.schema import ANSWER_SCHEMA

GOOD = {"q": [f"what is {i}?" for i in range(6)], "n": list(range(6))}


def with_bytes(values: list[bytes]) -> pa.Table:
    """A text column made of raw bytes, as some writers leave it."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))]
    return pa.table({"q": pa.Array.from_buffers(pa.string(), len(values), buffers), "n": range(len(values))})


BAD_ROWS = {
    "null": (None, "null_prompt", "'q' is null"),
    "empty": ("", "empty_prompt", "renders to nothing"),
    "blank": (" \n\t", "empty_prompt", "renders to nothing"),
    "too-long": ("x" * 600, "prompt_too_long", "511 fit"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_bad_row_is_an_error_row_and_the_others_are_answered(
    kind: str, place: int, here: Path, server: WarmServer
) -> None:
    """First, inner and last; no answer slides to another row."""
    bad, code, said = BAD_ROWS[kind]
    write_rows(here / "rows.parquet", GOOD)
    job = write_job(here)
    assert server.run("run", job, "--set", "output.path=good", cwd=here).code == 0
    write_rows(here / "rows.parquet", GOOD | {"q": [bad if i == place else q for i, q in enumerate(GOOD["q"])]})
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3 and "Traceback" not in outcome.stderr and f"{code}: 1" in outcome.stderr
    good, rows = results(here / "good").to_pylist(), results(here / "out").to_pylist()
    assert [row["n"] for row in rows] == list(range(6))
    for i, row in enumerate(rows):
        if i == place:
            assert (row["status"], row["error_code"], row["finish_reason"]) == ("error", code, "error")
            assert said in row["error_message"]
            assert row["generated_text"] is None and row["token_ids"] == []
        else:
            assert (row["status"], row["error_code"]) == ("ok", None)
            assert row["token_ids"] == good[i]["token_ids"] and row["generated_text"] == good[i]["generated_text"]
    again = server.run("run", job, cwd=here)
    assert again.code == 3 and "0 of them in this run" in again.stderr, "an error row is a finished row"


def test_bytes_that_are_not_utf8_spoil_their_row_only(here: Path, server: WarmServer) -> None:
    values = [b"plain", b"caf\xe9", "caf\u00e9 \U0001f468\u200d\U0001f469".encode(), b"\xf0\x9f\x98"]
    write_rows(here / "rows.parquet", with_bytes(values))
    outcome = server.run("run", write_job(here), cwd=here)
    assert outcome.code == 3 and "Traceback" not in outcome.stderr
    table = results(here / "out")
    assert table["status"].to_pylist() == ["ok", "error", "ok", "error"]
    assert table["error_code"].to_pylist() == [None, "not_utf8", None, "not_utf8"]
    assert "column q" in table["error_message"][1].as_py()
    carried = [value.as_buffer().to_pybytes() for value in table["q"]]
    assert carried == values, "the input is carried as it was, byte for byte"


def test_all_rows_bad(here: Path, server: WarmServer) -> None:
    """No engine is needed then, and none is built."""
    write_rows(here / "rows.parquet", {"q": [None, "", "y" * 600]})
    outcome = server.run("run", write_job(here, sampling={"max_tokens": 4, "n": 2}), cwd=here)
    assert outcome.code == 3 and "engine:" not in outcome.stderr
    table = results(here / "out")
    assert table["row"].to_pylist() == [0, 0, 1, 1, 2, 2] and table["sample_index"].to_pylist() == [0, 1] * 3
    assert set(table["status"].to_pylist()) == {"error"}


def test_a_prompt_at_the_limit_of_the_model_is_answered_and_one_more_is_an_error(here: Path, server: WarmServer) -> None:
    lengths = [9, 10, 11, 12]
    write_rows(here / "rows.parquet", {"q": ["z" * n for n in lengths]})
    job = write_job(here, model={"path": "toy", "max_model_len": 12}, prompt={"text": "{{ q }}"})
    assert server.run("run", job, "--set", "sampling.ignore_eos=true", cwd=here).code == 3
    table = results(here / "out")
    assert table["num_output_tokens"].to_pylist() == [3, 2, 1, 0], "the answer ends where the model does"
    assert table["error_code"].to_pylist() == [None, None, None, "prompt_too_long"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"prompt": {"user": "{{ question }}"}}, "prompt: the input has no column question"),
        ({"input": {"id_column": "idd"}}, "input.id_column: the input has no column idd; did you mean id?"),
        ({"input": {"columns": ["q", "m"]}}, "input.columns[1]: the input has no column m"),
        ({"input": {"where": "weight > 1"}}, "input.where: the input has no column weight"),
        ({"output": {"extract": {"pattern": "x", "expected": "right"}}}, "the input has no column right"),
        ({"prompt": {"messages": "chat"}}, "prompt: the input has no column chat"),
    ],
)
def test_missing_column(sections: dict, said: str, here: Path, server: WarmServer) -> None:
    """Found before any work, whichever key names it."""
    write_rows(here / "rows.parquet", GOOD | {"id": list("abcdef")})
    outcome = server.run("run", write_job(here, **sections), cwd=here)
    assert outcome.code == 2 and said in outcome.error and "It has q, n, id" in outcome.error
    assert not (here / "out").exists(), "a job that cannot start leaves nothing behind"


@pytest.mark.parametrize("names", [["rows.parquet"], ["a.parquet", "rows.parquet"]])
def test_empty_file(names: list[str], here: Path, server: WarmServer) -> None:
    """A file of 0 bytes, alone and beside a good one: named, not skipped in silence."""
    write_rows(here / "a.parquet", GOOD)
    (here / "rows.parquet").write_bytes(b"")
    outcome = server.run("run", write_job(here, input={"path": names}), cwd=here)
    assert outcome.code == 2
    assert "rows.parquet: empty (0 bytes)" in outcome.error and "a.parquet:" not in outcome.error


def test_truncated_and_foreign_files(here: Path, server: WarmServer) -> None:
    whole = write_rows(here / "a.parquet", GOOD).read_bytes()
    for content in (whole[: len(whole) // 2], b"q,n\nhello,1\n"):
        (here / "rows.parquet").write_bytes(content)
        outcome = server.run("run", write_job(here), cwd=here)
        assert outcome.code == 2 and "rows.parquet: cannot be read as Parquet" in outcome.error


@pytest.mark.parametrize("extract", [None, {"pattern": "x", "column": "found", "expected": "q"}])
def test_file_with_a_schema_and_no_rows(extract: dict | None, here: Path, server: WarmServer) -> None:
    """Nothing to do is not a failure, and what reads the results finds the columns that it expects."""
    schema = pa.schema([("q", pa.string()), ("when", pa.timestamp("us"))])
    pq.ParquetWriter(here / "rows.parquet", schema).close()
    outcome = server.run("run", write_job(here, output={"path": "out", "extract": extract}), cwd=here)
    assert outcome.code == 0 and "Traceback" not in outcome.stderr
    table = results(here / "out")
    assert table.num_rows == 0
    added = ["found", "correct"] if extract else []
    assert table.schema.names == ["q", "when", *ANSWER_SCHEMA.names, *added]
    assert table.schema.field("when").type == pa.timestamp("us")
    assert "0 of 0 answers" in server.run("status", here / "out", cwd=here).stdout
    assert server.run("run", here / "job.yaml", cwd=here).code == 0
    assert server.run("plan", here / "job.yaml", cwd=here).code == 0


def test_where_that_keeps_no_row(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", GOOD)
    assert server.run("run", write_job(here, input={"where": "n > 100"}), cwd=here).code == 0
    assert results(here / "out").num_rows == 0


@pytest.mark.parametrize("path", ["nothing.parquet", "data/*.parquet", "empty-folder"])
def test_no_files_match(path: str, here: Path, server: WarmServer) -> None:
    (here / "empty-folder").mkdir()
    outcome = server.run("run", write_job(here, input={"path": path}), cwd=here)
    assert outcome.code == 2 and path in outcome.error and "input.path" in outcome.error


def test_unknown_key_comes_with_a_suggestion(here: Path, server: WarmServer) -> None:
    """In the file and in --set, with the place."""
    write_rows(here / "rows.parquet", GOOD)
    outcome = server.run("run", write_job(here, engine={"block_sise": 4}), cwd=here)
    assert outcome.code == 2
    assert outcome.error.endswith("job.yaml: engine.block_sise: unknown key; did you mean block_size?")
    outcome = server.run("run", write_job(here), "--set", "sampling.max_token=4", cwd=here)
    assert outcome.code == 2
    assert "--set sampling.max_token=4: " in outcome.error and "did you mean max_tokens?" in outcome.error


def test_output_folder_of_another_job_is_refused_with_what_differs(here: Path, server: WarmServer) -> None:
    """And left as it was. What does not change answers may differ."""
    write_rows(here / "rows.parquet", GOOD)
    job = write_job(here)
    assert server.run("run", job, cwd=here).code == 0
    before = {path: path.read_bytes() for path in (here / "out").rglob("*.parquet")}
    for override, said in (
        ("sampling.max_tokens=9", "sampling.max_tokens: was 8, is now 9"),
        ("prompt.user='Q: {{ q }}'", "prompt.user: was"),
        ("input.limit=3", "input.limit: was null, is now 3"),
    ):
        outcome = server.run("run", job, "--set", override, cwd=here)
        assert outcome.code == 2 and "Traceback" not in outcome.stderr
        assert said in outcome.stderr and "another output.path" in outcome.stderr
    write_rows(here / "rows.parquet", GOOD | {"n": [9, 8, 7, 6, 5, 4]})
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 2 and "input file rows.parquet: was" in outcome.stderr
    assert {path: path.read_bytes() for path in (here / "out").rglob("*.parquet")} == before
    write_rows(here / "rows.parquet", GOOD)
    settings = ["engine.block_size=4", "engine.max_running_requests=1", "output.commit_rows=1"]
    assert server.run("run", job, *(arg for s in settings for arg in ("--set", s)), cwd=here).code == 0


@pytest.mark.parametrize("is_file", [True, False])
def test_output_path_that_is_not_a_run_folder(is_file: bool, here: Path, server: WarmServer) -> None:
    """Somebody's folder, or a file: refused, untouched."""
    write_rows(here / "rows.parquet", GOOD)
    mine = here / "out" if is_file else here / "out" / "thesis.tex"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("years of work")
    outcome = server.run("run", write_job(here), cwd=here)
    assert outcome.code == 2 and "output.path" in outcome.error
    assert mine.read_text() == "years of work" and len(list(mine.parent.iterdir())) == (3 + 1 if is_file else 1)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": "no/such-model"}}, "no/such-model"),
        ({"model": {"path": "./missing-folder"}}, "missing-folder"),
        ({"engine": {"kv_memory": 1024}}, "engine.kv_memory"),
        ({"engine": {"device": "cuda:7"}}, "engine.device: cuda:7 is not there"),
        ({"model": {"path": "toy", "max_model_len": 0}}, "model.max_model_len"),
    ],
)
def test_models_and_machines_that_are_not_there(sections: dict, said: str, here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", GOOD)
    outcome = server.run("run", write_job(here, **sections), cwd=here)
    assert outcome.code == 2 and said in outcome.error


def test_missing_job_file(here: Path, server: WarmServer) -> None:
    outcome = server.run("run", "nowhere.yaml", cwd=here)
    assert outcome.code == 2 and outcome.error.startswith("nowhere.yaml: cannot read the job file")


def test_results_that_are_damaged_are_told_and_written_again(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", GOOD)
    assert server.run("run", write_job(here), cwd=here).code == 0
    part = here / "out/results/part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:99])
    outcome = server.run("show", "out", cwd=here)
    assert outcome.code == 1 and "out/results: cannot be read" in outcome.error and "`batchgen merge out`" in outcome.error
    assert server.run("merge", "out", cwd=here).code == 0 and part.read_bytes() == whole


def test_a_chat_template_that_cannot_be_compiled_is_named(here: Path, toy: Path, server: WarmServer) -> None:
    """The job's own by its key, the model's as the model's."""
    write_rows(here / "rows.parquet", GOOD)
    outcome = server.run("run", write_job(here, prompt={"user": "{{ q }}", "chat_template": "{% if"}), cwd=here)
    assert outcome.code == 2 and outcome.error.startswith("prompt.chat_template: cannot be compiled: line 1")
    shutil.copytree(toy, here / "other")
    (here / "other/chat_template.jinja").write_text("{% for %}")
    outcome = server.run("run", write_job(here, model={"path": "other"}), cwd=here)
    assert outcome.code == 2 and outcome.error.startswith("the model's own chat template")
