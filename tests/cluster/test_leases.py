"""Leases: one holder at a time, the dead are found by their beat alone, and no unit is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from batchgen.cluster.leases import Leases, _longest_run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_own_units_first_then_from_the_back_of_the_longest_run(tmp_path: Path) -> None:
    a, b = (Leases(tmp_path, f"task-{i}.0", 8) for i in range(2))
    assert [a.next_unit(range(4)) for _ in range(2)] == [0, 1]
    assert [b.next_unit(range(4, 8)) for _ in range(4)] == [4, 5, 6, 7]
    assert b.next_unit(range(4, 8)) == 3  # a has 2 and 3 before it
    assert a.next_unit(range(4)) == 2 and a.next_unit(range(4)) is None
    for unit in range(8):
        assert not a.all_done
        a.finish(unit)
    assert a.all_done and b.next_unit(range(8)) is None


def test_a_worker_without_a_beat_loses_its_units_by_the_clock_of_the_one_that_waits(tmp_path: Path) -> None:
    dead, clock = Leases(tmp_path, "task-0.0", 2), Clock()
    assert dead.next_unit(range(2)) == 0
    alive = Leases(tmp_path, "task-1.0", 2, patience=60, clock=clock)
    assert alive.next_unit(range(1, 2)) == 1 and alive.next_unit(range(1, 2)) is None
    clock.now = 59
    assert alive.next_unit(range(1, 2)) is None
    dead._last_beat = -1e9
    dead.beat()  # it lives after all, whatever its own clock says
    clock.now = 61
    assert alive.next_unit(range(1, 2)) is None
    clock.now = 122
    assert alive.next_unit(range(1, 2)) == 0
    assert alive.read()[0] == (2, "task-1.0") and dead.next_unit(range(2)) is None


def test_a_task_that_runs_again_goes_on_at_once(tmp_path: Path) -> None:
    first, other = Leases(tmp_path, "task-0.0", 3), Leases(tmp_path, "task-1.0", 3)
    assert first.next_unit(range(3)) == 0 and first.next_unit(range(3)) == 1
    first.finish(0)
    assert other.next_unit(range(0)) == 2
    again = Leases(tmp_path, "task-0.1", 3)
    assert again.next_unit(range(3)) == 1 and again.next_unit(range(3)) is None


def test_who_waits_takes_over_from_the_dead_and_leaves_the_living_alone(tmp_path: Path) -> None:
    alive, dead = (Leases(tmp_path, f"task-{i}.0", 2, patience=0.4) for i in range(2))
    assert (alive.next_unit(range(1)), dead.next_unit(range(1, 2))) == (0, 1)
    with alive.beating():
        waiting = Leases(tmp_path, "task-2.0", 2, patience=0.4)
        assert waiting.wait_for_unit(range(0)) == 1, "of the one without a beat"
        waiting.finish(1)
        assert waiting.wait_for_unit(range(0)) is None and not waiting.all_done, "the other one lives"
    assert waiting.wait_for_unit(range(0)) == 0, "until its beat ends"
    assert Leases.holders(tmp_path) == {0: "task-2.0", 1: "task-2.0"}
    waiting.finish(0)
    assert waiting.wait_for_unit(range(2)) is None and waiting.all_done


def test_runs_of_neighbours() -> None:
    assert _longest_run([0, 2, 3, 4, 7, 8]) == [2, 3, 4] and _longest_run([]) == []


RACE = """
import sys, time
from pathlib import Path
from batchgen.cluster.leases import Leases
leases = Leases(Path(sys.argv[1]), sys.argv[2], 200)
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.001)
while (unit := leases.next_unit(range(200))) is not None:
    print(unit, flush=True)
"""


def test_processes_that_race_get_each_unit_once(tmp_path: Path) -> None:
    """One of them is killed as it claims: no unit is held twice, and what it held is found under its name."""
    workers = [
        subprocess.Popen([sys.executable, "-c", RACE, tmp_path, f"task-{i}.0"], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    while len(list((tmp_path / "leases").glob(".task-*"))) < 4 if (tmp_path / "leases").exists() else True:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert workers[0].stdout is not None
    workers[0].stdout.readline()
    os.kill(workers[0].pid, signal.SIGKILL)
    got = [[int(line) for line in worker.communicate()[0].split()] for worker in workers]
    rest = [unit for units in got[1:] for unit in units]
    assert len(rest) == len(set(rest))
    held = Leases(tmp_path, "observer.0", 200).read()
    assert {u for u, (_, holder) in held.items() if holder != "task-0.0"} == set(rest)
    assert all(num_claims == 1 for num_claims, _ in held.values())
