"""Jobs larger than a head: the engine begins before the last row is read, window follows window, and faults surface."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from commands import results, write_job, write_rows

from batchgen import prompts, runner
from batchgen.data.commit_log import CommitLog
from batchgen.data.status import read_status
from batchgen.errors import InputError, Interrupted
from batchgen.job import Job, load_job
from batchgen.plan import partition
from batchgen.planner import plan_job
from batchgen.records import Prompt
from batchgen.text import token_store

NUM_ROWS, HEAD_ROWS = 1100, 20
READ_FIRST = 1024  # rows that the tokenizer takes at once
SECONDS = 60.0


@pytest.fixture
def job(here: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    write_rows(here / "rows.parquet", {"q": [f"{'tell me of' if i % 3 else 'what is'} {i * i}" for i in range(NUM_ROWS)]})
    path = write_job(
        here,
        prompt={"text": "{{ q }}"},
        sampling={"max_tokens": 1, "ignore_eos": True},
        output={"commit_rows": 10},
        engine={"max_running_requests": 64, "kv_memory": "4MiB"},
    )
    monkeypatch.chdir(here)
    return load_job(path, [])


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "HEAD_ROWS", HEAD_ROWS)
    monkeypatch.setattr(partition, "WINDOW_ROWS", 400)


def answers(out: Path) -> list[dict[str, Any]]:
    return results(out).select(["row", "status", "token_ids"]).to_pylist()


def committed(out: Path) -> list[int]:
    parts = CommitLog(out / "commit.log").read()
    return [row for part in parts for row in pq.read_table(out / "parts" / part.name)["row"].to_pylist()]


def read_until(monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    """The reader calls wait() before the row that comes after READ_FIRST."""
    read = prompts.read_prompts

    def held(inputs: Any) -> Iterator[Prompt]:
        for i, prompt in enumerate(read(inputs)):
            if i == READ_FIRST:
                wait()
            yield prompt

    monkeypatch.setattr(prompts, "read_prompts", held)


def all_of_head_committed(out: Path) -> bool:
    return (out / "commit.log").exists() and len(committed(out)) >= HEAD_ROWS


def wait_for(condition: Any) -> None:
    tick = threading.Event()
    for _ in range(int(SECONDS / 0.02)):
        if condition():
            return
        tick.wait(0.02)
    raise InputError("what the reader waits for does not come")


def test_the_engine_begins_before_the_last_row_is_read(
    job: Job, here: Path, small_heads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = here / "out"
    seen: list[int | None] = []

    def wait() -> None:
        wait_for(lambda: all_of_head_committed(out))
        seen.append(read_status(out).num_answers)

    read_until(monkeypatch, wait)
    assert runner.run_job(job) == 0
    assert seen == [None], "how many rows there are is not known before they are read"
    assert committed(out)[:HEAD_ROWS] != list(range(HEAD_ROWS)) and set(committed(out)[:HEAD_ROWS]) == set(range(HEAD_ROWS))
    assert sorted(committed(out)) == list(range(NUM_ROWS)) and read_status(out).num_answers == NUM_ROWS
    assert len(list((out / "tokens").glob("part-*.arrow"))) > 2 and not (out / "tokens.tmp").exists()
    monkeypatch.undo()  # one window
    monkeypatch.chdir(here)
    whole = job.model_copy(update={"output": job.output.model_copy(update={"path": str(here / "whole")})})
    assert runner.run_job(whole) == 0
    assert (here / "whole/tokens.arrow").exists()
    assert answers(out) == answers(here / "whole")


def test_a_fault_while_reading_comes_after_what_is_finished_and_the_run_goes_on(
    job: Job, here: Path, small_heads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = here / "out"
    with monkeypatch.context() as broken:

        def fail() -> None:
            wait_for(lambda: all_of_head_committed(out))
            raise InputError("rows.parquet: the disk is gone")

        read_until(broken, fail)
        with pytest.raises(InputError, match="the disk is gone"):
            runner.run_job(job)
    assert set(committed(out)) == set(range(HEAD_ROWS)) and read_status(out).num_answers is None
    assert not list(out.glob("tokens*"))
    assert runner.run_job(job) == 0
    assert sorted(committed(out)) == list(range(NUM_ROWS)), "the head is not answered twice"


def test_a_signal_ends_reader_and_engine(job: Job, here: Path, small_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    out = here / "out"
    with monkeypatch.context() as slow:

        def interrupt() -> None:
            wait_for(lambda: len(committed(out)) >= 10 if (out / "commit.log").exists() else False)
            os.kill(os.getpid(), signal.SIGTERM)

        read_until(slow, interrupt)
        with pytest.raises(Interrupted):
            runner.run_job(job)
    assert set(committed(out)) <= set(range(NUM_ROWS)) and len(committed(out)) >= 10
    assert not [thread for thread in threading.enumerate() if thread.name == "tokenize"]
    assert not list(out.glob("tokens*.tmp"))
    assert runner.run_job(job) == 0
    assert sorted(committed(out)) == list(range(NUM_ROWS))


def test_plan_sums_over_windows_and_counts_every_duplicate(
    job: Job, here: Path, small_heads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates of rows in the head, too; and what the plan says will be computed is what the run computes."""
    texts = [f"{i % 700} is a number" for i in range(NUM_ROWS)] + [f"{i} is a number" for i in range(10)] + [None]
    write_rows(here / "rows.parquet", {"q": texts})
    shown = "\n".join(plan_job(job))
    assert f"; {NUM_ROWS - 700 + 10:,} rows repeat" in shown and f"rows        {NUM_ROWS + 11:,}, of which 1 would" in shown
    assert "windows     4" in shown or "windows     5" in shown
    runner.run_job(job)
    computed = json.loads((here / "out/summary.json").read_text())["tokens"]["computed"]
    assert f"({computed:,} to compute)" in shown
