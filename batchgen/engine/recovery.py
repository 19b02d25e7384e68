"""When a step raises: all its requests go back into the queue with their tokens, and the job goes on.

Out of memory: the next steps are half as large. Anything else: the requests of the step are on trial. Each half of them runs
alone, until a half of one raises again. If a prompt that was computed before still can be, that one ends with a fault of its
row, and all others go on where they were; else it is not the rows, and the job ends.
The cache is empty after a failure, and tokens are computed again as after a preemption, so no answer changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from batchgen.engine.scheduler import Candidate, Scheduler
from batchgen.engine.step import StepPlan
from batchgen.errors import BatchgenError, EngineError
from batchgen.records import RowFault

MAX_UNPROVEN = 8  # requests that raise alone before anything has been computed
MAX_FRUITLESS = 2  # trials in which no request raises alone
T = TypeVar("T")
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def in_words(error: BaseException) -> str:
    """Kind and first line of the message."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


class Recovery:
    """Stands beside the scheduler of one window. `advance` before each step, then `failed` or `succeeded`.

    say tells the user; computes(prompt) says whether a prompt ([n] int32) can be computed, in a cache that is free.
    Raises EngineError where going on is of no use.
    """

    def __init__(self, scheduler: Scheduler, say: Callable[[str], None], computes: Callable[[np.ndarray], bool]) -> None:
        self.scheduler, self.say, self.computes = scheduler, say, computes
        self._groups: list[list[tuple[int, int]]] = []  # (position, first sample) of those that are still to be tried
        self._begun: dict[tuple[int, int], int] = {}  # on trial: (position, sample) -> tokens when it began
        self._unproven: list[tuple[Candidate, RowFault]] = []  # raised alone before there was a control
        self._control: int | None = None  # position of a row whose prompt has been computed
        self._num_found = self._num_fruitless = 0

    def failed(self, step: StepPlan, error: Exception) -> None:
        """`step` has raised `error`: what comes next is smaller, or a trial."""
        if isinstance(error, BatchgenError):
            raise error
        if not is_out_of_memory(error) and "CUDA error" in str(error):
            raise EngineError(f"the device has failed: {in_words(error)}; what was committed is safe") from error
        scheduler, s = self.scheduler, self.scheduler.state
        slots = [*step.slots.tolist(), *step.sample_slots.tolist()]
        in_step = {(int(s.position[slot]), int(s.sample_index[slot])) for slot in slots}
        scheduler.start_over()
        if is_out_of_memory(error):
            self._make_smaller(int(step.num_scheduled.sum()), error)
            return
        scheduler.stats.num_failed_steps += 1
        if scheduler.held is None:
            self.say(f"engine: a step of {len(step.slots)} requests raises {in_words(error)}; looking for the one that does")
            scheduler.held, self._num_found = {}, 0
        suspects = sorted((c.position, c.first_sample) for c in scheduler.waiting if (c.position, c.first_sample) in in_step)
        others = [c for c in scheduler.waiting if (c.position, c.first_sample) not in in_step]
        if self._begun and others:
            self._groups.append(sorted((c.position, c.first_sample) for c in others))
        self._hold()
        if len(suspects) == 1:
            self._convict(scheduler.held.pop(suspects[0]), error)
        else:
            half = len(suspects) // 2
            self._groups += [suspects[half:], suspects[:half]]
        self._next_trial()

    def succeeded(self, step: StepPlan) -> None:
        if self._control is None and len(step.sample_slots):
            self._control = int(self.scheduler.state.position[step.sample_slots[0]])
            self._tell_unproven()

    def finish(self) -> None:
        """No step is to come."""
        if self._unproven and self.scheduler.stats.num_output == 0:
            self._give_up(self._unproven[-1][1].message)
        self._tell_unproven()

    def advance(self) -> None:
        """End the trial in which every request has got a token on its own."""
        scheduler, s = self.scheduler, self.scheduler.state
        if scheduler.held is None or scheduler.waiting or scheduler.forks:
            return
        running = [((int(s.position[slot]), int(s.sample_index[slot])), len(s.outputs(slot))) for slot in s.running.tolist()]
        if all(tokens > self._begun.get(request, 0) for request, tokens in running):
            scheduler.start_over()
            self._hold()
            self._next_trial()

    def _make_smaller(self, num_tokens: int, error: Exception) -> None:
        scheduler = self.scheduler
        scheduler.stats.num_out_of_memory += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if num_tokens == 1:
            raise EngineError(
                f"out of memory in a step of one token ({in_words(error)}); what was committed is safe; lower "
                "engine.kv_memory, then run the same command again"
            ) from error
        budget = min(num_tokens, scheduler.config.max_num_batched_tokens) // 2
        scheduler.config = replace(scheduler.config, max_num_batched_tokens=budget)
        self.say(f"engine: out of memory in a step of {num_tokens} tokens; going on with {budget} at most")

    def _hold(self) -> None:
        """Nothing waits; all that did is held back."""
        assert self.scheduler.held is not None
        self.scheduler.held |= {(c.position, c.first_sample): c for c in self.scheduler.waiting}
        self.scheduler.waiting = []

    def _convict(self, candidate: Candidate, error: Exception) -> None:
        self._num_found += 1
        self._unproven.append((candidate, RowFault("engine_error", f"computing this row alone raises {in_words(error)}")))
        if self._control is not None:
            if not self.computes(self.scheduler.window.prompt(self._control)):
                self._give_up(in_words(error))
            self._tell_unproven()
        elif len(self._unproven) == MAX_UNPROVEN:
            self._give_up(in_words(error))

    def _next_trial(self) -> None:
        scheduler = self.scheduler
        assert scheduler.held is not None
        if self._groups:
            scheduler.waiting = [scheduler.held.pop(key) for key in self._groups.pop()]
            self._begun = {(c.position, c.first_sample): len(c.outputs) for c in scheduler.waiting}
            heapq.heapify(scheduler.waiting)
            return
        self._begun, scheduler.waiting, scheduler.held = {}, list(scheduler.held.values()), None
        heapq.heapify(scheduler.waiting)
        if not self._num_found:
            self._num_fruitless += 1
            if self._num_fruitless > MAX_FRUITLESS:
                raise EngineError(
                    "steps fail, though each of their requests can be computed alone; what was committed is safe"
                )

    def _tell_unproven(self) -> None:
        for candidate, fault in self._unproven:
            self.say(f"engine: found: {fault.message}; the row gets error_code {fault.code}")
            self.scheduler.reject(candidate, fault)
        self._unproven = []

    def _give_up(self, cause: str) -> None:
        raise EngineError(
            f"the engine fails whatever it computes: {cause}; what was committed is safe; solve this, then run the same "
            "command again"
        )


def fit_kv_cache(make: Callable[[int], T], num_blocks: int, say: Callable[[str], None]) -> T:
    """`make(num_blocks)`, or with half as many blocks, and half again, if that does not fit into memory.

    Raises EngineError if not even two blocks do.
    """
    while True:
        try:
            return make(num_blocks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if num_blocks < 4:
                raise EngineError(f"no memory for a KV cache of {num_blocks} blocks: {in_words(error)}") from error
        num_blocks //= 2
        say(f"engine: out of memory for the KV cache; going on with {num_blocks:,} blocks")
