"""`batchgen run` and its sister commands from outside: files in, files out, exit codes, signals."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import (
    Process,
    WarmServer,
    catches_signals,
    results,
    run_cold,
    start_cold,
    write_job,
    write_rows,
)
from toy_engine import Oracle
from transformers import AutoTokenizer

from batchgen import __version__
from batchgen.data.schema import ANSWER_SCHEMA, SCHEMA_VERSION
from batchgen.models.config import num_matmul_parameters
from batchgen.models.loader import load_config, resolve_model

ROWS = {
    "id": [f"r{i:02d}" for i in range(12)],
    "q": [f"{'tell me of the' if i % 3 else 'what is'} {i * i}" for i in range(12)],
    "score": [i / 7 for i in range(12)],
    "tags": [["a"] * (i % 3) for i in range(12)],
}
ANSWER = ["status", "error_code", "generated_text", "finish_reason", "stop_reason", "token_ids"]  # what may never differ


@pytest.fixture
def job(here: Path) -> Path:
    write_rows(here / "rows.parquet", ROWS)
    return write_job(here)


def answers(folder: Path) -> list[dict]:
    return results(folder).select(ANSWER).to_pylist()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def parts(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted((folder / "parts").glob("*.parquet"))])


# ---- one run --------------------------------------------------------------------------------------------------------


def test_a_cold_run_answers_as_transformers_does(job: Path, here: Path, toy: Path) -> None:
    """From a shell, text to text: chat template, tokenizer, engine, detokenizer and merge against generate."""
    outcome = run_cold("run", job, cwd=here)
    assert outcome.code == 0 and outcome.stdout == ""
    assert "12 answers (12 ok); 12 of them in this run" in outcome.stderr and "results   out/results" in outcome.stderr
    oracle, tokenizer = Oracle(toy), AutoTokenizer.from_pretrained(toy)
    rows = results(here / "out").to_pylist()
    assert len(rows) == len(ROWS["q"])
    for question, row in zip(ROWS["q"], rows):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        expected = oracle.greedy(prompt, 8, frozenset({265, 266}))
        ended = expected[-1] in (265, 266)
        assert row["token_ids"] == expected and row["num_output_tokens"] == len(expected)
        assert row["num_prompt_tokens"] == len(prompt)
        assert row["generated_text"] == tokenizer.decode(expected[:-1] if ended else expected, skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert row["stop_reason"] == (str(expected[-1]) if ended else None)


def test_results_hold_all_input_columns_in_input_order_then_the_answer(job: Path, here: Path, server: WarmServer) -> None:
    assert server.run("run", job, cwd=here).code == 0
    table = results(here / "out")
    given = pa.table(ROWS)
    assert table.schema.names == [*ROWS, *ANSWER_SCHEMA.names]
    assert table.select(list(ROWS)).cast(given.schema).equals(given)
    for field in ANSWER_SCHEMA:
        assert table.schema.field(field.name).type == field.type
    assert table.schema.metadata[b"batchgen.schema_version"] == str(SCHEMA_VERSION).encode()
    assert table["row"].to_pylist() == list(range(12)) and set(table["sample_index"].to_pylist()) == {0}


def test_columns_prefix_compression_and_rows_per_file(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", ROWS)
    output = {"path": "out", "prefix": "bg_", "rows_per_file": 5, "compression": "snappy", "commit_rows": 2}
    job = write_job(here, input={"columns": ["score", "id"]}, output=output)
    assert server.run("run", job, cwd=here).code == 0
    files = sorted((here / "out/results").iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [5, 5, 2]
    assert results(here / "out").schema.names == ["score", "id", *(f"bg_{name}" for name in ANSWER_SCHEMA.names)]
    assert pq.read_metadata(files[0]).row_group(0).column(0).compression == "SNAPPY"


def test_several_files_where_and_limit(here: Path, server: WarmServer) -> None:
    """Rows keep their position in the whole input; `limit` counts what `where` keeps."""
    for name, part in (("b", slice(0, 5)), ("a", slice(5, 12))):
        write_rows(here / f"in/{name}.parquet", {key: values[part] for key, values in ROWS.items()})
    job = write_job(here, input={"path": "in", "where": "tags | length > 0", "limit": 6})
    assert server.run("run", job, cwd=here).code == 0
    table = results(here / "out")
    in_order = [*ROWS["id"][5:], *ROWS["id"][:5]]
    kept = [i for i, name in enumerate(in_order) if ROWS["tags"][int(name[1:])]][:6]
    assert table["row"].to_pylist() == kept and table["id"].to_pylist() == [in_order[i] for i in kept]


def test_stop_strings_that_span_tokens(job: Path, here: Path, toy: Path, server: WarmServer) -> None:
    """The answer is cut just before the first match, wherever the token boundaries are; other rows do not change."""
    settings = ("--set", "sampling.max_tokens=40", "--set", "sampling.ignore_eos=true")
    assert server.run("run", job, *settings, cwd=here).code == 0
    texts = [row["generated_text"] for row in answers(here / "out")]
    pairs = [text[i : i + 2] for text in texts for i in range(4, len(text) - 1)]
    pairs = [pair for pair in pairs if pair.isascii() and pair.isprintable() and " " not in pair]
    stop = next(pair for pair in pairs if sum(pair in text for text in texts) < len(texts))
    sampling = {"max_tokens": 40, "ignore_eos": True, "stop": [stop, "never there"]}
    assert server.run("run", write_job(here, sampling=sampling, output={"path": "cut"}), cwd=here).code == 0
    tokenizer = AutoTokenizer.from_pretrained(toy)
    hits = 0
    for whole, row in zip(texts, answers(here / "cut")):
        at = whole.find(stop)
        hits += at >= 0
        assert row["generated_text"] == (whole if at < 0 else whole[:at])
        assert (row["finish_reason"], row["stop_reason"]) == (("length", None) if at < 0 else ("stop", stop))
        assert stop not in tokenizer.decode(row["token_ids"][:-1], skip_special_tokens=True), "it stops at once"
    assert 0 < hits < len(texts)


def test_seeds_follow_the_id_not_the_position(here: Path, server: WarmServer) -> None:
    """n=3 at temperature 1: shuffled rows, other batch sizes and half a file before give each id the same three answers."""
    found = []
    for k, engine in enumerate(({"max_running_requests": 1}, {"max_running_requests": 8, "block_size": 4})):
        order = list(range(12)) if k == 0 else random.Random(3).sample(range(12), 12)
        write_rows(here / f"rows{k}.parquet", {key: [values[i] for i in order] for key, values in ROWS.items()})
        job = write_job(
            here, input={"path": f"rows{k}.parquet", "id_column": "id"}, output={"path": f"out{k}"},
            sampling={"temperature": 1.0, "seed": 7, "n": 3}, engine=engine,
        )  # fmt: skip
        assert server.run("run", job, cwd=here).code == 0
        table = results(here / f"out{k}")
        found.append({(r["id"], r["sample_index"]): r["token_ids"] for r in table.to_pylist()})
    assert found[0] == found[1] and len(found[0]) == 36
    assert all(len({tuple(found[0][name, s]) for s in range(3)}) > 1 for name in ROWS["id"])


def test_the_triton_backend_from_end_to_end(here: Path, server: WarmServer) -> None:
    """Under the interpreter where there is no GPU; float32."""
    write_rows(here / "rows.parquet", {"q": ["a", "ab"]})
    for name, engine in {
        "torch": {"backend": "torch"}, "triton": {"backend": "triton"},
        "invariant": {"backend": "triton", "batch_invariant": True},
    }.items():  # fmt: skip
        job = write_job(
            here, prompt={"text": "the {{ q }}"}, engine=engine | {"dtype": "float32"},
            sampling={"max_tokens": 3}, output={"path": name},
        )  # fmt: skip
        outcome = server.run("run", job, cwd=here)
        assert outcome.code == 0 and f"backend {engine['backend']}" in outcome.stderr
    assert answers(here / "torch") == answers(here / "triton") == answers(here / "invariant")
    refused = server.run("run", job, "--set", "engine.backend=torch", "--set", "output.path=new", cwd=here)
    assert refused.code == 2 and "engine: batch_invariant needs the backend triton" in refused.error


def test_extract_and_accuracy(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", ROWS | {"right": ["x"] * 12})
    extract = {"pattern": ".", "take": "first", "column": "first", "expected": "right"}
    outcome = server.run("run", write_job(here, output={"path": "out", "extract": extract}), cwd=here)
    assert outcome.code == 0 and "accuracy  " in outcome.stderr
    table = results(here / "out")
    assert table.schema.names[-2:] == ["first", "correct"]
    for text, first, correct in zip(*(table[c].to_pylist() for c in ("generated_text", "first", "correct"))):
        assert correct == (first == "x") and (first is None or first in text)


# ---- again and beside ------------------------------------------------------------------------------------------------


def test_a_second_run_does_nothing_and_changes_no_byte(job: Path, here: Path, server: WarmServer) -> None:
    assert server.run("run", job, "--set", "output.commit_rows=3", cwd=here).code == 0
    kept = [here / "out" / name for name in ("parts", "results")]
    before = [files_below(folder) for folder in kept] + [(here / "out/commit.log").read_bytes()]
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 0 and "12 of 12 rows are done" in outcome.stderr and "0 of them in this run" in outcome.stderr
    assert "engine:" not in outcome.stderr, "no model is loaded for nothing"
    assert [files_below(folder) for folder in kept] + [(here / "out/commit.log").read_bytes()] == before


def test_plan_reads_no_weights(job: Path, here: Path, toy: Path, server: WarmServer) -> None:
    """It works with the weights file gone, says what `run` will do, and leaves nothing behind."""
    shutil.copytree(toy, here / "light", ignore=shutil.ignore_patterns("*.safetensors"))
    outcome = server.run("plan", job, "--set", "model.path=light", cwd=here)
    assert outcome.code == 0 and "Traceback" not in outcome.stderr
    assert "rows        12, of which 0 would fail" in outcome.stdout and "prompt      of row 0" in outcome.stdout
    assert not (here / "out").exists()
    ran = server.run("run", job, cwd=here)
    summary = json.loads((here / "out/summary.json").read_text())
    assert ran.code == 0 and f"({summary['tokens']['computed']:,} to compute)" in outcome.stdout
    assert summary["tokens"]["saved_predicted"] == summary["tokens"]["saved_achieved"] > 0
    outcome = server.run("run", job, "--set", "model.path=light", "--set", "output.path=other", cwd=here)
    assert outcome.code == 2 and "no .safetensors file" in outcome.error


def test_equal_prompts_are_computed_once_where_the_likeliest_token_is_taken(here: Path, server: WarmServer) -> None:
    """Every row has its answer, and both samples; what is computed is that of the distinct prompts alone."""
    texts = [f"what is {i % 3}" for i in range(7)]
    computed = {}
    for name, questions in {"all": texts, "distinct": texts[:3]}.items():
        write_rows(here / f"{name}.parquet", {"q": questions})
        job = write_job(
            here, input={"path": f"{name}.parquet"}, prompt={"text": "{{ q }}"}, output={"path": name}, sampling={"n": 2},
        )  # fmt: skip
        outcome = server.run("run", job, cwd=here)
        assert outcome.code == 0, outcome.stderr
        summary = json.loads((here / name / "summary.json").read_text())
        assert summary["tokens"]["saved_predicted"] == summary["tokens"]["saved_achieved"]
        computed[name] = summary["tokens"]["computed"]
    assert computed["all"] == computed["distinct"]
    assert json.loads((here / "all/summary.json").read_text())["rows"]["repeated"] == 14 - 3
    rows = results(here / "all").to_pylist()
    assert [(r["row"], r["sample_index"]) for r in rows] == [(i, s) for i in range(7) for s in range(2)]
    for r in rows:
        first = rows[2 * (r["row"] % 3)]
        assert r["token_ids"] == first["token_ids"] and r["generated_text"] == first["generated_text"]
    for r in parts(here / "all").to_pylist():
        own = r["row"] < 3 and r["sample_index"] == 0
        assert own or r["num_cached_tokens"] == r["num_prompt_tokens"]
    sampled = write_job(
        here, input={"path": "all.parquet"}, prompt={"text": "{{ q }}"}, output={"path": "sampled"},
        sampling={"temperature": 1.0, "seed": 1},
    )  # fmt: skip
    assert server.run("run", sampled, cwd=here).code == 0
    rows = results(here / "sampled").to_pylist()
    assert len({tuple(r["token_ids"]) for r in rows}) > 3, "each draw is its row's own"


def test_the_summary_states_the_limit_of_the_work_done(job: Path, here: Path, toy: Path, server: WarmServer) -> None:
    """FLOPs of each answer by hand, from what its row says was computed, against those of the summary."""
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 0 and "GB/s measured here" in outcome.stderr
    limits = json.loads((here / "out/summary.json").read_text())["limits"]
    config = load_config(resolve_model(str(toy)))
    layers, both = num_matmul_parameters(config, lm_head=False), num_matmul_parameters(config)

    def flops(prompt: int, cached: int, output: int) -> int:
        """The answer's last token is never an input."""
        seen = sum(range(cached + 1, prompt + output))
        linear = 2 * layers * (prompt + output - 1 - cached) + 2 * (both - layers) * output
        return linear + 4 * config.num_layers * config.num_heads * config.head_dim * seen

    counts = parts(here / "out").select(["num_prompt_tokens", "num_cached_tokens", "num_output_tokens"]).to_pylist()
    rows = [tuple(row.values()) for row in counts]
    assert any(cached for _, cached, _ in rows)
    expected = sum(flops(*row) for row in rows)
    assert limits["compute_seconds"] * limits["device_gflops"] * 1e9 == pytest.approx(expected, rel=1e-9)
    unshared = sum(flops(prompt, 0, output) for prompt, _, output in rows)
    assert limits["unshared_limit_seconds"] * limits["device_gflops"] * 1e9 > unshared  # its reads come on top
    assert limits["overlapped_limit_seconds"] < limits["sequential_limit_seconds"] < limits["unshared_limit_seconds"]


