"""A job as a real Slurm array of four tasks on three nodes, of which three have an accident: what comes out is the bytes of
a run by one process.

Slurm is Debian's, installed here if root may; its nodes are this machine under three names.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from commands import ENTRY, ROOT, environment
from slurm_cluster import SlurmCluster, why_not

from batchgen.data.commit_log import CommitLog

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_ROWS = 64
LIMIT = 300.0  # seconds, for anything to happen; all of it takes about two minutes on two cores


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), num_nodes=3) as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Questions of GSM8K to SmolLM2, few at a time, so that answers keep coming; in a folder with a space in its name."""
    folder = tmp_path / "a job"
    folder.mkdir()
    sections = {
        "model": {"path": "packaged:smollm2"},
        "input": {"path": str(ROOT / "jobs/data/gsm8k_test.parquet"), "id_column": "id", "limit": NUM_ROWS},
        "prompt": {"user": "{{ question }}"},
        "sampling": {"max_tokens": 24},
        "engine": {"device": "cpu", "threads": 1, "max_running_requests": 4},
        "output": {"path": "out", "commit_rows": 2},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def batchgen(slurm: SlurmCluster, *words: str, cwd: Path) -> str:
    command = [sys.executable, "-c", ENTRY, *words]
    environ = slurm.environ | environment() | {"SLURM_CONF": slurm.environ["SLURM_CONF"], "BATCHGEN_PATIENCE": "30"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


def workers(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("workers/*/worker.json"))}


def test_an_array_with_accidents_gives_the_bytes_of_one_run(slurm: SlurmCluster, job: Path) -> None:
    here, out = job.parent, job.parent / "out"
    said = batchgen(slurm, "submit", "job.yaml", "--array", "4", "-p", "spread", "--time=30", cwd=here)
    ids = dict(re.findall(r"^(\w+) is job (\d+)", said, re.MULTILINE))
    array, tasks = ids["answer"], range(4)

    def answered(task: int, attempt: int = 0) -> bool:
        return CommitLog(out / f"workers/{task:04d}.{attempt}/commit.log").read() != []

    def log(name: str) -> str:
        return (out / "logs" / name).read_text()

    try:
        slurm.wait("four tasks at work", lambda: all(map(answered, tasks)), LIMIT)
        nodes = {task: slurm.job(f"{array}_{task}")["NodeList"] for task in tasks}
        at_limit = 3
        # the node of a task that is alone on it, so that nothing else happens to the others
        on_lost_node = next(t for t in tasks if t != at_limit and Counter(nodes.values())[nodes[t]] == 1)
        cancelled = next(t for t in tasks if t not in (at_limit, on_lost_node))

        # its limit, of which it is warned when Slurm looks next (every 30 s)
        slurm.call("bash", "-c", f"scontrol update job={array}_{at_limit} EndTime=$(date -d '+115 sec' +%FT%T)")
        slurm.call("scontrol", "update", f"nodename={nodes[on_lost_node]}", "state=down", "reason=accident")
        slurm.call("scancel", f"{array}_{cancelled}")
        status = json.loads(batchgen(slurm, "status", "out", "--json", cwd=here))
        slurm.wait("a cancelled task", lambda: slurm.state(f"{array}_{cancelled}") == "CANCELLED", LIMIT)
        slurm.call("scontrol", "requeue", f"{array}_{cancelled}")
        slurm.wait("the merge", lambda: slurm.state(ids["merge"]) not in ("PENDING", "RUNNING", "COMPLETING"), LIMIT)
    except AssertionError as error:
        logs = "\n".join(f"==> {path.name}\n{path.read_text()[-3000:]}" for path in sorted(out.glob("logs/*")))
        raise AssertionError(f"{error}\n{logs}") from None

    assert slurm.state(ids["merge"]) == "COMPLETED", log("merge.log")
    assert f"Slurm runs task {array}_{at_limit} again" in log(f"answer-{at_limit}.log"), log(f"answer-{at_limit}.log")
    assert "DUE TO NODE FAILURE" in log(f"answer-{on_lost_node}.log")
    made = workers(out)
    for task in tasks:
        again = f"{task:04d}.1"
        assert (again in made) == (task in (at_limit, on_lost_node, cancelled)), made.keys()
        assert made[f"{task:04d}.0"]["batch_job"] == array
    assert "SIGUSR1" in made[f"{at_limit:04d}.0"]["message"] and "SIGTERM" in made[f"{cancelled:04d}.0"]["message"]
    assert {one["host"] for one in made.values()} >= set(nodes.values()), "each node has a name of its own"
    assert 0 < status["num_committed"] < NUM_ROWS and len(status["tasks"]) == 4

    owners = Counter(
        row for part in CommitLog(out / "commit.log").read()
        for row in pq.read_table(out / "parts" / part.name, columns=["row"])["row"].to_pylist()
    )  # fmt: skip
    assert owners == dict.fromkeys(range(NUM_ROWS), 1), "nothing lost, nothing twice"

    # which products of a CPU are the quickest may be found otherwise by another process
    batchgen(slurm, "prepare", "job.yaml", "--set", "output.path=one", cwd=here)
    shutil.copy(out / "products.json", here / "one")
    batchgen(slurm, "run", "job.yaml", "--set", "output.path=one", "--set", "engine.max_running_requests=64", cwd=here)
    images = [[p.read_bytes() for p in sorted((here / name / "results").iterdir())] for name in ("out", "one")]
    assert images[0] == images[1]
    finished = json.loads(batchgen(slurm, "status", "out", "--json", cwd=here))
    assert finished["is_finished"] and finished["num_committed"] == NUM_ROWS and finished["run_again"] == []
