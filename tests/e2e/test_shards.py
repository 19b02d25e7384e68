"""One job, several workers: prepare, run --shard, merge. The results are the bytes of a run by one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from commands import Process, WarmServer, write_job, write_rows

from batchgen.data.commit_log import CommitLog

NUM_ROWS = 128
TO_OUT = ("--set", "output.path=out")


class Scene(NamedTuple):
    """A job, and the results of a run of it by one process."""

    here: Path
    job: Path
    expected: list[bytes]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, toy: Path, server: WarmServer) -> Scene:
    """Prompts with shared beginnings, repeats, and one that is too long."""
    here = tmp_path_factory.mktemp("scene")
    (here / "toy").symlink_to(toy)
    asked = [f"{('tell me of the', 'what is', 'a long story about')[i % 3]} {i * i % 130}" for i in range(NUM_ROWS)]
    asked[77] = "x" * 9000
    write_rows(here / "rows.parquet", {"id": list(range(NUM_ROWS)), "q": asked})
    job = write_job(
        here,
        input={"id_column": "id"},
        sampling={"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2},
        engine={"max_running_requests": 8},
        output={"path": "whole", "commit_rows": 8},
    )
    assert server.run("run", job, cwd=here).code == 3
    return Scene(here, job, images(here / "whole"))


@pytest.fixture
def out(scene: Scene) -> Iterator[Path]:
    folder = scene.here / "out"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def images(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "results").iterdir())]


def workers(out: Path) -> dict[str, dict]:
    time.sleep(0.02)  # tests poll this, and the workers need the processor
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("workers/*/worker.json"))}


def owners(folder: Path) -> Counter[tuple[int, int]]:
    """(row, sample) -> how often the run's own commit log has it."""
    return Counter(
        (row["row"], row["sample_index"])
        for part in CommitLog(folder / "commit.log").read()
        for row in pq.read_table(folder / "parts" / part.name, columns=["row", "sample_index"]).to_pylist()
    )


def test_three_shards_one_killed_give_the_bytes_of_one_run(scene: Scene, out: Path, server: WarmServer) -> None:
    here, job = scene.here, (scene.job, *TO_OUT)
    refused = server.run("run", *job, "--shard", "1/3", cwd=here)
    assert refused.code == 2 and "run `batchgen prepare JOB --tasks N` first" in refused.error
    prepared = server.run("prepare", *job, "--tasks", "3", cwd=here)
    assert prepared.code == 0 and "128 rows, 128 without an answer, in 8 of 8 units" in prepared.stdout, prepared
    before = (out / "plan/units.arrow").read_bytes()
    assert server.run("prepare", *job, "--tasks", "3", cwd=here).code == 0
    assert (out / "plan/units.arrow").read_bytes() == before

    def task(index: int, **more: str) -> Process:
        return server.start("run", *job, "--shard", f"{index}/3", cwd=here, env={"BATCHGEN_PATIENCE": "1", **more})

    victim = task(1)
    assert victim.wait_until(lambda: CommitLog(out / "workers/0001.0/commit.log").read() != [])
    victim.send(signal.SIGKILL)
    assert victim.wait().code == -signal.SIGKILL
    early = server.run("merge", "out", cwd=here)
    assert early.code == 1 and "rows have no answer yet, in units 0-7 of tasks 0-2" in early.error, early
    assert "--shard I/3 (I: 0, 1, 2), then: batchgen merge out" in early.error

    codes = {one.wait().code for one in [task(0), task(2, SLURM_ARRAY_JOB_ID="77")]}
    assert codes <= {0, 3}, "they take over what task 1 has left"
    assert workers(out)["0001.0"]["state"] == "running" and workers(out)["0002.0"]["batch_job"] == "77"
    taken = sum(one["num_answered"] for name, one in workers(out).items() if name != "0001.0")
    assert server.run("merge", "out", cwd=here).code == 0
    assert images(out) == scene.expected
    assert owners(out) == {(row, s): 1 for row in range(NUM_ROWS) for s in range(2)}, "nothing lost, nothing twice"
    assert taken < 2 * NUM_ROWS, "what task 1 had committed was not computed again"

    again = server.run("run", *job, "--only", "failed", cwd=here)
    assert again.code == 3 and "1 have no prompt" in again.stderr and images(out) == scene.expected
    merged = {path: path.read_bytes() for path in sorted((out / "parts").iterdir())}
    assert server.run("merge", "out", cwd=here).code == 0
    assert {path: path.read_bytes() for path in sorted((out / "parts").iterdir())} == merged, "nothing is adopted twice"


# ---- replicas -----------------------------------------------------------------------------------------------------------


def test_two_replicas_one_killed_give_the_bytes_of_one_run(scene: Scene, out: Path, server: WarmServer) -> None:
    run = server.start("run", scene.job, *TO_OUT, "--set", "engine.replicas=2", cwd=scene.here)
    assert run.wait_until(lambda: workers(out).get("0001.0", {}).get("num_answered", 0) > 0)
    os.kill(workers(out)["0001.0"]["pid"], signal.SIGKILL)
    outcome = run.wait()
    assert outcome.code == 3 and "replica 1 has died (killed by signal 9); it is started again" in outcome.stderr, outcome
    assert images(out) == scene.expected
    assert owners(out) == {(row, s): 1 for row in range(NUM_ROWS) for s in range(2)}, "nothing lost, nothing twice"
    assert {name.partition(".")[0] for name in workers(out)} == {"0000", "0001"}
    assert json.loads((out / "summary.json").read_text())["rows"]["answered_now"] == 2 * NUM_ROWS


def test_a_signal_ends_replicas_in_order_and_the_next_run_goes_on(scene: Scene, out: Path, server: WarmServer) -> None:
    run = server.start("run", scene.job, *TO_OUT, "--set", "engine.replicas=2", cwd=scene.here)
    assert run.wait_until(lambda: any(one["num_answered"] for one in workers(out).values()))
    run.send(signal.SIGTERM)
    assert run.wait().code == 75
    left = workers(out)
    assert {one["state"] for one in left.values()} <= {"interrupted", "finished"}, left
    outcome = server.run("run", scene.job, *TO_OUT, cwd=scene.here)  # one process takes what they have, and does the rest
    assert outcome.code == 3 and "parts that workers have committed" in outcome.stderr
    assert images(out) == scene.expected
    num_before = sum(one["num_answered"] for one in left.values())
    assert json.loads((out / "summary.json").read_text())["rows"]["answered_now"] == 2 * NUM_ROWS - num_before
