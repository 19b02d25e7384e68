"""A model that raises or hangs under `batchgen run`: what the user finds, on the screen and in the results."""

from __future__ import annotations

import json
from pathlib import Path

from commands import WarmServer, results, write_job, write_rows

ANSWER = ["q", "generated_text", "finish_reason", "token_ids", "error_code"]


def test_a_row_whose_computation_raises_is_an_error_row(here: Path, server: WarmServer) -> None:
    """`~` is in one question, and in no answer."""
    write_rows(here / "rows.parquet", {"q": [f"say {i}" + "~" * (i == 4) for i in range(9)]})
    job = write_job(here, output={"path": "out", "commit_rows": 2})
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    whole = results(here / "whole").select(ANSWER).to_pylist()
    assert not any(ord("~") - ord("!") in row["token_ids"] for row in whole), "choose another character"

    faults = {"module": "broken_model", "token": ord("~") - ord("!")}  # ids of the toy's tokens: the bytes from ! on
    outcome = server.run("run", job, cwd=here, faults=faults)
    assert outcome.code == 3 and "looking for the one that does" in outcome.stderr, outcome
    assert "errors    engine_error: 1" in outcome.stdout + outcome.stderr
    rows = results(here / "out").to_pylist()
    assert rows[4]["error_message"] == "computing this row alone raises ValueError: broken"
    found = [{name: row[name] for name in ANSWER} for row in rows]
    assert found[4]["error_code"] == "engine_error" and found[:4] + found[5:] == whole[:4] + whole[5:]
    assert json.loads((here / "out/summary.json").read_text())["failed_steps"] > 1

    mended = server.run("run", job, "--only", "failed", cwd=here)
    assert mended.code == 0 and results(here / "out").select(ANSWER).to_pylist() == whole


def test_a_model_that_breaks_ends_the_job_and_no_finished_row_is_lost(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", {"q": [f"say {i}" for i in range(9)]})
    job = write_job(here, sampling={"ignore_eos": True}, engine={"max_running_requests": 3})
    outcome = server.run("run", job, cwd=here, faults={"module": "broken_model", "after_steps": 12})
    assert outcome.code == 1 and "the engine fails whatever it computes" in outcome.error, outcome
    assert "ValueError: broken" in outcome.error and "run the same command again" in outcome.error
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_failed"]) == (3, 0)
    again = server.run("run", job, cwd=here)
    assert again.code == 0 and "3 of 9 rows are done" in again.stderr


def test_a_step_that_hangs_ends_the_process_and_costs_nothing(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", {"q": [f"say {i}" for i in range(9)]})
    job = write_job(here, sampling={"ignore_eos": True}, engine={"max_running_requests": 3, "step_timeout": 5.0})
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    faults = {"module": "broken_model", "after_steps": 12, "hangs": True}
    outcome = server.run("run", job, cwd=here, faults=faults)
    assert outcome.code == 75 and "a step has not ended for 5 seconds (engine.step_timeout)" in outcome.error, outcome
    assert "broken_model.py" in (here / "out/hang.txt").read_text()
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_failed"], status["locked_by"]) == (3, 0, None)
    again = server.run("run", job, cwd=here)
    assert again.code == 0 and "3 of 9 rows are done" in again.stderr and "3 unfinished answers of" in again.stderr
    assert results(here / "out").select(ANSWER).equals(results(here / "whole").select(ANSWER))