def test_status_show_and_merge(job: Path, here: Path, server: WarmServer) -> None:
    """Of a run that is whole, of one without its results, and of a folder that is none."""
    assert server.run("run", job, cwd=here).code == 0
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_answers"], status["num_failed"]) == (12, 12, 0)
    assert status["is_finished"] is True and status["locked_by"] is None
    shown = server.run("show", "out", "-n", "2", cwd=here)
    assert shown.code == 0 and "12 rows" in shown.stdout and shown.stdout.count("generated_text") == 2
    before = files_below(here / "out/results")
    shutil.rmtree(here / "out/results")
    unmerged = server.run("show", "out", cwd=here)
    assert unmerged.code == 2 and "no results yet" in unmerged.error
    assert json.loads(server.run("status", "out", "--json", cwd=here).stdout)["is_finished"] is False
    merged = server.run("merge", "out", cwd=here)
    assert merged.code == 0 and "12 answers in" in merged.stdout and files_below(here / "out/results") == before
    (here / "mine").mkdir()
    for command in ("status", "show", "merge"):
        outcome = server.run(command, "mine", cwd=here)
        assert outcome.code == 2 and "not a run folder" in outcome.error
    assert list((here / "mine").iterdir()) == []


def test_merge_of_an_unfinished_run_says_what_is_missing(job: Path, here: Path, server: WarmServer) -> None:
    assert server.run("run", job, "--set", "output.commit_rows=4", cwd=here).code == 0
    log = here / "out/commit.log"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    outcome = server.run("merge", "out", cwd=here)
    assert outcome.code == 1 and "no answer to 4 (row, sample)" in outcome.error
    (here / "out/tokens.arrow").unlink()
    outcome = server.run("merge", "out", cwd=here)
    assert outcome.code == 1 and "unexpected" not in outcome.error and "run the same job file again" in outcome.error
    assert server.run("run", job, cwd=here).code == 0
    assert results(here / "out")["status"].to_pylist() == ["ok"] * 12


