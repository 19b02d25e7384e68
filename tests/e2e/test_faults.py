"""A run that dies, or finds the disk full, at any system call that changes its folder: the next run makes up for it.

The points are recorded in one undisturbed run of each scenario; docs/crash-points.md lists them. To write it again:
UPDATE_DOCS=1 pytest tests/e2e/test_faults.py -k listed
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from commands import ROOT, Result, WarmServer, write_job, write_rows
from fault_points import MAKES_LARGER

from batchgen.data.commit_log import CommitLog

NUM_ROWS, COMMIT_ROWS = 12, 4
DOCS = ROOT / "docs/crash-points.md"
QUICK_POINTS = [  # one of each kind; the slow sweep takes all
    "job.json rename 1 before",
    "tokens.arrow.tmp write 1 torn",
    "products.json link 1 before",
    "parts/part-000002.parquet.tmp write 1 torn",
    "parts/part-000002.parquet rename 1 after",
    "parts fsync 2 after",
    "commit.log write 2 torn",
    "commit.log fsync 2 after",
    "results.tmp/part-00000.parquet write 1 torn",
    "results rename 1 before",
    "job.json.tmp fsync 3 before",
]


class Scene:
    """A job in a folder; `prepare` brings its run folder to where a scenario begins. Same bytes at each end."""

    def __init__(self, here: Path, server: WarmServer) -> None:
        self.here, self.server, self.out = here, server, here / "out"
        self.job = write_job(
            here,
            input={"id_column": "id"},
            sampling={"max_tokens": 6, "temperature": 1.0, "seed": 3},
            engine={"max_running_requests": 3},
            output={"path": "out", "commit_rows": COMMIT_ROWS},
        )
        asked = {i: f"{'a story of' if i % 2 else 'say'} {i}" for i in range(NUM_ROWS)}
        for name in ("earlier", "finished"):
            write_rows(here / "rows.parquet", {"id": list(asked), "q": list(asked.values())})
            self.prepare("fresh")
            assert self.run().code == 0
            shutil.copytree(self.out, here / name)
            # reversed, two gone, two new, another question under one id: three rows are owed
            asked = {i: asked.get(i, f"tell of {i}") for i in reversed(range(2, NUM_ROWS + 2))} | {7: "say so"}
        self.expected = (self.out / "results/part-00000.parquet").read_bytes()

    def run(self, **faults: object) -> Result:
        settings = {"folder": str(self.out), **faults} if faults else None
        return self.server.run("run", self.job, cwd=self.here, faults=settings)

    def prepare(self, scenario: str) -> None:
        """fresh: no folder. finished: a whole one. changed: that of an earlier state of the input, with a torn record and
        the part that it was for."""
        shutil.rmtree(self.out, ignore_errors=True)
        if scenario == "finished":
            shutil.copytree(self.here / "finished", self.out)
        if scenario == "changed":
            shutil.copytree(self.here / "earlier", self.out)
            shutil.copy(self.out / "parts/part-000003.parquet", self.out / "parts/part-000004.parquet")
            with open(self.out / "commit.log", "ab") as log:
                log.write((self.out / "commit.log").read_bytes()[:100])

    def points(self, scenario: str) -> list[str]:
        self.prepare(scenario)
        record = self.here / "points"
        record.unlink(missing_ok=True)
        assert self.run(record=str(record)).code == 0
        points = record.read_text().splitlines()
        # to the disk "after" is "before" the next call; once is enough for that
        return points if scenario == "fresh" else [point for point in points if not point.endswith("after")]

    def committed(self) -> dict[str, bytes]:
        parts = CommitLog(self.out / "commit.log").read() if self.out.exists() else []
        return {part.name: (self.out / "parts" / part.name).read_bytes() for part in parts}

    def check_next_run(self, before: dict[str, bytes]) -> None:
        """It ends well, keeps what was committed, and its results are those of a run that nothing disturbed."""
        outcome = self.run()
        assert outcome.code == 0, outcome
        after = self.committed()
        assert {name: after.get(name) for name in before} == before, "what was committed has changed"
        owners = ["row_key", "prompt_hash"]
        tables = [pq.read_table(self.out / "parts" / name, columns=owners) for name in after]
        asked = Counter(tuple(row.values()) for table in tables for row in table.to_pylist())
        assert set(asked.values()) == {1}, "a committed answer was computed again"
        assert sorted(os.listdir(self.out / "parts")) == sorted(after)
        assert not [name for name in os.listdir(self.out) if name.endswith((".tmp", ".old"))]
        assert [path.read_bytes() for path in sorted((self.out / "results").iterdir())] == [self.expected]


SCENARIOS = ("fresh", "changed")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, toy: Path, server: WarmServer) -> Scene:
    here = tmp_path_factory.mktemp("scene")
    (here / "toy").symlink_to(toy)
    return Scene(here, server)


def die_at(scene: Scene, scenario: str, point: str) -> None:
    scene.prepare(scenario)
    before = scene.committed()
    outcome = scene.run(at=point)
    assert outcome.code == -signal.SIGKILL, f"{point}: {outcome}"
    left = scene.committed()
    assert before.items() <= left.items(), f"{point}: what was committed is gone"
    scene.check_next_run(left)


def refuse_at(scene: Scene, scenario: str, point: str, fault: str) -> None:
    """`fault`: refuse (this call) or full (this call and all later ones that need room)."""
    scene.prepare(scenario)
    before = scene.committed()
    outcome = scene.run(at=point, fault=fault)
    assert outcome.code == 1, f"{point}: {outcome}"
    assert "No space left on device" in outcome.error and "unexpected" not in outcome.error, f"{point}: {outcome.error}"
    left = scene.committed()
    assert before.items() <= left.items(), f"{point}: what was committed is gone"
    scene.check_next_run(left)


# ---- quick ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", QUICK_POINTS)
def test_kill_9_at_a_point(point: str, scene: Scene) -> None:
    die_at(scene, "fresh", point)


def test_the_points_are_listed_in_the_docs(scene: Scene) -> None:
    recorded = {scenario: scene.points(scenario) for scenario in SCENARIOS}
    assert len(set(recorded["fresh"])) >= 60 and set(QUICK_POINTS) <= set(recorded["fresh"])
    text = document(recorded)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(text)
    assert DOCS.read_text() == text, "the points have changed; see the top of this file"


@pytest.mark.parametrize(
    "point", ["tokens.arrow.tmp write 1 before", "parts/part-000002.parquet.tmp write 1 before", "commit.log write 2 before"]
)
def test_a_full_disk_is_told_and_the_next_run_goes_on(point: str, scene: Scene) -> None:
    refuse_at(scene, "fresh", point, "full")


def test_a_clock_that_runs_backwards_changes_nothing(scene: Scene) -> None:
    """The wall clock is told, never asked: seconds until a commit come from the monotonic one."""
    scene.prepare("fresh")
    assert scene.run(clock=1e9, at="commit.log write 2 after").code == -signal.SIGKILL
    assert scene.run(clock=5e8).code == 0
    times = [part.committed_at for part in CommitLog(scene.out / "commit.log").read()]
    assert len(times) == NUM_ROWS // COMMIT_ROWS and times == sorted(times, reverse=True), "the clock did run backwards"
    scene.check_next_run(scene.committed())


def flip_a_bit(path: Path) -> None:
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)


@pytest.mark.parametrize("damage", ["flipped", "missing", "record"])
def test_what_is_damaged_is_told_and_computed_again_and_nothing_else(damage: str, scene: Scene) -> None:
    """A part with a flipped bit, one that is gone, a damaged record in the middle of the log."""
    scene.prepare("finished")
    path, before = scene.out / "parts/part-000002.parquet", scene.committed()
    told = {"flipped": "its checksum differs", "missing": "missing", "record": "1 of its records are damaged"}[damage]
    if damage == "missing":
        path.unlink()
    else:
        flip_a_bit(path if damage == "flipped" else scene.out / "commit.log")
    if damage != "record":
        merged = scene.server.run("merge", "out", cwd=scene.here)
        assert merged.code == 1 and path.name in merged.error and "run the job again" in merged.error
    outcome = scene.run()
    assert outcome.code == 0 and told in outcome.stderr and "8 of 12 rows are done" in outcome.stderr, outcome
    kept = scene.out / "parts/damaged-part-000002.parquet"
    assert kept.exists() is (damage != "missing")
    kept.unlink(missing_ok=True)
    scene.check_next_run({name: image for name, image in before.items() if name != path.name})


def test_a_disk_that_is_full_for_real(scene: Scene) -> None:
    """A file system of 128 KiB, most of it taken; then there is room again."""
    scene.prepare("fresh")
    scene.out.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", scene.out], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mount is not permitted here: {mount.stderr.strip()}")
    try:
        assert scene.run(at="commit.log write 1 after").code == -signal.SIGKILL
        before = scene.committed()
        filler = scene.out / "parts/damaged-filler"  # what a user might keep there
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
        outcome = scene.run()
        assert outcome.code == 1 and "No space left on device" in outcome.error and "run the same command" in outcome.error
        assert scene.committed() == before and len(before) == 1
        filler.unlink()
        scene.check_next_run(before)
    finally:
        subprocess.run(["umount", "--lazy", scene.out], check=True)


# ---- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_9_at_every_point(scenario: str, scene: Scene) -> None:
    points = scene.points(scenario)
    for point in points:
        die_at(scene, scenario, point)
    print(f"\n{scenario}: killed and resumed at {len(points)} points")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["refuse", "full"])
def test_a_refusal_at_every_call(fault: str, scene: Scene) -> None:
    """refuse: each fsync and rename, once. full: each call that needs room, and then no room comes."""
    operations = {"fsync", "rename"} if fault == "refuse" else MAKES_LARGER
    points = [p for p in scene.points("fresh") if p.endswith("before") and p.split()[-3] in operations]
    for point in points:
        refuse_at(scene, "fresh", point, fault)
    print(f"\n{fault}: refused and resumed at {len(points)} calls")


# ---- the page -----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    file: str
    operation: str
    number: str


HEAD = """\
# Crash points

