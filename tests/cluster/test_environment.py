"""Each batch system's variables, as its tasks see them."""

from __future__ import annotations

import pytest

from batchgen.cluster.environment import find_task, parse_shard
from batchgen.errors import UsageError

SLURM = {
    "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "5", "SLURM_JOB_ID": "12",
}  # fmt: skip
SGE = {"SGE_TASK_ID": "4", "SGE_TASK_FIRST": "2", "SGE_TASK_LAST": "10", "SGE_TASK_STEPSIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "index", "count"),
    [
        (SLURM, 3, 5),
        (SLURM | {"BATCHGEN_NUM_TASKS": "8"}, 7, 8),  # task 7 of 8, run again as --array=7
        (SGE, 1, 5),
        ({"PBS_ARRAY_INDEX": "2", "BATCHGEN_NUM_TASKS": "3"}, 2, 3),
        ({"PBS_ARRAYID": "0", "BATCHGEN_NUM_TASKS": "3"}, 0, 3),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "5", "AWS_BATCH_JOB_ARRAY_SIZE": "6"}, 5, 6),
        ({"JOB_COMPLETION_INDEX": "1", "BATCHGEN_NUM_TASKS": "2"}, 1, 2),
        ({"SGE_TASK_ID": "undefined", "JOB_COMPLETION_INDEX": "0", "BATCHGEN_NUM_TASKS": "1"}, 0, 1),
    ],
)
def test_tasks(environ, index, count):
    task = find_task(environ)
    assert (task.index, task.count) == (index, count) and "=" in task.where


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no batch system says which task this is"),
        ({"SGE_TASK_ID": "undefined"}, "no batch system"),
        ({"JOB_COMPLETION_INDEX": "1"}, "Kubernetes does not say how many tasks there are; set BATCHGEN_NUM_TASKS"),
        ({"PBS_ARRAY_INDEX": "3", "BATCHGEN_NUM_TASKS": "3"}, "task 3 of 3"),
        ({"PBS_ARRAY_INDEX": "3", "BATCHGEN_NUM_TASKS": "x"}, "BATCHGEN_NUM_TASKS=x: not a number"),
    ],
)
def test_what_cannot_be_known_is_said(environ, message):
    with pytest.raises(UsageError, match=message):
        find_task(environ)


def test_shard_by_hand():
    task = parse_shard("2/4")
    assert (task.index, task.count) == (2, 4)
    for wrong in ("4/4", "-1/4", "1", "1/", "a/b", "0/0", ""):
        with pytest.raises(UsageError, match="write I/N"):
            parse_shard(wrong)