def test_version_schema_help_and_debug_of_a_cold_program(here: Path) -> None:
    assert run_cold("--version", cwd=here).stdout == f"batchgen {__version__}\n"
    schema = run_cold("schema", cwd=here)
    assert schema.code == 0 and "sampling" in json.loads(schema.stdout)["properties"]
    write_job(here, engine={"block_sise": 4})
    plain, debug = run_cold("run", "job.yaml", cwd=here), run_cold("--debug", "run", "job.yaml", cwd=here)
    assert plain.code == debug.code == 2, "how much is told does not change what it was"
    assert plain.error and "Traceback" in debug.stderr and "JobFileError" in debug.stderr


# ---- signals, and two at once ------------------------------------------------------------------------------------------

LONG = {"q": [f"number {i} of the long ones" for i in range(40)]}


@pytest.fixture
def long_job(here: Path) -> Path:
    """Half a thousand steps in which rows end all the time."""
    write_rows(here / "rows.parquet", LONG)
    return write_job(
        here,
        sampling={"max_tokens": 60, "ignore_eos": True},
        engine={"max_running_requests": 4},
        output={"path": "out", "commit_rows": 5},
    )


def test_a_second_process_is_refused_while_one_works(long_job: Path, here: Path, server: WarmServer) -> None:
    first = server.start("run", long_job, cwd=here)
    assert first.wait_until((here / "out/commit.log").exists)
    first.send(signal.SIGSTOP)  # it stays in the middle of its work
    second = server.run("run", long_job, cwd=here)
    assert second.code == 2 and f"in use by process {first.pid}" in second.error
    status = server.run("status", "out", cwd=here).stdout
    assert f"at work: process {first.pid}" in status and "not finished" in status
    first.send(signal.SIGCONT)
    assert first.wait().code == 0, "and the first does not notice"
    assert "nobody works on it" in server.run("status", "out", cwd=here).stdout


