"""A run folder meets another input, or is to do a part again: what is answered stays, and only what is owed is computed."""

from __future__ import annotations

import json
from pathlib import Path

from commands import WarmServer, results, write_job, write_rows

ANSWER = ["q", "row", "status", "error_code", "generated_text", "finish_reason", "token_ids"]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2}
ASKED = {f"r{i:02d}": f"{'tell me of the' if i % 3 else 'what is'} {i * i}" for i in range(12)} | {"r04": "x" * 9000}


def write_asked(path: Path, asked: dict[str, str], ids: bool = True) -> None:
    write_rows(path, {"id": list(asked), "q": list(asked.values())} if ids else {"q": list(asked.values())})


def answers(folder: Path) -> list[dict]:
    return results(folder).select(ANSWER).to_pylist()


def answered_now(folder: Path) -> int:
    return json.loads((folder / "summary.json").read_text())["rows"]["answered_now"]


def test_with_ids_the_input_may_change_in_any_way(here: Path, server: WarmServer) -> None:
    """Two files become one of another name, rows are shuffled, added, removed; one asks something else under its id."""
    for name, part in (("b", slice(0, 5)), ("a", slice(5, 12))):
        write_asked(here / f"in/{name}.parquet", dict(list(ASKED.items())[part]))
    job = write_job(
        here, input={"path": "in", "id_column": "id"}, sampling=SAMPLING, output={"path": "out", "commit_rows": 5}
    )
    assert server.run("run", job, cwd=here).code == 3, "r04 is too long"
    before = {(row["id"], row["sample_index"]): row for row in results(here / "out").to_pylist()}

    for path in (here / "in").iterdir():
        path.unlink()
    now = dict(sorted(ASKED.items(), key=lambda pair: pair[1][::-1])) | {"r07": "something else", "new": "say 1"}
    del now["r01"], now["r02"]
    write_asked(here / "in/all.parquet", now)
    merged = server.run("merge", "out", cwd=here)
    assert merged.code == 2 and "the input has changed since it was answered" in merged.stderr
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3 and "9 of 11 rows are done; the input has changed since" in outcome.stderr, outcome
    assert answered_now(here / "out") == 2 * 2
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_answers"], status["num_failed"]) == (22, 22, 2)
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 3
    assert answers(here / "out") == answers(here / "whole")
    for row in results(here / "out").to_pylist():
        if row["id"] not in ("r07", "new"):
            assert row | {"row": None} == before[row["id"], row["sample_index"]] | {"row": None}, "not computed again"
    assert server.run("merge", "out", cwd=here).code == 0


def test_without_ids_files_may_be_added_and_none_may_change(here: Path, server: WarmServer) -> None:
    rows = list(ASKED.items())
    write_asked(here / "in/b.parquet", dict(rows[:4]), ids=False)
    write_asked(here / "in/d.parquet", dict(rows[5:8]), ids=False)
    job = write_job(here, input={"path": "in"}, sampling=SAMPLING)
    assert server.run("run", job, cwd=here).code == 0
    write_asked(here / "in/c.parquet", dict(rows[8:]), ids=False)  # in the middle: the rows of d move
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 0 and "7 of 11 rows are done; the input has changed since" in outcome.stderr
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    assert answers(here / "out") == answers(here / "whole") and answered_now(here / "out") == 4 * 2

    write_asked(here / "in/b.parquet", dict(rows[:3]), ids=False)
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 2 and "input file b.parquet: was" in outcome.stderr and "input.id_column" in outcome.stderr


# ---- begin anew --------------------------------------------------------------------------------------------------------


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_restart_moves_the_old_run_aside_and_deletes_nothing(here: Path, server: WarmServer) -> None:
    write_asked(here / "rows.parquet", ASKED)
    job = write_job(here, sampling=SAMPLING)
    assert server.run("run", job, "--restart", cwd=here).code == 3, "there is nothing to move, which is fine"
    for number in (1, 2):
        before = files_below(here / "out")
        refused = server.run("run", job, "--set", f"sampling.seed={number}", cwd=here)
        assert refused.code == 2 and "--restart" in refused.stderr
        broken = server.run("run", job, "--restart", "--set", "prompt.user={{ no_column }}", cwd=here)
        assert broken.code == 2 and files_below(here / "out").keys() == before.keys(), (
            "a job that cannot start moves nothing"
        )
        outcome = server.run("run", job, "--restart", "--set", f"sampling.seed={number}", cwd=here)
        assert outcome.code == 3 and f"out.{number}" in outcome.stderr and answered_now(here / "out") == 24
        kept = files_below(here / f"out.{number}")
        assert kept.pop("LOCK") and before.pop("LOCK") and kept == before


