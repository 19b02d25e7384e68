"""`batchgen status` of a job that several tasks share: what each of them does, and which to run again."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import WarmServer, write_job, write_rows

from batchgen.data.commit_log import CommitLog

NUM_ROWS = 60


@pytest.fixture
def job(here: Path, server: WarmServer) -> Path:
    write_rows(here / "rows.parquet", {"id": list(range(NUM_ROWS)), "q": [f"what is {i * i % 53}" for i in range(NUM_ROWS)]})
    job = write_job(
        here,
        input={"id_column": "id"},
        engine={"max_running_requests": 2},
        output={"path": "out", "commit_rows": 2},
    )
    assert server.run("prepare", job, "--tasks", "3", cwd=here).code == 0
    return job


def status(server: WarmServer, here: Path) -> tuple[str, dict[str, Any]]:
    shown, facts = server.run("status", "out", cwd=here), server.run("status", "out", "--json", cwd=here)
    assert shown.code == 0 and facts.code == 0, (shown, facts)
    return shown.stdout, json.loads(facts.stdout)


def stop_in_its_middle(server: WarmServer, job: Path, task: int, number: signal.Signals) -> Path:
    process = server.start("run", job, "--shard", f"{task}/3", cwd=job.parent)
    worker = job.parent / f"out/workers/{task:04d}.0"
    about = worker / "worker.json"
    assert process.wait_until(lambda: about.exists() and json.loads(about.read_bytes())["num_answered"] > 0)
    process.send(number)
    process.wait()
    return worker


def test_each_task_is_told(here: Path, server: WarmServer, job: Path) -> None:
    shown, facts = status(server, here)
    assert f"0 of {NUM_ROWS} answers" in shown and [task["state"] for task in facts["tasks"]] == ["waiting"] * 3
    assert facts["run_again"] is None and facts["eta_seconds"] is None

    killed = stop_in_its_middle(server, job, 0, signal.SIGKILL)
    stop_in_its_middle(server, job, 1, signal.SIGTERM)
    shown, facts = status(server, here)
    assert [task["state"] for task in facts["tasks"]] == ["running", "interrupted", "waiting"], "its beat is fresh"
    committed = sum(part.num_rows for log in here.glob("out/workers/*/commit.log") for part in CommitLog(log).read())
    assert facts["num_committed"] == committed == sum(task["num_answered"] for task in facts["tasks"])
    assert facts["tokens_per_second"] == facts["tasks"][0]["tokens_per_second"] > 0
    rate = facts["tasks"][0]["answers_per_second"]
    assert facts["eta_seconds"] == pytest.approx((NUM_ROWS - committed) / rate)
    assert facts["run_again"] == f"batchgen run {job} --shard 1/3" and " left\n" in shown

    old = time.time() - 200
    os.utime(here / "out/beats" / killed.name, (old, old))
    shown, facts = status(server, here)
    assert facts["tasks"][0]["state"] == "silent" and "no sign of life for 0:03:2" in shown
    assert facts["run_again"] == f"for i in 0 1; do batchgen run {job} --shard $i/3; done" and facts["eta_seconds"] is None
    script = here / "out/submit/answer.sh"
    script.parent.mkdir()
    script.touch()
    shown, facts = status(server, here)
    assert facts["run_again"] == f"sbatch --array=0,1 {script}" and f": sbatch --array=0,1 {script}\n" in shown

    assert server.run("run", job, "--shard", "0/3", cwd=here).code == 0
    assert server.run("run", job, "--shard", "1/3", cwd=here).code == 0
    shown, facts = status(server, here)
    assert "not merged yet: batchgen merge out" in shown and facts["num_committed"] == NUM_ROWS
    assert facts["tasks"][0] | {"state": "finished", "num_attempts": 2, "silent_seconds": None} == facts["tasks"][0]
    assert server.run("merge", "out", cwd=here).code == 0
    shown, facts = status(server, here)
    assert facts["is_finished"] and facts["num_committed"] == NUM_ROWS, "adopted parts count once"
    assert facts["run_again"] is None and f"{NUM_ROWS} of {NUM_ROWS} answers" in shown and "finished: out/results" in shown


def test_a_task_that_failed_says_why(here: Path, server: WarmServer, job: Path) -> None:
    (here / "out/products.json").mkdir()  # what the engine reads when it loads
    assert server.run("run", job, "--shard", "2/3", cwd=here).code == 1
    shown, facts = status(server, here)
    assert facts["tasks"][2]["state"] == "failed" and "products.json" in facts["tasks"][2]["message"] in shown
    assert facts["run_again"] == f"batchgen run {job} --shard 2/3"
