"""kill -9 at thirty moments, resumed each time: every row exactly once, no answer changed, nothing committed computed again.

Half of the moments are random. The others wait for what a window of the writer, of the commit log, of the token store or of
the merge leaves on disk, and strike there.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import WarmServer, catches_signals, results, write_job, write_rows

from batchgen.data.commit_log import CommitLog

NUM_KILLS = 30
NUM_ROWS, NUM_SAMPLES = 40, 2
ANSWER = ["row", "sample_index", "status", "generated_text", "finish_reason", "stop_reason", "token_ids"]


def log_bytes(out: Path) -> int:
    return (out / "commit.log").stat().st_size if (out / "commit.log").exists() else 0


def names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def windows(out: Path) -> dict[str, Callable[[], bool]]:
    """Conditions on the folder of a run that has just been started."""
    num_parts, num_bytes = len(names(out / "parts")), log_bytes(out)
    return {
        "token store aside": lambda: "tokens.arrow.tmp" in names(out),
        "part aside": lambda: any(name.endswith(".tmp") for name in names(out / "parts")),
        "part in place": lambda: len(names(out / "parts")) > num_parts,
        "log grown": lambda: log_bytes(out) > num_bytes,
        "log grown twice": lambda: log_bytes(out) > num_bytes + 600,
        "results aside": lambda: "results.tmp" in names(out),
        "results moved": lambda: "results.old" in names(out),
    }


class Run:
    """One run folder, and what is known of it: committed parts stay as they were first seen."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.committed: dict[str, bytes] = {}
        self.token_store: int | None = None  # inode

    def look(self) -> None:
        """After a kill: the log is a continuation of what it was, and every part that it names is whole."""
        parts = CommitLog(self.out / "commit.log").read()
        assert [part.name for part in parts][: len(self.committed)] == list(self.committed)
        for part in parts:
            image = (self.out / "parts" / part.name).read_bytes()
            assert self.committed.setdefault(part.name, image) == image, f"{part.name} was written again"
            assert pq.read_metadata(self.out / "parts" / part.name).num_rows == part.num_rows
        if (self.out / "tokens.arrow").exists():
            inode = (self.out / "tokens.arrow").stat().st_ino
            assert self.token_store in (None, inode), "a finished token store is used again"
            self.token_store = inode

    def check_whole(self, expected: list[dict]) -> None:
        self.look()
        done = Counter(
            (row["row"], row["sample_index"])
            for name in self.committed
            for row in pq.read_table(self.out / "parts" / name).to_pylist()
        )
        assert set(done) == set(itertools.product(range(NUM_ROWS), range(NUM_SAMPLES)))
        assert set(done.values()) == {1}, "a committed answer was computed again"
        assert sorted(names(self.out / "parts")) == sorted(self.committed), "nothing is left over"
        assert not {"results.tmp", "results.old", "tokens.arrow.tmp"} & set(names(self.out))
        assert results(self.out).select(ANSWER).to_pylist() == expected


@pytest.mark.slow
def test_kill_9(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", {"q": [f"{'a long story of' if i % 2 else 'say'} {i}" for i in range(NUM_ROWS)]})
    job = write_job(
        here,
        sampling={"max_tokens": 24, "temperature": 1.0, "seed": 5, "n": NUM_SAMPLES},
        engine={"max_running_requests": 6, "block_size": 4},
        output={"path": "whole", "commit_rows": 4},
    )
    began = time.monotonic()
    assert server.run("run", job, cwd=here).code == 0
    one_run = time.monotonic() - began
    expected = results(here / "whole").select(ANSWER).to_pylist()

    rng = np.random.default_rng(0)
    order = itertools.cycle(windows(here))
    num_kills, num_runs, struck, left = 0, 0, Counter(), Counter()
    while num_kills < NUM_KILLS:
        run = Run(here / f"out{num_runs}")
        num_runs += 1
        while True:
            window = next(order) if num_kills % 2 else None
            found = windows(run.out)
            process = server.start("run", job, "--set", f"output.path={run.out.name}", cwd=here)
            if num_kills == NUM_KILLS:
                pass
            elif window is None:
                if process.wait_until(lambda pid=process.pid: catches_signals(pid)):
                    time.sleep(rng.uniform(0, one_run))
                process.send(signal.SIGKILL)
            elif process.wait_until(found[window]):
                process.send(signal.SIGKILL)
            outcome = process.wait()
            if outcome.code == 0:
                break
            assert outcome.code == -signal.SIGKILL, outcome
            num_kills += 1
            struck[window or "random"] += 1
            run.look()
            left["part without a record"] += bool(set(names(run.out / "parts")) - set(run.committed))
            left["something aside"] += any(path.name.endswith(".tmp") for path in run.out.rglob("*"))
            left["half of the answers"] += 0 < len(run.committed) < NUM_ROWS * NUM_SAMPLES // 4
        run.check_whole(expected)
    print(f"\n{num_kills} kills in {num_runs} runs, at {dict(struck)}; found after them: {dict(left)}")
    assert left["part without a record"] > 0 and left["something aside"] > 0 and left["half of the answers"] > 5
