"""The engine: windows of planned requests in, finished requests out. Knows token ids only, no text and no files.

One step is Scheduler.schedule -> ModelRunner.execute -> Scheduler.update. The host works `ahead` steps ahead of the device:
it schedules the next step before it waits for the tokens of the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from batchgen_kernels import Ops

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.model_runner import ModelRunner, Sampled
from batchgen.engine.prefix_groups import GroupRule, spares_enough_reads
from batchgen.engine.recovery import Recovery
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import Finished, SchedulerConfig, SchedulerStats, StepPlan
from batchgen.errors import EngineError
from batchgen.models.config import kv_cache_shape
from batchgen.models.decoder import Decoder
from batchgen.records import Window


@dataclass
class EngineStats:
    """Seconds by stage of the step, and the scheduler's exact counts."""

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "inputs", "forward", "sample", "wait", "update"), 0.0)
    )
    counts: SchedulerStats = field(default_factory=SchedulerStats)


class Engine:
    """One model, one KV cache. `generate` may be called for one window after another.

    num_blocks counts the null block; dtype is that of the KV cache. `kv_fill` is what an unused cache holds (tests use
    NaN); `check` runs the pool's invariants after every step. ahead: steps that are scheduled before the tokens of one are
    seen; None: 1 where the device works beside the host, 0 on a CPU, which gains nothing and would compute a token too many
    for each answer.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_fill: float = 0.0,
        check: bool = False,
        ahead: int | None = None,
    ) -> None:
        self.model, self.ops, self.device = model, ops, device
        self.num_blocks, self.block_size, self.check = num_blocks, block_size, check
        self.kv_cache = KVCache(kv_cache_shape(model.config, num_blocks, block_size), dtype, device, ops, kv_fill)
        self.ahead = (0 if device.type == "cpu" else 1) if ahead is None else ahead
        self.stats = EngineStats()
        c = model.config
        rule = ops.group_rule(c.num_heads, c.num_kv_heads, c.head_dim, dtype, device)
        self.group_rule: GroupRule = rule or spares_enough_reads

    def generate(
        self,
        window: Window,
        config: SchedulerConfig,
        sampling: SamplingConfig,
        row_keys: np.ndarray,
        hits_stop: Callable[[np.ndarray], bool] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[StepPlan, Scheduler], None] | None = None,
        resumed: Mapping[tuple[int, int], np.ndarray] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Finished]:
        """Answer every row of `window`; yields in finishing order.

        row_keys: [n] uint64 by position in the window. should_stop is asked before each step; once true, the generator
        ends and the running requests are dropped (the caller commits what has finished). resumed: see Scheduler.
        say is told of steps that fail, see recovery. Raises EngineError if all do.
        """
        pool = BlockPool(self.num_blocks, self.block_size)
        scheduler = Scheduler(config, pool, window, self.group_rule, resumed)
        scheduler.stats = self.stats.counts
        state, seconds = scheduler.state, self.stats.seconds
        runner = ModelRunner(self.model, self.kv_cache, self.ops, state, sampling, row_keys, self.device, seconds)
        recovery = Recovery(scheduler, say, lambda prompt: self._computes(prompt, config))
        on_device: deque[tuple[StepPlan, Sampled]] = deque()
        while on_device or not scheduler.done:
            if should_stop():
                return
            recovery.advance()
            begin = perf_counter()
            step = scheduler.schedule()
            seconds["schedule"] += perf_counter() - begin
            yield from scheduler.take_rejected()
            failed: tuple[StepPlan, Exception] | None = None
            if step is not None:
                try:
                    on_device.append((step, runner.execute(step)))
                except Exception as error:
                    failed = step, error.with_traceback(None)  # its frames hold the step's tensors
                if on_step is not None and failed is None:
                    on_step(step, scheduler)
            while len(on_device) > (self.ahead if step is not None and failed is None else 0):
                done, sampled = on_device.popleft()
                begin = perf_counter()
                try:
                    token_ids, finite = sampled.wait()
                except Exception as error:
                    failed = done, error.with_traceback(None)
                    on_device.clear()
                    break
                waited = perf_counter()
                recovery.succeeded(done)
                finished = scheduler.update(done, token_ids, finite, hits_stop)
                seconds["wait"] += waited - begin
                seconds["update"] += perf_counter() - waited
                if self.check:
                    scheduler.pool.check([state.blocks(int(slot)) for slot in state.running])
                yield from finished
            if failed is not None:
                recovery.failed(*failed)
        recovery.finish()
        yield from scheduler.take_rejected()

    def _computes(self, prompt: np.ndarray, config: SchedulerConfig) -> bool:
        """Whether a token comes after `prompt` ([n] int32). Overwrites the cache and counts nowhere."""
        zero, stats = np.zeros(1, np.int32), self.stats
        window = Window(lambda _: prompt, zero, zero + len(prompt), zero, zero, zero + 1, self.block_size)
        self.stats = EngineStats()
        try:
            list(
                self.generate(window, replace(config, max_tokens=1, num_samples=1), SamplingConfig(), zero.astype(np.uint64))
            )
        except EngineError:
            return False
        finally:
            self.stats = stats
        return True
