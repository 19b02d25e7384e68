"""What a task does when Slurm warns it of its time limit."""

from __future__ import annotations

import os

import pytest

from batchgen.cluster.caches import CACHES, own_caches
from batchgen.cluster.requeue import requeue
from batchgen.errors import Interrupted

TASK = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "21"}


def warned(num_answered: int | None, signal: str = "USR1") -> Interrupted:
    interrupted = Interrupted("stopped", signal)
    interrupted.num_answered = num_answered
    return interrupted


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A program of that name that writes down its arguments and ends with the code in `code`."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/bash\ncd {tmp_path}; echo "$@" >>calls; echo no such job >&2; exit $(cat code)\n')
    program.chmod(0o755)
    (tmp_path / "code").write_text("0")
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_task_that_got_somewhere_runs_again(scontrol):
    ended = requeue(warned(5), TASK)
    assert (scontrol / "calls").read_text() == "requeue 17_3\n", "the task, not the array"
    assert str(ended) == "stopped; Slurm runs task 17_3 again" and ended.exit_code == 75


def test_a_task_that_got_nowhere_does_not_run_for_ever(scontrol):
    assert "longer --time" in str(requeue(warned(0), TASK))
    assert (scontrol / "calls").read_text() == ""


@pytest.mark.parametrize(
    ("interrupted", "environ"),
    [(warned(5, "TERM"), TASK), (warned(5), {}), (warned(5), {"SLURM_JOB_ID": "21"}), (warned(None), TASK)],
)
def test_other_signals_and_other_systems_and_whole_jobs_are_left_alone(scontrol, interrupted, environ):
    assert requeue(interrupted, environ) is interrupted and (scontrol / "calls").read_text() == ""


def test_a_refusal_is_told(scontrol, monkeypatch):
    (scontrol / "code").write_text("1")
    ended = requeue(warned(5), TASK)
    assert str(ended) == "stopped; Slurm will not run task 17_3 again: scontrol requeue 17_3: no such job"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "No such file" in str(requeue(warned(5), TASK))


def test_caches_of_its_own_unless_the_user_says_where(monkeypatch, tmp_path):
    for variable in CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    folders = []
    for _ in range(2):
        with own_caches():
            folders.append(os.path.dirname(os.environ["CUDA_CACHE_PATH"]))
            assert os.path.isdir(folders[-1]) and os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert len(set(folders)) == 2 and not any(map(os.path.exists, folders)) and "CUDA_CACHE_PATH" not in os.environ
