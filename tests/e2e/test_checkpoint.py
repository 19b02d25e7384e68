"""kill -9 in the middle of long answers: the next run goes on with the saved tokens, to the same text."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import WarmServer, results, write_job, write_rows

from batchgen.data.commit_log import CommitLog

ANSWER = ["row", "sample_index", "status", "generated_text", "finish_reason", "stop_reason", "token_ids"]
NUM_ROWS, MAX_TOKENS = 5, 150
EACH_STEP, NEVER = 1e-9, 86_400


def num_tokens(column: pa.ChunkedArray) -> int:
    return sum(map(len, column.to_pylist()))


def saved(out: Path) -> int:
    return num_tokens(pa.ipc.open_stream((out / "checkpoint.arrow").read_bytes()[:-16]).read_all()["token_ids"])


def committed(out: Path) -> int:
    parts = CommitLog(out / "commit.log").read()
    return sum(num_tokens(pq.read_table(out / "parts" / part.name)["token_ids"]) for part in parts)


def tokens(out: Path) -> dict[str, int]:
    return json.loads((out / "summary.json").read_text())["tokens"]


@pytest.fixture
def long_job(here: Path) -> Path:
    write_rows(here / "rows.parquet", {"q": [f"a long story of {i}" for i in range(NUM_ROWS)]})
    return write_job(
        here,
        sampling={"max_tokens": MAX_TOKENS, "ignore_eos": True},
        engine={"block_size": 4},
        output={"checkpoint_seconds": EACH_STEP},
    )


def kill_after_saving(out: Path, times: int, server: WarmServer, *command: str | Path) -> None:
    faults = {"folder": str(out), "at": f"checkpoint.arrow rename {times} after"}
    assert server.run(*command, cwd=out.parent, faults=faults).code == -signal.SIGKILL


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "n": 3, "stop": ["the", "z"], "max_tokens": 60}])
def test_kill_9_costs_only_what_was_not_saved(settings: dict, long_job: Path, here: Path, server: WarmServer) -> None:
    """Killed twice, the second time by a run of one request at a time: it has not taken up all that the first had left."""
    command = ["run", long_job]
    for name, value in settings.items():
        command += ["--set", f"sampling.{name}={json.dumps(value)}"]
    assert server.run(*command, "--set", "output.path=whole", cwd=here).code == 0
    out, expected = here / "out", results(here / "whole").select(ANSWER)
    total = num_tokens(expected["token_ids"])
    kill_after_saving(out, 30, server, *command)
    before = saved(out) + committed(out)
    assert before >= 30 * NUM_ROWS if not settings else before > 100
    kill_after_saving(out, 10, server, *command, "--set", "engine.max_running_requests=1")
    assert saved(out) + committed(out) >= before + 9
    kept, done = saved(out), committed(out)
    outcome = server.run(*command, cwd=here)
    assert outcome.code == 0 and f"unfinished answers of {kept:,} tokens" in outcome.stderr, outcome
    assert results(out).select(ANSWER).equals(expected)
    assert tokens(out)["resumed"] == kept > 0
    assert tokens(out)["output"] == total - kept - done, "decoded again"
    assert not (out / "checkpoint.arrow").exists()


def test_a_signal_saves_at_once(here: Path, server: WarmServer) -> None:
    """Between two long answers one that fills the model ends early, which shows that it runs."""
    write_rows(here / "rows.parquet", {"q": ["a story", "x" * 470, "another story"]})
    job = write_job(
        here,
        sampling={"max_tokens": 400, "ignore_eos": True},
        output={"commit_rows": 1, "checkpoint_seconds": NEVER},
    )
    out = here / "out"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        shutil.rmtree(out, ignore_errors=True)
        process = server.start("run", job, cwd=here)
        assert process.wait_until(lambda: (out / "commit.log").exists())
        process.send(number)
        assert process.wait().code == 75
        kept, done = saved(out), committed(out)
        assert server.run("run", job, cwd=here).code == 0
        assert tokens(out)["resumed"] == kept > 20
        assert tokens(out)["output"] == num_tokens(results(out)["token_ids"]) - kept - done
    assert server.run("run", job, "--restart", "--set", "output.checkpoint_seconds=null", cwd=here).code == 0
    assert results(out).select(ANSWER).equals(results(here / "out.1").select(ANSWER))


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "empty"])
def test_a_checkpoint_of_no_use_is_told_and_ignored(damage: str, long_job: Path, here: Path, server: WarmServer) -> None:
    out, command = here / "out", ["run", long_job, "--set", "sampling.max_tokens=12"]
    if damage == "foreign":
        other = [*command, "--set", "sampling.temperature=1", "--set", "output.path=other"]
        kill_after_saving(here / "other", 5, server, *other)
    kill_after_saving(out, 5, server, *command)
    path = out / "checkpoint.arrow"
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    foreign = (here / "other/checkpoint.arrow").read_bytes() if damage == "foreign" else b""
    path.write_bytes({"torn": path.read_bytes()[:-9], "flipped": bytes(image), "foreign": foreign, "empty": b""}[damage])
    outcome = server.run(*command, cwd=here)
    told = "it is of another job" if damage == "foreign" else "its checksum differs"
    assert outcome.code == 0 and f"checkpoint.arrow: {told}; unfinished answers begin anew" in outcome.stderr
    assert tokens(out)["resumed"] == 0 and not path.exists()
    assert server.run(*command, "--set", "output.path=whole", cwd=here).code == 0
    assert results(out).select(ANSWER).equals(results(here / "whole").select(ANSWER))


def test_restart_and_only_leave_it_alone(long_job: Path, here: Path, server: WarmServer) -> None:
    out, command = here / "out", ["run", long_job, "--set", "sampling.max_tokens=12"]
    kill_after_saving(out, 5, server, *command)
    image = (out / "checkpoint.arrow").read_bytes()
    refused = server.run(*command, "--only", "truncated", cwd=here)
    assert refused.code == 2 and (out / "checkpoint.arrow").read_bytes() == image, "rows are owed"
    assert server.run(*command, "--restart", cwd=here).code == 0
    assert tokens(out)["resumed"] == 0
    assert (here / "out.1/checkpoint.arrow").read_bytes() == image
    # as left by a kill between the last commit and the end: nothing of it may come into other answers
    (out / "checkpoint.arrow").write_bytes(image)
    again = server.run(*command, "--only", "truncated", "--set", "sampling.max_tokens=14", cwd=here)
    assert again.code == 0 and tokens(out)["resumed"] == 0, again
