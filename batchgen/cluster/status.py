"""How far a job is that several tasks share: read from its folder, from any machine, while they work or after.

Counts come from the commit logs, so they are right whatever became of a task; what a task says of itself comes from its
worker.json, and whether it still lives from its beat.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.cluster.again import command_to_rerun
from batchgen.cluster.leases import PATIENCE
from batchgen.cluster.units import require_units
from batchgen.data.commit_log import CommitLog
from batchgen.data.status import RunStatus, read_status


@dataclass(frozen=True)
class TaskStatus:
    """One task."""

    task: int
    state: str  # waiting | running | silent | finished | interrupted | failed; silent: says running, but beats no more
    num_attempts: int
    num_answered: int  # by all attempts
    answers_per_second: float  # of the last attempt, since its start; so is what follows
    tokens_per_second: float  # prompt and output, of the answers it has committed
    host: str
    batch_job: str | None
    message: str
    silent_seconds: float | None  # since its last beat, if it says that it runs


@dataclass(frozen=True)
class ArrayStatus:
    """Counts are in answers, as RunStatus has them."""

    run: RunStatus
    num_committed: int  # by tasks and in the run's own log; of two answers to one row both count, up to num_answers
    num_failed: int
    tasks: list[TaskStatus]
    tokens_per_second: float  # of the tasks that run
    eta_seconds: float | None  # None if none runs, or nothing is known yet
    run_again: str | None  # the command for tasks that are silent or ended without finishing, while answers are missing


def read_array_status(path: Path) -> ArrayStatus:
    """Raises what read_status raises, and RunFolderError if `batchgen prepare` has not made the job ready for tasks."""
    run = read_status(path)
    units = require_units(path)
    now = time.time()
    adopted = {part.checksum for part in CommitLog(path / "commit.log").read()}
    attempts: dict[int, list[Path]] = {task: [] for task in range(units.num_tasks)}
    num_committed, num_failed = run.num_committed, run.num_failed
    answered: dict[int, int] = {}
    for worker in sorted(path.glob("workers/[0-9]*.[0-9]*"), key=_name):
        task, _ = _name(worker)
        attempts.setdefault(task, []).append(worker)
        parts = CommitLog(worker / "commit.log").read()
        answered[task] = answered.get(task, 0) + sum(part.num_rows for part in parts)
        new = [part for part in parts if part.checksum not in adopted]
        num_committed += sum(part.num_rows for part in new)
        num_failed += sum(part.num_failed for part in new)
    if run.num_answers is not None:
        num_committed = min(num_committed, run.num_answers)
    tasks = [_task_status(path, task, tried, answered.get(task, 0), now) for task, tried in sorted(attempts.items())]
    running = [task for task in tasks if task.state == "running"]
    rate = sum(task.answers_per_second for task in running)
    num_missing = None if run.num_answers is None else run.num_answers - num_committed
    lost = [task.task for task in tasks if task.state in ("silent", "interrupted", "failed")] if num_missing != 0 else []
    return ArrayStatus(
        run,
        num_committed,
        num_failed,
        tasks,
        sum(task.tokens_per_second for task in running),
        num_missing / rate if num_missing and rate else None,
        command_to_rerun(path, units.job, units.num_tasks, lost) if lost else None,
    )


def _name(worker: Path) -> tuple[int, int]:
    task, _, attempt = worker.name.partition(".")
    return int(task), int(attempt)


def _task_status(path: Path, task: int, attempts: list[Path], num_answered: int, now: float) -> TaskStatus:
    if not attempts:
        return TaskStatus(task, "waiting", 0, 0, 0.0, 0.0, "", None, "", None)
    about = _read_worker(attempts[-1])
    state, silent = about.get("state", "running"), None
    if state == "running":
        silent = _seconds_since_beat(path, attempts[-1], now)
        state = "silent" if silent > PATIENCE else state
    seconds = max(about.get("seconds", 0.0), 1e-9)
    tokens = about.get("num_prompt_tokens", 0) + about.get("num_output_tokens", 0)
    return TaskStatus(
        task, state, len(attempts), num_answered, about.get("num_answered", 0) / seconds, tokens / seconds,
        about.get("host", ""), about.get("batch_job"), about.get("message", ""), silent,
    )  # fmt: skip


def _seconds_since_beat(path: Path, worker: Path, now: float) -> float:
    beat = path / "beats" / worker.name
    return max(0.0, now - (beat if beat.exists() else worker).stat().st_mtime)


def _read_worker(worker: Path) -> dict[str, Any]:
    """{} of one that ended before it wrote anything."""
    try:
        return dict(json.loads((worker / "worker.json").read_bytes()))
    except (OSError, ValueError):
        return {}


def as_json(status: ArrayStatus) -> dict[str, Any]:
    """RunStatus's fields and what there is more, as JSON values."""
    facts = asdict(status)
    return facts.pop("run") | facts | {"path": str(status.run.path)}


def array_lines(status: ArrayStatus) -> list[str]:
    """The same for a person."""
    run = status.run
    owed = "?" if run.num_answers is None else f"{run.num_answers:,}"
    left = (
        ""
        if status.eta_seconds is None
        else f", {status.tokens_per_second:,.0f} tokens/s, {_duration(status.eta_seconds)} left"
    )
    lines = [f"{run.path}: {status.num_committed:,} of {owed} answers committed ({status.num_failed:,} failed){left}"]
    for task in status.tasks:
        where = f" on {task.host}" if task.host else ""
        attempt = f", attempt {task.num_attempts}" if task.num_attempts > 1 else ""
        said = f": {task.message}" if task.message else ""
        if task.state == "silent":
            said = f": no sign of life for {_duration(task.silent_seconds or 0.0)}"
        rate = f", {task.tokens_per_second:,.0f} tokens/s" if task.state == "running" else ""
        lines.append(f"task {task.task}: {task.state}{where}{attempt}, {task.num_answered:,} answers{rate}{said}")
    if status.run_again:
        lines.append(f"run again, unless Slurm does it (squeue): {status.run_again}")
    lines.append(f"finished: {run.path / 'results'}" if run.is_finished else f"not merged yet: batchgen merge {run.path}")
    return lines


def _duration(seconds: float) -> str:
    """3725 -> "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
