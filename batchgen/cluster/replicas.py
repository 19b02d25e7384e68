"""Several workers on one machine, `engine.replicas`: the processes of one `batchgen run`, over the units of the plan.

Each is what `run --shard I/N` is, on a GPU of its own or with its share of the CPU's threads and memory. The run that starts
them holds the folder's lock, shows one bar for all, starts again those that die, and merges at the end. What they say goes
to logs/replica-I.log.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchgen.answering import EngineResult
from batchgen.cluster.environment import ArrayTask
from batchgen.cluster.owed import owed_units
from batchgen.cluster.prepare import shared_units
from batchgen.cluster.worker import num_replicas, run_shard
from batchgen.data.run_folder import RunFolder
from batchgen.data.standard_input import refuse_standard_input
from batchgen.data.writer import PartWriter
from batchgen.engine.sizing import available_memory, choose_device, num_threads
from batchgen.engine.step import SchedulerStats
from batchgen.errors import BatchgenError, EngineError, Interrupted, TooManyFailedRows, UsageError
from batchgen.job import Job
from batchgen.prompts import Inputs
from batchgen.report.progress import Progress
from batchgen.signals import StopSignals, ignore_signals
from batchgen.text.token_store import TokenStore

MAX_DEATHS = 3  # of one replica without an answer between them
LOOK_SECONDS = 0.5
END_SECONDS = 60.0  # for a replica to commit and end after a signal


@dataclass
class Replica:
    job: Job
    index: int
    count: int
    gpu: str | None
    folder: Path
    process: SpawnProcess | None = None
    num_deaths: int = 0
    num_answered: int = 0  # when it last died
    is_done: bool = False

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"replica-{self.index}.log"

    def start(self) -> SpawnProcess:
        arguments = (self.job, ArrayTask(self.index, self.count, "replica"), self.gpu, str(self.log), os.getpid())
        self.process = multiprocessing.get_context("spawn").Process(target=_replica, args=arguments, daemon=True)
        self.process.start()
        return self.process


def run_replicas(
    inputs: Inputs, folder: RunFolder, store: TokenStore, writer: PartWriter, progress: Progress, stop: StopSignals
) -> EngineResult:
    """Answer what is owed with engine.replicas processes; what they did, together. Their parts wait to be adopted.

    Raises TooManyFailedRows, EngineError if a replica dies again and again, UsageError for devices that are not there.
    """
    job = inputs.job
    refuse_standard_input(job)
    shares = split(job)
    units = shared_units(inputs, folder, store, len(shares), "JOB")
    if not owed_units(folder.path, units, store, writer.ledger):
        return EngineResult()
    (folder.path / "logs").mkdir(exist_ok=True)
    replicas = [Replica(share, i, len(shares), gpu, folder.path) for i, (share, gpu) in enumerate(shares)]
    before = {name for name, _ in records(folder.path)}
    where = "a GPU each" if shares[0][1] is not None else f"{shares[0][0].engine.threads} CPU threads each"
    progress.say(f"{len(replicas)} replicas, {where}; they say more in {folder.path / 'logs'}")
    progress.phase("run", int(np.count_nonzero(~writer.ledger.is_answered)) * job.sampling.n, "answer")
    shown = 0
    try:
        with stop.deferred():
            for replica in replicas:
                replica.start()
            while running := [r.process for r in replicas if not r.is_done and r.process is not None]:
                wait([process.sentinel for process in running], LOOK_SECONDS)
                known = [record for name, record in records(folder.path) if name not in before]
                num_answered = sum(record["num_answered"] for record in known)
                progress.update(num_answered - shown, f"{len(running)} replicas at work")
                shown = num_answered
                if stop.received is not None:
                    break
                for replica in replicas:
                    _look_after(replica, known, progress)
    finally:
        _end(replicas)
    return together(record for name, record in records(folder.path) if name not in before)


def split(job: Job) -> list[tuple[Job, str | None]]:
    """For each replica its job, and the GPU that it is to see. Raises UsageError if there are too few of those."""
    count, device = num_replicas(job), choose_device(job.engine.device)
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        if device.index is not None or count > len(gpus):
            raise UsageError(
                f"engine.replicas: {count} need a GPU each; there are {len(gpus)}, and engine.device is {job.engine.device}"
            )
        one = job.engine.model_copy(update={"replicas": 1})
        return [(job.model_copy(update={"engine": one}), gpu) for gpu in gpus[:count]]
    share: dict[str, Any] = {"replicas": 1, "threads": max(1, num_threads(job.engine.threads) // count)}
    if job.engine.kv_memory == "auto":
        share["kv_memory"] = available_memory(device) // count
    return [(job.model_copy(update={"engine": job.engine.model_copy(update=share)}), None)] * count


def _look_after(replica: Replica, known: list[dict[str, Any]], progress: Progress) -> None:
    """Start it again if it has died. Raises as run_replicas does."""
    process = replica.process
    if replica.is_done or process is None or process.exitcode is None:
        return
    code, mine = process.exitcode, [record for record in known if record["task"] == replica.index]
    if code in (0, 3):
        replica.is_done = True
        return
    if code == TooManyFailedRows.exit_code:
        raise TooManyFailedRows(mine[-1]["message"])
    num_answered = sum(record["num_answered"] for record in mine)
    replica.num_deaths = 1 if num_answered > replica.num_answered else replica.num_deaths + 1
    replica.num_answered = num_answered
    told = mine[-1]["message"] if mine and mine[-1]["pid"] == process.pid else ""
    why = told or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
    if replica.num_deaths >= MAX_DEATHS:
        raise EngineError(
            f"replica {replica.index} ended {replica.num_deaths} times without an answer: {why}; {replica.log} says more"
        )
    progress.say(f"replica {replica.index} has died ({why}); it is started again")
    replica.start()


def _end(replicas: list[Replica]) -> None:
    alive = [r.process for r in replicas if r.process is not None and r.process.exitcode is None]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(END_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()


def records(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, worker.json) of every worker, in the order of their names."""
    for path in sorted(folder.glob("workers/*/worker.json")):
        yield path.parent.name, json.loads(path.read_bytes())


def together(known: Iterable[dict[str, Any]]) -> EngineResult:
    """The figures of several workers. Of those that were killed only their committed answers count."""
    result = EngineResult()
    for record in known:
        result.num_answered += record["num_answered"]
        if (figures := record["figures"]) is None:
            continue
        result.num_repeated += figures["num_repeated"]
        result.num_prompt_tokens += figures["num_prompt_tokens"]
        result.num_planned += figures["num_planned"]
        counts = {f.name: getattr(result.counts, f.name) + figures["counts"][f.name] for f in fields(SchedulerStats)}
        result.counts = replace(result.counts, **counts)
        result.products |= figures["products"]
        for name, seconds in figures["seconds_in_steps"].items():
            result.seconds_in_steps[name] = result.seconds_in_steps.get(name, 0.0) + seconds
    return result


def _replica(job: Job, task: ArrayTask, gpu: str | None, log: str, parent: int) -> None:
    """The process of a replica."""
    os.setsid()  # Ctrl-C reaches the run, which ends its replicas
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything asks for a GPU
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = run_shard(job, task, parent=parent)
    except (BatchgenError, Interrupted) as error:
        ignore_signals()
        print(f"batchgen: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
