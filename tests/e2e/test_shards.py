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

from batchgen.cluster.units import read_units
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
    assert server.run("prepare", *job, "--set", "engine.device=auto", cwd=here).code == 0
    assert json.loads((out / "job.json").read_text())["fingerprint"]["engine.dtype"] == "auto", "a GPU may be elsewhere"
    shutil.rmtree(out)
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
    other = server.run("run", *job, "--shard", "2/3", "--set", "engine.dtype=bfloat16", cwd=here)
    assert other.code == 2 and 'engine.dtype: was "float32", is now "bfloat16"' in other.stderr
    early = server.run("merge", "out", cwd=here)
    assert early.code == 1 and "rows have no answer yet, in units 0-7 of tasks 0-2" in early.error, early
    assert "for i in 0 1 2; do batchgen run " in early.error
    assert "--shard $i/3; done, then: batchgen merge out" in early.error

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


def test_a_shard_refuses_what_was_not_prepared_and_counts_failed_rows_of_others(
    scene: Scene, out: Path, server: WarmServer
) -> None:
    here, job = scene.here, (scene.job, *TO_OUT, "--set", "prompt.user={{ q[:9] if id % 50 else 999 * 'long ' }}")
    run = ("run", *job, "--shard")
    assert server.run("prepare", *job, "--tasks", "2", cwd=here).code == 0
    for words, told in (
        ((*run, "2/2"), "--shard 2/2: write I/N"),
        ((*run, "auto"), "no batch system says which task this is"),
        ((*run, "0/2", "--restart"), "--shard goes with neither --restart nor --only"),
        ((*run, "0/2", "--set", "sampling.seed=9"), "sampling.seed: was 3, is now 9"),
        ((*run, "0/2", "--set", "engine.replicas=2"), "start 2 times as many tasks"),
    ):
        refused = server.run(*words, cwd=here)
        assert refused.code == 2 and told in refused.stderr, refused
    assert not (out / "workers").exists(), "refused before anything was made"

    soon = {"BATCHGEN_PATIENCE": "0.5"}
    limit = ("--set", "output.max_failed_rows=2")  # rows 0, 50 and 100 are too long
    assert server.run(*run, "0/2", *limit, cwd=here, env=soon).code == 4
    assert workers(out)["0000.0"]["state"] == "failed" and "max_failed_rows" in workers(out)["0000.0"]["message"]
    stopped = server.run(*run, "1/2", *limit, cwd=here, env=soon)
    assert stopped.code == 4 and "3 rows have failed" in stopped.error, "others' failed rows count"
    assert server.run(*run, "1/2", cwd=here, env=soon).code in (0, 3)
    assert server.run("merge", "out", cwd=here).code == 0


def test_what_is_damaged_after_its_unit_was_done_is_claimed_again(scene: Scene, out: Path, server: WarmServer) -> None:
    """And another number of tasks cuts units anew only before one is claimed."""
    here, job, soon = scene.here, (scene.job, *TO_OUT), {"BATCHGEN_PATIENCE": "0.5"}
    for num_tasks, num_units in ((1, 8), (4, 8), (3, 8)):
        assert server.run("prepare", *job, "--tasks", str(num_tasks), cwd=here).code == 0
        units = read_units(out)
        assert units is not None and (len(units), units.num_tasks) == (num_units, num_tasks)
    assert server.run("run", *job, "--shard", "0/1", cwd=here, env=soon).code == 3
    kept = server.run("prepare", *job, "--tasks", "1", cwd=here)
    assert "0 without an answer, in 0 of 8 units, cut for 3 tasks" in kept.stdout
    part = out / "workers/0000.0/parts/part-000002.parquet"
    image = bytearray(part.read_bytes())
    image[len(image) // 2] ^= 1
    part.write_bytes(image)
    merged = server.run("merge", "out", cwd=here)
    assert (
        merged.code == 1 and "4 of 128 rows have no answer yet" in merged.error and "its checksum differs" in merged.stderr
    )
    assert server.run("run", *job, "--shard", "2/7", cwd=here, env=soon).code == 0
    assert workers(out)["0002.0"]["num_answered"] == 8, "those and no others"
    assert server.run("merge", "out", cwd=here).code == 0 and images(out) == scene.expected


def test_a_merge_that_dies_loses_nothing_and_takes_nothing_twice(scene: Scene, out: Path, server: WarmServer) -> None:
    here, job = scene.here, (scene.job, *TO_OUT)
    assert server.run("prepare", *job, "--tasks", "1", cwd=here).code == 0
    died = server.run("run", *job, "--shard", "0/1", cwd=here, faults={"folder": str(out), "at": "leases fsync 2 before"})
    assert died.code < 0
    assert server.run("run", *job, "--shard", "0/1", cwd=here).code in (0, 3)
    for point in ("parts/part-000003.parquet link 1 after", "parts fsync 1 after", "commit.log write 1 torn"):
        assert server.run("merge", "out", cwd=here, faults={"folder": str(out), "at": point}).code < 0, point
    assert server.run("merge", "out", cwd=here).code == 0 and images(out) == scene.expected
    assert owners(out) == {(row, s): 1 for row in range(NUM_ROWS) for s in range(2)}
    named = {part.name for part in CommitLog(out / "commit.log").read()}
    assert set(os.listdir(out / "parts")) == named, "nothing is left over"


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


@pytest.mark.slow
def test_replicas_do_not_outlive_the_run_that_started_them(scene: Scene, out: Path, server: WarmServer) -> None:
    run = server.start(
        "run", scene.job, *TO_OUT, "--set", "engine.replicas=2", cwd=scene.here, env={"BATCHGEN_PATIENCE": "2"}
    )
    assert run.wait_until(lambda: len(workers(out)) == 2)
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    for one in workers(out).values():
        while Path(f"/proc/{one['pid']}").exists() and "zombie" not in Path(f"/proc/{one['pid']}/status").read_text():
            time.sleep(0.1)
    assert server.run("run", scene.job, *TO_OUT, cwd=scene.here).code == 3 and images(out) == scene.expected


@pytest.mark.slow
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