# ---- a part of it once more --------------------------------------------------------------------------------------------


def rows_by_id(folder: Path) -> dict[tuple[str, int], dict]:
    return {(row["id"], row["sample_index"]): row for row in results(folder).to_pylist()}


def test_only_truncated_with_a_longer_limit(here: Path, server: WarmServer) -> None:
    """Killed in its middle, and gone on with by the same command; then the job itself once more, which owes nothing."""
    write_asked(here / "rows.parquet", ASKED)
    job = write_job(here, input={"id_column": "id"}, sampling=SAMPLING, output={"path": "out", "commit_rows": 4})
    longer = ("--set", "sampling.max_tokens=12")
    early = server.run("run", job, "--only", "truncated", *longer, cwd=here)
    assert early.code == 2 and "not a run folder" in early.error
    assert server.run("run", job, cwd=here).code == 3
    assert server.run("run", job, *longer, "--set", "output.path=whole", cwd=here).code == 3
    before, whole = rows_by_id(here / "out"), rows_by_id(here / "whole")
    cut = {name for (name, _), row in before.items() if row["finish_reason"] == "length"}
    assert 4 < len(cut) < 12

    faults = {"folder": str(here / "out"), "at": "commit.log fsync 1 after"}
    assert server.run("run", job, "--only", "truncated", *longer, cwd=here, faults=faults).code < 0
    outcome = server.run("run", job, "--only", "truncated", *longer, cwd=here)
    assert outcome.code == 3 and f"answering {len(cut) - 2} rows once more" in outcome.stderr, outcome
    expected = before | {key: row for key, row in whole.items() if key[0] in cut}
    assert rows_by_id(here / "out") == expected
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_answers"], status["num_failed"]) == (24, 24, 2)
    (rerun,) = json.loads((here / "out/job.json").read_text())["history"]
    assert rerun["only"] == "truncated" and rerun["settings"] == {"sampling.max_tokens": 12} and rerun["finished"]

    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3 and "12 of 12 rows are done" in outcome.stderr and rows_by_id(here / "out") == expected
    assert server.run("merge", "out", cwd=here).code == 0 and rows_by_id(here / "out") == expected


def test_only_failed_with_more_memory(here: Path, server: WarmServer) -> None:
    asked = {f"r{i}": "long " * 60 if i in (2, 5) else f"say {i}" for i in range(8)} | {"r7": "x" * 9000}
    write_asked(here / "rows.parquet", asked)
    job = write_job(here, engine={"kv_memory": 32 * 1024})
    assert server.run("run", job, cwd=here).code == 3
    codes = {name: row["error_code"] for (name, _), row in rows_by_id(here / "out").items() if row["error_code"]}
    assert codes == {"r2": "kv_memory_too_small", "r5": "kv_memory_too_small", "r7": "prompt_too_long"}
    outcome = server.run("run", job, "--only", "failed", "--set", "engine.kv_memory=auto", cwd=here)
    assert outcome.code == 3 and "answering 2 rows once more; 1 have no prompt" in outcome.stderr, outcome
    assert answered_now(here / "out") == 2
    assert server.run("run", job, "--set", "engine.kv_memory=auto", "--set", "output.path=whole", cwd=here).code == 3
    assert rows_by_id(here / "out") == rows_by_id(here / "whole")


def test_only_the_rows_of_a_file(here: Path, server: WarmServer) -> None:
    asked = {f"r{i}": f"say {i}" for i in range(8)}
    write_asked(here / "rows.parquet", asked)
    other = ("--set", "sampling.seed=9")
    for column, lines, wrong in (("id", "r3\n\nr6\n", "r9"), (None, "3\n6", "r3")):
        out = f"out-{column}"
        job = write_job(here, input={"id_column": column}, sampling=SAMPLING, output={"path": out})
        assert server.run("run", job, cwd=here).code == 0
        assert server.run("run", job, *other, "--set", f"output.path={out}-9", cwd=here).code == 0
        before, whole = rows_by_id(here / out), rows_by_id(here / f"{out}-9")
        (here / "keys").write_text(lines)
        outcome = server.run("run", job, "--only", "keys", *other, cwd=here)
        assert outcome.code == 0 and answered_now(here / out) == 4, outcome
        assert rows_by_id(here / out) == before | {key: row for key, row in whole.items() if key[0] in ("r3", "r6")}
        (here / "keys").write_text(f"{lines}\n{wrong}")
        refused = server.run("run", job, "--only", "keys", *other, cwd=here)
        assert refused.code == 2 and "1 of 3 lines are no" in refused.error and wrong in refused.error