def timed_run(server: WarmServer, *args: str | Path, cwd: Path) -> float:
    """Seconds that an uninterrupted run takes on this machine, so that moments can be told as shares of it."""
    began = time.monotonic()
    assert server.run("run", *args, cwd=cwd).code == 0
    return time.monotonic() - began


def stop_at(process: Process, seconds: float, number: signal.Signals, twice: bool) -> int:
    """Its exit code; the clock begins where a program can catch signals."""
    if process.wait_until(lambda: catches_signals(process.pid)):
        time.sleep(seconds)
        process.send(number)
        if twice:
            time.sleep(0.01)
            process.send(number)
    outcome = process.wait()
    if outcome.code == 75:
        assert f"stopped by {number.name}" in outcome.error
    return outcome.code


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_at_any_moment_ends_with_75_and_the_next_run_finishes(
    number: signal.Signals, twice: bool, long_job: Path, here: Path, server: WarmServer
) -> None:
    """Opening, tokenizing, loading, running, merging: what has finished is safe, and nothing is answered twice."""
    one_run = timed_run(server, long_job, "--set", "output.path=whole", cwd=here)
    shares = [0.0, *sorted(np.random.default_rng(number * 2 + twice).uniform(0.0, 1.0, 4))]  # the first cannot come late
    codes = [stop_at(server.start("run", long_job, cwd=here), float(s) * one_run, number, twice) for s in shares]
    assert set(codes) <= {75, 0} and codes[0] == 75, codes
    assert server.run("run", long_job, cwd=here).code == 0
    assert answers(here / "out") == answers(here / "whole")


