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

NUM_ROWS = 40
LIMIT = 240.0  # seconds, for anything to happen; all of it takes about two minutes on two cores


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

    def log(name: str) -> str:
        return (out / "logs" / name).read_text()

    def after_first_answers(task: int, *command: str) -> None:
        commits = out / f"workers/{task:04d}.0/commit.log"
        slurm.wait(f"answers of task {task}", lambda: CommitLog(commits).read() != [], LIMIT)
        slurm.call(*command)

    try:
        slurm.wait("four tasks at work", lambda: len(workers(out)) == len(tasks), LIMIT)
        nodes = {task: slurm.job(f"{array}_{task}")["NodeList"] for task in tasks}
        # the node of a task that is alone on it, so that nothing happens to the others
        alone = [task for task in tasks if Counter(nodes.values())[nodes[task]] == 1]
        on_lost_node, at_limit, cancelled = [alone[0], *(task for task in tasks if task != alone[0])][:3]

        # it stands still until Slurm, which looks at limits every 30 s, warns it (and continues what was stopped)
        after_first_answers(at_limit, "scancel", "--batch", "--signal=STOP", f"{array}_{at_limit}")
        slurm.call("bash", "-c", f"scontrol update job={array}_{at_limit} EndTime=$(date -d '+115 sec' +%FT%T)")
        after_first_answers(
            on_lost_node, "scontrol", "update", f"nodename={nodes[on_lost_node]}", "state=down", "reason=lost"
        )
        after_first_answers(cancelled, "scancel", f"{array}_{cancelled}")
        slurm.wait("a cancelled task", lambda: slurm.state(f"{array}_{cancelled}") == "CANCELLED", LIMIT)
        status = json.loads(batchgen(slurm, "status", "out", "--json", cwd=here))
        slurm.call("scontrol", "requeue", f"{array}_{cancelled}")
        slurm.wait("the merge", lambda: slurm.state(ids["merge"]) not in ("PENDING", "RUNNING", "COMPLETING"), LIMIT)
    except AssertionError as error:
        logs = "\n".join(f"==> {path.name}\n{path.read_text()[-3000:]}" for path in sorted(out.glob("logs/*")))
        raise AssertionError(f"{error}\n{logs}") from None

    assert slurm.state(ids["merge"]) == "COMPLETED", log("merge.log")
    assert f"Slurm runs task {array}_{at_limit} again" in log(f"answer-{at_limit}.log"), log(f"answer-{at_limit}.log")
    assert slurm.job(f"{array}_{on_lost_node}")["NodeList"] != nodes[on_lost_node]
    assert "DUE TO NODE FAILURE" in log(f"answer-{on_lost_node}.log")
    made = workers(out)
    for task in tasks:
        again = f"{task:04d}.1"
        assert (again in made) == (task in (at_limit, on_lost_node, cancelled)), made.keys()
        assert made[f"{task:04d}.0"]["batch_job"] == array
    assert "SIGUSR1" in made[f"{at_limit:04d}.0"]["message"] and "SIGTERM" in made[f"{cancelled:04d}.0"]["message"]
    assert {one["host"] for one in made.values()} >= set(nodes.values()), "each node has a name of its own"
    assert 0 < status["num_committed"] < NUM_ROWS and status["tasks"][cancelled]["state"] == "interrupted"
    assert re.fullmatch(f"sbatch --array=[0-3,]*{cancelled}[0-3,]* '{out}/submit/answer.sh'", status["run_again"]), status

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
    assert finished["is_finished"] and finished["num_committed"] == NUM_ROWS and finished["run_again"] is None
