"""Which part of how many this process is: the one place where a batch system's variables are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.errors import UsageError

NUM_TASKS = (
    "BATCHGEN_NUM_TASKS"  # for systems that do not say how many tasks there are, and for a task that runs again alone
)


@dataclass(frozen=True)
class ArrayTask:
    index: int  # 0 .. count - 1
    count: int
    where: str  # whose variable said so, such as "Slurm (SLURM_ARRAY_TASK_ID=3)"


@dataclass(frozen=True)
class _System:
    """Names of the variables that hold a task's id, the first and last id, their step, and the number of tasks."""

    name: str
    id: str
    first: str = ""
    last: str = ""
    step: str = ""
    count: str = ""


SYSTEMS = (
    _System(
        "Slurm", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP",
        "SLURM_ARRAY_TASK_COUNT",
    ),
    _System("SGE", "SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE"),
    _System("PBS", "PBS_ARRAY_INDEX"),
    _System("Torque", "PBS_ARRAYID"),
    _System("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX", count="AWS_BATCH_JOB_ARRAY_SIZE"),
    _System("Kubernetes", "JOB_COMPLETION_INDEX"),
)  # fmt: skip


def parse_shard(text: str) -> ArrayTask:
    """`I/N` of --shard, I from 0. Raises UsageError."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--shard {text}: write I/N with I from 0 to N - 1, such as 0/4 for the first of four")
    return ArrayTask(int(index), int(count), f"--shard {text}")


def find_task(environ: Mapping[str, str]) -> ArrayTask:
    """The task that the batch system says this process is. Raises UsageError if none does, or not how many there are."""
    for system in SYSTEMS:
        if environ.get(system.id, "").isdecimal():  # SGE writes "undefined" outside an array
            return _task(system, environ)
    raise UsageError(
        "--shard auto: no batch system says which task this is; there is none of "
        f"{', '.join(system.id for system in SYSTEMS)}. Write --shard I/N"
    )


def _task(system: _System, environ: Mapping[str, str]) -> ArrayTask:
    where = f"{system.name} ({system.id}={environ[system.id]})"
    if NUM_TASKS in environ:  # ids count from 0, as in the script that `submit` writes, whichever of them run now
        if not environ[NUM_TASKS].isdecimal():
            raise UsageError(f"{NUM_TASKS}={environ[NUM_TASKS]}: not a number")
        index, count = int(environ[system.id]), int(environ[NUM_TASKS])
    else:
        first, step = int(environ.get(system.first) or 0), int(environ.get(system.step) or 1)
        index = (int(environ[system.id]) - first) // step
        if environ.get(system.count):
            count = int(environ[system.count])
        elif environ.get(system.last):
            count = (int(environ[system.last]) - first) // step + 1
        else:
            raise UsageError(f"--shard auto: {system.name} does not say how many tasks there are; set {NUM_TASKS}")
    if index >= count:
        raise UsageError(f"--shard auto: task {index} of {count} by {where}: there is no such part")
    return ArrayTask(index, count, where)


def batch_job(environ: Mapping[str, str]) -> str | None:
    """Slurm's id of the array that this process is a task of."""
    return environ.get("SLURM_ARRAY_JOB_ID")