def test_rows_that_had_ended_are_committed_by_the_signal(long_job: Path, here: Path, server: WarmServer) -> None:
    """Also with a commit interval that would not have come for long; the next run does only the rest."""
    never = ("--set", "output.commit_rows=1000", "--set", "output.commit_seconds=1000")
    one_run = timed_run(server, long_job, "--set", "output.path=whole", cwd=here)
    for attempt, share in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6) * 3):  # until it is in the middle
        out = here / f"after-{attempt}"
        process = server.start("run", long_job, *never, "--set", f"output.path={out.name}", cwd=here)
        assert process.wait_until(lambda process=process: "engine:" in process.stderr.read_text())
        time.sleep(share * one_run)
        process.send(signal.SIGTERM)
        process.wait()
        status = json.loads(server.run("status", out.name, "--json", cwd=here).stdout)
        if 0 < status["num_committed"] < 40:
            break
    else:
        pytest.fail("never stopped in the middle")
    assert status["num_parts"] == 1
    outcome = server.run("run", long_job, "--set", f"output.path={out.name}", cwd=here)
    assert outcome.code == 0 and f"{40 - status['num_committed']} of them in this run" in outcome.stderr
    assert answers(out) == answers(here / "whole")


def test_a_signal_while_a_cold_program_still_imports(long_job: Path, here: Path) -> None:
    """The seconds before the first own line of work are a part of the job too. It is sent while torch is being loaded."""
    process = start_cold("run", long_job, cwd=here)
    maps = Path(f"/proc/{process.pid}/maps")
    assert process.wait_until(lambda: "libtorch" in maps.read_text())
    process.send(signal.SIGTERM)
    outcome = process.wait()
    assert outcome.code == 75 and "stopped by SIGTERM" in outcome.error
    assert not (here / "out").exists()