def test_bad_ways_to_ask_for_a_part(here: Path, server: WarmServer) -> None:
    write_asked(here / "rows.parquet", ASKED)
    job = write_job(here, sampling=SAMPLING, output={"path": "out", "commit_rows": 4})
    faults = {"folder": str(here / "out"), "at": "commit.log fsync 2 after"}
    assert server.run("run", job, cwd=here, faults=faults).code < 0
    (here / "none").write_text("\n")
    (here / "bytes").write_bytes(b"\xff")
    for settings, said in (
        (["--only", "failed"], "rows have no answer yet; run the job without --only first"),
        (["--only", "failed", "--restart"], "give one of them"),
        (["--only", "nothing"], "write failed, truncated, or a file with one id a line: No such file"),
        (["--only", "none"], "the file names no row"),
        (["--only", "bytes"], "one id a line: 'utf-8'"),
    ):
        outcome = server.run("run", job, *settings, cwd=here)
        assert outcome.code == 2 and said in outcome.error, settings
    for setting in ("sampling.n=3", "prompt.user='{{ id }}'", "input.limit=3"):
        outcome = server.run("run", job, "--only", "failed", "--set", setting, cwd=here)
        assert outcome.code == 2 and "may change sampling (but not n) and engine" in outcome.stderr, setting


# ---- too many rows that fail -------------------------------------------------------------------------------------------


def budget_job(here: Path, long: str, **engine: int) -> Path:
    """Ten rows, of which the last three fail."""
    write_asked(here / "rows.parquet", {f"r{i}": long if i > 6 else f"say {i}" for i in range(10)})
    return write_job(here, engine={"max_running_requests": 2, **engine}, output={"path": "out", "commit_rows": 100})


def test_the_error_budget_counts_rows_that_fail_before_the_engine(here: Path, server: WarmServer) -> None:
    job = budget_job(here, "x" * 9000)
    for limit in ("2", "29%"):
        outcome = server.run("run", job, "--set", f"output.max_failed_rows={limit}", cwd=here)
        assert outcome.code == 4 and "engine:" not in outcome.stderr, outcome
        assert "3 rows have failed, and output.max_failed_rows allows 2" in outcome.error
    assert "prompt_too_long: 3; row 7:" in server.run(
        "run", job, "--restart", "--set", "output.max_failed_rows=2", cwd=here
    ).error  # fmt: skip
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_failed"], status["is_finished"]) == (3, 3, False)
    outcome = server.run("run", job, "--set", "output.max_failed_rows=30%", cwd=here)
    assert outcome.code == 3 and "3 of 10 rows are done" in outcome.stderr and answered_now(here / "out") == 7


def test_the_error_budget_counts_rows_that_fail_in_the_engine(here: Path, server: WarmServer) -> None:
    """What had finished is committed, also where no commit was due."""
    job = budget_job(here, "long " * 60, kv_memory=32 * 1024)
    limit = ("--set", "output.max_failed_rows=2")
    stopped = server.run("run", job, *limit, cwd=here)
    assert stopped.code == 4 and "kv_memory_too_small: 3; row 7:" in stopped.error, stopped
    again = server.run("run", job, *limit, cwd=here)
    assert again.code == 4 and "3 rows have failed" in again.error and "engine:" not in again.stderr
    assert server.run("run", job, cwd=here).code == 3
    more_memory = ("--only", "failed", "--set", "engine.kv_memory=auto")
    outcome = server.run("run", job, *limit, *more_memory, cwd=here)
    assert outcome.code == 0 and answered_now(here / "out") == 3, "rows that are computed again have not failed yet"
    assert results(here / "out")["status"].to_pylist() == ["ok"] * 10
