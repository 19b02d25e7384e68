"""batchgen as one of the systems that are compared, and the process that each system gets for itself.

Its own process, so that no system runs under another's settings (MKL's mode, malloc) or beside another's weights.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from batchgen.bench.physics import LinearSeconds, profiled, time_linears
from batchgen.bench.workloads import BLOCK_SIZE, Workload
from batchgen.engine.sizing import EngineSize, choose_size, prepare_cpu
from batchgen.errors import BatchgenError
from batchgen.models.config import kv_bytes_per_token
from batchgen.records import Window


@dataclass
class Run:
    """One system's answer to a workload."""

    seconds: float
    tokens: list[list[int]]  # of every request of the workload, in its order
    num_prefill: int  # prompt tokens that went through the model, padding included
    facts: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    def calibrate(self, workload: Workload) -> str:
        """Choose what a user would have to tune, by trial on a slice; returns the choice and the trials in words."""
        ...

    def run(self, workload: Workload) -> Run: ...


class BatchgenSystem:
    """The engine as the runner drives it: plan, sizes, KV cache and pool are made inside the time."""

    def __init__(self, model: str, threads: int, int8: bool = False) -> None:
        from batchgen_kernels import select_ops

        from batchgen.models.loader import load_config, load_decoder, resolve_model

        prepare_cpu(threads)
        files = resolve_model(model)
        self.config = load_config(files)
        self.device = torch.device("cpu")
        self.ops = select_ops("auto", self.device)
        self.model = load_decoder(files, self.device, torch.float32, self.ops, int8=int8)

    def calibrate(self, workload: Workload) -> str:
        size = self.size(workload, workload.window())
        return f"sizes from the plan: {size.max_running_requests} requests, {size.max_num_batched_tokens} tokens a step"

    def size(self, workload: Workload, window: Window) -> EngineSize:
        per_token = kv_bytes_per_token(self.config, torch.float32)
        memory = (workload.num_blocks + 1) * BLOCK_SIZE * per_token  # and the null block
        return choose_size(self.device, window, per_token, memory, "auto", "auto", workload.max_tokens, workload.num_samples)

    def run(self, workload: Workload) -> Run:
        from batchgen.engine.engine import Engine
        from batchgen.engine.sampler import SamplingConfig
        from batchgen.engine.step import SchedulerConfig

        steps: Counter[tuple[int, int]] = Counter()
        begin = time.perf_counter()
        window = workload.window()
        size = self.size(workload, window)
        planned = time.perf_counter()
        engine = Engine(self.model, self.ops, size.num_blocks, BLOCK_SIZE, self.device, torch.float32)
        config = SchedulerConfig(
            max_num_batched_tokens=size.max_num_batched_tokens,
            max_running_requests=size.max_running_requests,
            max_model_len=self.config.max_supported_len,
            max_tokens=workload.max_tokens,
            num_samples=workload.num_samples,
            prefix_groups=self.ops.shares_prefix_reads,
        )
        finished = engine.generate(
            window, config, SamplingConfig(), workload.row_keys[window.index],
            on_step=lambda step, _: steps.update([(int(step.num_scheduled.sum()), len(step.sample_slots))]),
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in workload.requests()]
        for f in finished:
            if f.fault is not None:
                raise BatchgenError(f"row {int(window.index[f.position])} failed: {f.fault.message}")
            request = int(window.index[f.position]) * workload.num_samples + f.sample_index
            tokens[request] = f.token_ids.tolist()
        seconds = time.perf_counter() - begin
        counts = engine.stats.counts
        stages = {"plan": planned - begin, **engine.stats.seconds}
        stages["other"] = seconds - sum(stages.values())
        facts = {
            "stage_seconds": stages,
            "num_steps": counts.num_steps,
            "max_running": counts.max_running,
            "num_preemptions": counts.num_preemptions,
            "num_recomputed": counts.num_recomputed,
            "num_planned": window.num_computed(),
            "kv_read_factor": counts.num_kv_visible / max(counts.num_kv_read, 1),
            "max_num_batched_tokens": size.max_num_batched_tokens,
            "steps": [[rows, sampled, n] for (rows, sampled), n in sorted(steps.items())],
        }
        return Run(seconds, tokens, counts.num_prefill + counts.num_recomputed, facts)

    def linear_seconds(self, max_rows: int) -> LinearSeconds:
        return time_linears(self.model, max_rows)

    def min_rows(self) -> int:
        """Rows that a step is padded to."""
        return self.model.min_rows

    def profile(self, workload: Workload) -> dict[str, float]:
        """Seconds by part of a second run; `other in forward` is what no part covers."""
        with profiled(self.ops) as seconds:
            run = self.run(workload)
        stages = run.facts["stage_seconds"]
        parts = dict(seconds)
        parts["other in forward"] = stages.pop("forward") - sum(parts.values())
        return parts | stages