Every system call by which `batchgen run` changes its run folder, in order, as `tests/fault_points.py` names them.
`make test-slow` runs a job of 12 rows once for each moment in these tables: SIGKILL there, the same command once more,
then: exit code 0, every row answered exactly once, every part that was committed unchanged, nothing left over, and
`results/` equal byte for byte to those of an undisturbed run. *torn* is a write of half its bytes. Each fsync and rename is
also refused once, and from each other call on the disk is full: one line of error, exit code 1, and the next run goes on.
`make test` takes one point of each kind. The tables are generated; a test holds them true.

The second table leaves out *after*, which to the disk is *before* the next call. SIGKILL shows the order of the calls; that
each is durable before the next, which only a power cut would show, is held by `test_the_order_of_durability`."""
TITLES = {
    "fresh": "A new run: three commits and the merge",
    "changed": "A finished run whose input has changed: three rows owed, a torn record to cut away, old results to replace",
}
MEANING = {".": "the run folder", "..": "the folder that it is in"}


def document(recorded: dict[str, list[str]]) -> str:
    lines = [HEAD]
    for scenario, points in recorded.items():
        lines += ["", f"## {TITLES[scenario]}", "", f"{len(points)} points.", ""]
        lines += ["| file | operation | which | moments |", "|---|---|---|---|"]
        calls = [(Call(*point.rsplit(" ", 3)[:3]), point.rsplit(" ", 1)[1]) for point in points]
        for call, moments in itertools.groupby(calls, key=lambda pair: pair[0]):
            file = MEANING.get(call.file, f"`{call.file}`")
            lines.append(f"| {file} | {call.operation} | {call.number} | {', '.join(m for _, m in moments)} |")
    return "\n".join(lines) + "\n"
