"""batchgen as one of the systems that are compared, and the process that each system gets for itself.

Its own process, so that no system runs under another's settings (MKL's mode, malloc) or beside another's weights.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from batchgen.bench.physics import LinearSeconds, profiled, time_linears
from batchgen.bench.workloads import BLOCK_SIZE, Workload
from batchgen.engine.sizing import EngineSize, choose_size, prepare_cpu
from batchgen.errors import BatchgenError
from batchgen.models.config import kv_bytes_per_token


@dataclass
class Run:
    """One system's answer to a workload."""

    seconds: float
    tokens: list[list[int]]  # of every row, in file order
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
        return f"sizes from the plan: {self.size(workload).max_num_batched_tokens} tokens a step"

    def size(self, workload: Workload) -> EngineSize:
        per_token = kv_bytes_per_token(self.config, torch.float32)
        return choose_size(self.device, workload.window(), per_token, "auto", "auto", "auto", workload.max_tokens, 1)

    def run(self, workload: Workload) -> Run:
        from batchgen.engine.engine import Engine
        from batchgen.engine.sampler import SamplingConfig
        from batchgen.engine.step import SchedulerConfig

        steps: Counter[tuple[int, int]] = Counter()
        begin = time.perf_counter()
        window = workload.window()
        size = choose_size(
            self.device,
            window,
            kv_bytes_per_token(self.config, torch.float32),
            "auto",
            "auto",
            "auto",
            workload.max_tokens,
            1,
        )
        planned = time.perf_counter()
        engine = Engine(self.model, self.ops, size.num_blocks, BLOCK_SIZE, self.device, torch.float32)
        config = SchedulerConfig(
            max_num_batched_tokens=size.max_num_batched_tokens,
            max_running_requests=size.max_running_requests,
            max_model_len=self.config.max_supported_len,
            max_tokens=workload.max_tokens,
            eos_token_ids=frozenset(workload.end_token_ids),
            prefix_groups=self.ops.shares_prefix_reads,
        )
        finished = engine.generate(
            window, config, SamplingConfig(), workload.row_keys[window.index],
            on_step=lambda step, _: steps.update([(int(step.num_scheduled.sum()), len(step.sample_slots))]),
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in workload.prompts]
        for f in finished:
            if f.fault is not None:
                raise BatchgenError(f"row {int(window.index[f.position])} failed: {f.fault.message}")
            tokens[int(window.index[f.position])] = f.token_ids.tolist()
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


class SystemProcess:
    """One system in one process, waiting while the others run."""

    def __init__(self, make: Callable[[str, int], Any], model: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, model, threads), daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def call(self, method: str, *args: Any) -> Any:
        """The method's result; SystemFailed with the reason it gives, or with how its process ended."""
        self.connection.send((method, args))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self.connection.recv()
        except EOFError:
            self.process.join()
            raise SystemFailed(f"its process ended with exit code {self.process.exitcode}") from None
        if error is not None:
            raise SystemFailed(error)
        return result

    def close(self) -> None:
        self.connection.close()
        self.process.join()


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
