"""One job, several workers: prepare, run --shard, merge. The results are the bytes of a run by one process."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import WarmServer, write_job, write_rows

from batchgen.data.commit_log import CommitLog

NUM_ROWS = 160
SOON = {"BATCHGEN_PATIENCE": "2"}  # seconds until a worker is taken for dead
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2}


@pytest.fixture
def job(here: Path) -> Path:
    """Prompts with shared beginnings, repeats, and one that is too long."""
    asked = [f"{('tell me of the', 'what is', 'a long story about')[i % 3]} {i * i % 130}" for i in range(NUM_ROWS)]
    asked[77] = "x" * 9000
    write_rows(here / "rows.parquet", {"id": list(range(NUM_ROWS)), "q": asked})
    return write_job(
        here,
        input={"id_column": "id"},
        sampling=SAMPLING,
        engine={"max_running_requests": 6},
        output={"path": "out", "commit_rows": 8},
    )


def images(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "results").iterdir())]


def workers(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("workers/*/worker.json"))}


def owners(folder: Path) -> Counter[tuple[int, int]]:
    """(row, sample) -> how often the run's own commit log has it."""
    return Counter(
        (row["row"], row["sample_index"])
        for part in CommitLog(folder / "commit.log").read()
        for row in pq.read_table(folder / "parts" / part.name, columns=["row", "sample_index"]).to_pylist()
    )


def test_three_shards_one_killed_give_the_bytes_of_one_run(here: Path, server: WarmServer, job: Path) -> None:
    whole = server.run("run", job, "--set", "output.path=whole", cwd=here)
    assert whole.code == 3, whole
    expected, out = images(here / "whole"), here / "out"

    prepared = server.run("prepare", job, "--tasks", "3", cwd=here)
    assert prepared.code == 0 and "160 rows, 160 without an answer, in 10 of 10 units" in prepared.stdout, prepared
    before = (out / "plan/units.arrow").read_bytes()
    assert server.run("prepare", job, "--tasks", "3", cwd=here).code == 0
    assert (out / "plan/units.arrow").read_bytes() == before

    tasks = [server.start("run", job, "--shard", f"{i}/3", cwd=here, env=SOON) for i in range(3)]
    assert tasks[1].wait_until(lambda: CommitLog(out / "workers/0001.0/commit.log").read() != [])
    tasks[1].send(signal.SIGKILL)
    codes = [task.wait().code for task in tasks]
    assert codes[1] == -signal.SIGKILL and set(codes) <= {0, 3, -signal.SIGKILL}, [task.wait() for task in tasks]
    left = len(CommitLog(out / "workers/0001.0/commit.log").read())
    assert left > 0, "killed in its middle"

    early = server.run("merge", "out", cwd=here)
    if early.code:  # nobody waited long enough to find it dead: the task runs again
        assert "rows have no answer yet" in early.error and "of tasks 1" in early.error and "--shard 1/3" in early.error
        assert server.run("run", job, "--shard", "1/3", cwd=here, env=SOON).code in (0, 3)
        assert server.run("merge", "out", cwd=here).code == 0
    assert images(out) == expected
    assert owners(out) == {(row, s): 1 for row in range(NUM_ROWS) for s in range(2)}, "nothing lost, nothing twice"
    assert sum(one["num_failed"] for one in workers(out).values()) == 2
