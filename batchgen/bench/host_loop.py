"""`python -m batchgen.bench.host_loop`: what the host does in a step of a full batch that decodes, without a device.

Scheduler, block pool, the step's tensors and the taking of its tokens are the real ones; only the model is left out. Times
are CPU time of this process, the median over steps. `instructions` counts what the interpreter executes in one step, without
what numpy and torch do inside: it must depend neither on the number of requests nor on their context.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from batchgen.engine.batch_inputs import build_batch_inputs
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.device_state import DeviceState
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import SchedulerConfig
from batchgen.models.inputs import BatchInputs
from batchgen.plan.window import plan_window

BUDGET = 0.3e-3  # seconds a step
WORD = 2  # what the device generates
BLOCK_SIZE = 16


class StepSeconds(NamedTuple):
    schedule: float
    inputs: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)


class SteadyDecode:
    """`num_requests` that decode together, `share` of them to a prefix of `prefix` tokens; nobody comes or goes."""

    def __init__(self, num_requests: int, prefix: int, share: int, max_tokens: int = 400) -> None:
        rng = np.random.default_rng(0)
        prefixes = [rng.integers(3, 30_000, prefix, np.int32) for _ in range(-(-num_requests // share))]
        suffixes = rng.integers(3, 30_000, (num_requests, 40), np.int32)
        window = plan_window(
            lambda r: np.concatenate([prefixes[r // share], suffixes[r]]),
            np.arange(num_requests), np.full(num_requests, prefix + 40, np.int32), BLOCK_SIZE,
        )  # fmt: skip
        longest = prefix + 40 + max_tokens
        config = SchedulerConfig(1 << 24, num_requests, longest, max_tokens)
        num_blocks = (
            2 + sum(len(p) // BLOCK_SIZE for p in prefixes) + num_requests * (-(-(40 + max_tokens) // BLOCK_SIZE) + 2)
        )
        self.scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE), window)
        self.there = DeviceState(self.scheduler.state, torch.device("cpu"))
        self.inputs: BatchInputs | None = None
        for _ in range(3):  # the prompts are computed, and the batch has decoded once
            self.step()

    def step(self) -> StepSeconds:
        times = [time.process_time()]
        step = self.scheduler.schedule()
        assert step is not None
        times.append(time.process_time())
        self.inputs = build_batch_inputs(step, self.scheduler.state, self.there, self.inputs)
        times.append(time.process_time())
        num_sampled = len(step.sample_slots)
        self.scheduler.update(step, np.full(num_sampled, WORD, np.int32), np.ones(num_sampled, bool))
        times.append(time.process_time())
        return StepSeconds(*np.diff(times).tolist())


def count_instructions(work: Any) -> int:
    """Python opcodes that a call of `work` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m batchgen.bench.host_loop", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--running", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for prefix, share in ((496, options.running), (496, 16), (4000, options.running), (4000, 64)):
        batch = SteadyDecode(options.running, prefix, share, options.steps + 100)
        median = StepSeconds(*np.median([batch.step() for _ in range(options.steps)], axis=0).tolist())
        instructions = min(count_instructions(batch.step) for _ in range(20))
        rows.append({"prefix": prefix, "share": share, "seconds": median._asdict(), "total": median.total,
                     "instructions": instructions})  # fmt: skip
        parts = ", ".join(f"{name} {1e3 * value:.3f}" for name, value in median._asdict().items())
        print(
            f"{options.running:,} running, context {prefix + 40:,}, {share:,} to a prefix: {1e3 * median.total:.3f} ms "
            f"a step ({parts}), {instructions:,} instructions",
            flush=True,
        )
    print(json.dumps({"benchmark": "batchgen.bench.host_loop", "running": options.running, "budget": BUDGET, "cases": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