class SystemFailed(Exception):
    """A system could not do what it was asked; the message is its reason."""


class TooSlow(SystemFailed):
    """It was given enough time; its process has been ended."""


class SystemProcess:
    """One system in one process, waiting while the others run. It starts with the first call, and again after TooSlow."""

    def __init__(self, make: Callable[[str, int], Any], model: str, threads: int) -> None:
        self.make, self.model, self.threads = make, model, threads
        self.process: Any = None

    def start(self) -> tuple[Connection, Connection]:
        """Start the process; returns (what it says, what it is told)."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.make, self.model, self.threads), daemon=True)
        self.process.start()
        theirs.close()
        return ours, ours

    def call(self, method: str, *args: Any, seconds: float | None = None) -> Any:
        """The method's result. SystemFailed with its reason or with how its process ended; TooSlow after `seconds`."""
        self.ready()
        self.writer.send((method, args))
        return self._receive(seconds)

    def ready(self) -> None:
        """Start the process if there is none, and wait until its system is there."""
        if self.process is None:
            self.reader, self.writer = self.start()
            try:
                self._receive(None)
            except SystemFailed:
                self.close()
                raise

    def _receive(self, seconds: float | None) -> Any:
        if not self.reader.poll(seconds):
            self.process.kill()
            self.close()
            raise TooSlow(f"stopped after {seconds:.0f} s")
        try:
            result, error = self.reader.recv()
        except EOFError:
            raise SystemFailed(f"its process ended with exit code {self.close()}") from None
        if error is not None:
            raise SystemFailed(error)
        return result

    def close(self) -> int | None:
        """End the process; returns its exit code."""
        if self.process is None:
            return None
        self.reader.close()
        self.writer.close()
        code, self.process = self.wait(), None
        return code

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


class ScriptProcess(SystemProcess):
    """A system in another python's environment: a script that speaks over stdin and stdout as peer_vllm.py says.

    `arguments` are its own; workloads go there as plain lists, and runs come back as dictionaries. What it prints goes to
    the file `log`.
    """

    def __init__(self, python: Path, script: Path, arguments: dict[str, Any], log: Path) -> None:
        self.command, self.log = [str(python), str(script), json.dumps(arguments)], log
        self.process: Any = None

    def start(self) -> tuple[Connection, Connection]:
        # The paths of this python are not those of the other one
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        out, in_ = os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno())
        self.process.stdout.close()
        self.process.stdin.close()
        return Connection(out, writable=False), Connection(in_, readable=False)

    def call(self, method: str, *args: Any, seconds: float | None = None) -> Any:
        (workload,) = args
        prompts = [p.tolist() for p in workload.requests()]
        plain = (prompts, workload.max_tokens, workload.num_blocks * BLOCK_SIZE)
        result = super().call(method, *plain, seconds=seconds)
        return Run(**result) if method == "run" else result

    def wait(self) -> int | None:
        return self.process.wait()


def _serve(connection: Any, make: Callable[[str, int], Any], model: str, threads: int) -> None:
    """The process: make the system, then answer one call after another until the other side closes."""
    system: Any = None
    method, args = "", ()
    while True:
        try:
            if system is None:
                system, result = make(model, threads), None
            else:
                result = getattr(system, method)(*args)
            connection.send((result, None))
        except Exception as e:
            traceback.print_exc()
            connection.send((None, f"{type(e).__name__}: {' '.join(str(e).split())}"))
        try:
            method, args = connection.recv()
        except EOFError:
            return


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two answers differ; None if they are equal."""
    different = np.flatnonzero(np.array(a[: len(b)]) != np.array(b[: len(a)]))
    if len(different):
        return int(different[0])
    return None if len(a) == len(b) else min(len(a), len(b))
