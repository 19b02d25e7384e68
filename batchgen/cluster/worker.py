"""One worker of a job that several share: `batchgen run JOB --shard I/N`, in a folder that `batchgen prepare` has made.

It takes no lock and changes nothing that others write: it claims units by leases, and commits into workers/TASK.ATTEMPT/,
parts and commit log of its own. workers/TASK.ATTEMPT/worker.json says how far it is. `batchgen merge` adopts all of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from batchgen.answering import EngineResult, Portion, answer
from batchgen.cluster.environment import ArrayTask, batch_job
from batchgen.cluster.leases import PATIENCE, Leases
from batchgen.cluster.units import Units, require_units
from batchgen.data.budget import ErrorBudget
from batchgen.data.durable import explain_os_errors, write_atomically
from batchgen.data.part_store import PartStore
from batchgen.data.run_folder import RunFolder
from batchgen.data.workers import AllAnswers
from batchgen.data.writer import PartWriter
from batchgen.engine.sizing import choose_device
from batchgen.errors import Interrupted, RunFolderError, UsageError
from batchgen.job import Job
from batchgen.plan.shards import units_of_task
from batchgen.prompts import job_fingerprint, job_rows, open_inputs
from batchgen.records import Completion
from batchgen.report.progress import Progress
from batchgen.signals import StopSignals
from batchgen.text.token_store import TokenStore

PATIENCE_VARIABLE = "BATCHGEN_PATIENCE"  # seconds after which a worker without a beat is taken for dead


def run_shard(job: Job, task: ArrayTask, progress: Progress | None = None, parent: int | None = None) -> int:
    """Answer units of the job until none is left; the exit code. Raises what run_job raises.

    parent: id of the process that this one is not to outlive.
    """
    progress = progress or Progress()
    if (replicas := num_replicas(job)) > 1:
        raise UsageError(
            f"engine.replicas: {replicas} with --shard: a task is one worker; start {replicas} times as many tasks, "
            "with one GPU each, or set it to 1"
        )
    with StopSignals() as stop:
        progress.phase("open")
        folder = RunFolder(job.output.path)  # not entered: its lock is for those who change what all share
        units = require_units(folder.path)
        inputs = open_inputs(job)
        folder.check_prepared(job_fingerprint(inputs))
        store = open_store(folder.path)
        rows, output = job_rows(store), job.output
        own = units_of_task(units.costs, task.index, task.count)
        with Worker(folder.path, task) as worker:
            progress.say(
                f"task {task.index} of {task.count} ({task.where}): worker {worker.name}, {len(own)} of {len(units)} units, "
                "then what others leave"
            )
            leases = Leases(folder.path, worker.name, len(units), patience())
            answers = AllAnswers(folder.path, rows)
            max_failed = output.max_failed(store.num_rows)
            with (
                leases.beating(end_with(parent)),
                PartWriter(worker.store, rows, output.commit_rows, output.commit_seconds, output.compression) as writer,
            ):
                writer.on_commit = worker.count
                portions = claimed_units(leases, own, units, store, answers, writer, max_failed, job.engine.block_size)
                worker.result = answer(inputs, folder, portions, writer, progress, stop)
            progress.close()
        progress.say(
            f"worker {worker.name}: {worker.num_answered} answers; `batchgen merge {folder.path}` when all have ended"
        )
    return 3 if worker.num_failed else 0


def claimed_units(
    leases: Leases,
    own: range,
    units: Units,
    store: TokenStore,
    answers: AllAnswers,
    writer: PartWriter,
    max_failed: int | None,
    block_size: int,
) -> Iterator[Portion]:
    """Units as they are claimed, less what anyone has answered; each is done when the next one is asked for.

    Raises TooManyFailedRows: rows of others count when a unit begins, those of this worker at once.
    """
    blocks = -(-store.lengths // block_size)
    largest = max((int(blocks[units[u]].sum()) for u in range(len(units))), default=0)
    while (unit := leases.wait_for_unit(own)) is not None:
        ledger = answers.look()
        writer.budget = ErrorBudget(max_failed, int(ledger.is_failed.sum()))
        writer.budget.check()
        entries = units[unit]
        owed = entries[~ledger.is_answered[ledger.rows.index(store.rows[entries])]]
        if len(owed):
            yield Portion(store, owed, len(units) > 1, largest)
        leases.finish(unit)


class Worker:
    """workers/TASK.ATTEMPT/, its own from the moment it is made, and its worker.json."""

    def __init__(self, folder: Path, task: ArrayTask) -> None:
        self.task = task
        with explain_os_errors(folder / "workers"):
            (folder / "workers").mkdir(exist_ok=True)
            self.attempt = 0
            while True:
                self.name = f"{task.index:04d}.{self.attempt}"
                try:
                    (folder / "workers" / self.name).mkdir()
                    break
                except FileExistsError:
                    self.attempt += 1
            self.store = PartStore(folder / "workers" / self.name)
            self.store.parts.mkdir()
        self.num_answered = self.num_failed = self.num_prompt_tokens = self.num_output_tokens = 0
        self.result: EngineResult | None = None
        self._began = time.monotonic()
        self._started_at = time.time()

    def __enter__(self) -> Worker:
        self.write("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Interrupted):
            error.num_answered = self.num_answered
        state = "finished" if error is None else "interrupted" if isinstance(error, Interrupted) else "failed"
        self.write(state, "" if error is None else str(error) or type(error).__name__)

    def count(self, completions: Sequence[Completion]) -> None:
        """They are committed."""
        self.num_answered += len(completions)
        self.num_failed += sum(one.fault is not None for one in completions)
        self.num_prompt_tokens += sum(one.num_prompt_tokens for one in completions)
        self.num_output_tokens += sum(len(one.token_ids) for one in completions)
        self.write("running")

    def write(self, state: str, message: str = "") -> None:
        about: dict[str, Any] = {
            "task": self.task.index,
            "attempt": self.attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "batch_job": batch_job(os.environ),
            "started_at": self._started_at,
            "updated_at": time.time(),
            "state": state,
            "message": message,
            "num_answered": self.num_answered,
            "num_failed": self.num_failed,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seconds": time.monotonic() - self._began,
            "figures": asdict(self.result) if self.result else None,
        }
        write_atomically(self.store.path / "worker.json", lambda file: file.write(json.dumps(about, indent=2).encode()))


def open_store(folder: Path) -> TokenStore:
    """Raises RunFolderError if it is not there."""
    try:
        return TokenStore.open(folder / "tokens.arrow")
    except FileNotFoundError:
        raise RunFolderError(f"{folder}: tokens.arrow is not there; run `batchgen prepare` again") from None


def num_replicas(job: Job) -> int:
    """auto: a GPU each, or one on a CPU."""
    if job.engine.replicas != "auto":
        return job.engine.replicas
    device = choose_device(job.engine.device)
    return torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1


def patience() -> float:
    """Seconds without a beat after which a worker is taken for dead. Raises UsageError."""
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{PATIENCE_VARIABLE}={text}: not a number of seconds")
    return seconds


def end_with(parent: int | None) -> Callable[[], None]:
    """A check that ends this process in order, once, if it has another parent now."""
    told = False

    def check() -> None:
        nonlocal told
        if parent is not None and os.getppid() != parent and not told:
            told = True
            os.kill(os.getpid(), signal.SIGTERM)

    return check
