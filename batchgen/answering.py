"""Windows of a job through the engine: loaded once, one window after another, answers to the writer row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from batchgen_kernels import select_ops

from batchgen.data.checkpoint import Checkpoint
from batchgen.data.run_folder import RunFolder
from batchgen.data.writer import PartWriter
from batchgen.engine.engine import Engine
from batchgen.engine.recovery import fit_kv_cache
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sizing import choose_device, choose_dtype, choose_kv_dtype, choose_size, hidden_tokens, prepare_cpu
from batchgen.engine.step import Finished, SchedulerConfig, SchedulerStats, StepPlan
from batchgen.engine.watchdog import Watchdog
from batchgen.errors import UsageError
from batchgen.models.config import kv_bytes_per_token
from batchgen.models.loader import eos_token_ids, load_decoder
from batchgen.plan.duplicates import Distinct
from batchgen.plan.work import ModelShape, Work
from batchgen.prompts import Inputs, entry_ranges, job_rows, plan_requests, plan_rows, sampling_config
from batchgen.records import Completion, Window
from batchgen.report.progress import Progress
from batchgen.report.roofline import calibrate, model_shape, roofline
from batchgen.signals import StopSignals
from batchgen.text.detokenizer import Detokenizer
from batchgen.text.token_store import TokenStore
from batchgen.text.tokens_in_making import TokensInMaking

CALIBRATION_SHARE = 0.02  # of the time in the engine, to measure what the device allows


@dataclass
class EngineResult:
    num_answered: int = 0
    num_repeated: int = 0  # of them, those that are copies of another row's answer
    num_prompt_tokens: int = 0  # of the rows that went through the engine
    num_planned: int = 0  # prompt tokens that the plan said would be computed
    counts: SchedulerStats = field(default_factory=SchedulerStats)
    seconds_in_steps: dict[str, float] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] | None = None  # see report/roofline.py


class Portion(NamedTuple):
    """Rows that are planned together."""

    store: TokenStore
    owed: np.ndarray  # [k] int64 entries of the store, increasing: those to be answered
    more_follow: bool = True
    largest: int | None = None  # blocks that the prompts of any portion take at most, where that is known


class Loaded(NamedTuple):
    """The engine with its weights, and how it answers."""

    engine: Engine
    scheduler_config: SchedulerConfig
    sampling: SamplingConfig
    detokenizer: Detokenizer
    shape: ModelShape
    step_timeout: float | None  # seconds


def answer(
    inputs: Inputs,
    folder: RunFolder,
    portions: Iterator[Portion],
    writer: PartWriter,
    progress: Progress,
    stop: StopSignals,
    checkpoint: Checkpoint,
    give_up: Callable[[], bool] = lambda: False,
) -> EngineResult:
    """Answer what each of `portions` owes, and hand the answers to the writer, row by row. When the next portion is asked
    for, the answers to the one before are committed. give_up: asked at every step whether to end it there.

    A portion is planned when its turn comes, so one is in memory at a time. The batch drains between two portions: a few
    hundred steps of a smaller batch against the hundred thousand rows of a window.
    """
    job = inputs.job
    result, meter = EngineResult(), Meter(inputs.max_tokens, progress)
    loaded: Loaded | None = None
    seconds = 0.0
    for store, owed, more_follow, largest in portions:
        faults = store.faults(owed)
        for i, fault in faults.items():
            writer.add(*(Completion(int(store.rows[i]), s, fault=fault) for s in range(job.sampling.n)))
        result.num_answered += len(faults) * job.sampling.n
        distinct, n = plan_requests(job, plan_rows(job, store, owed))
        if len(distinct.window) == 0:
            writer.commit()
            continue
        if loaded is None:
            loaded = load_engine(inputs, folder, writer.store.path, distinct.window, n, more_follow, largest, progress)
        meter.window(distinct.window, n)
        began = time.perf_counter()
        with stop.deferred():
            num_answered = answer_window(
                distinct, n, job.sampling.n, store, loaded, writer, checkpoint, meter,
                lambda: stop.received is not None or give_up(),
            )  # fmt: skip
            writer.commit()
        seconds += time.perf_counter() - began
        result.num_answered += num_answered
        result.num_repeated += num_answered - len(distinct.window) * n
        result.num_prompt_tokens += int(store.lengths[distinct.entries].sum(dtype=np.int64)) * job.sampling.n
        del distinct  # before the next window is planned
    checkpoint.remove()
    result.num_planned = meter.num_planned
    if loaded is not None:
        engine = loaded.engine
        result.counts, result.seconds_in_steps = engine.stats.counts, dict(engine.stats.seconds)
        result.products = dict(engine.model.products)
        rates = calibrate(engine.device, engine.model.dtype, CALIBRATION_SHARE * seconds)
        result.limits = roofline(*meter.work(result.counts), loaded.shape, rates, seconds)
    return result


def owed_windows(
    inputs: Inputs,
    folder: RunFolder,
    tokens: TokensInMaking,
    writer: PartWriter,
    checkpoint: Checkpoint,
    chosen: np.ndarray | None,
) -> Iterator[Portion]:
    """The windows of a job of one process: every row without an answer, or those at the positions `chosen` ([k] int64, of
    --only)."""
    known = None
    for store, first, end in entry_ranges(tokens):
        if store is not known:
            known = store
            owed_rows = expect_answers(inputs, folder, tokens, store, writer, chosen)
            checkpoint.forget_answered(writer.rows, writer.ledger.is_answered)
        more_follow = tokens.num_rows is None or end < tokens.num_rows
        yield Portion(store, first + np.flatnonzero(np.isin(store.rows[first:end], owed_rows)), more_follow)


def expect_answers(
    inputs: Inputs,
    folder: RunFolder,
    tokens: TokensInMaking,
    store: TokenStore,
    writer: PartWriter,
    chosen: np.ndarray | None,
) -> np.ndarray:
    """[k] int64: positions of the rows of `store` that are to be answered now. Tells the writer who its rows are, and
    `status` how many there are."""
    job = inputs.job
    if len(writer.rows) != store.num_rows:  # it knew the head only
        writer.learn(job_rows(store))
    owed = np.setdiff1d(store.rows, writer.finished()) if chosen is None else chosen
    standing = writer.expect(owed, job.output.max_failed(tokens.num_rows or inputs.most_rows))
    folder.update_state({"num_rows": tokens.num_rows, **standing})
    return owed


def answer_window(
    distinct: Distinct,
    n: int,
    num_samples: int,
    store: TokenStore,
    loaded: Loaded,
    writer: PartWriter,
    checkpoint: Checkpoint,
    meter: Meter,
    should_stop: Callable[[], bool],
) -> int:
    """Compute `n` samples of each row of the window; every row gets `num_samples` answers. Returns how many were given."""
    window, detokenizer = distinct.window, loaded.detokenizer
    at = writer.rows.index(store.rows[window.index])
    keys, hashes = writer.rows.keys[at], writer.rows.prompt_hashes[at]
    resumed = checkpoint.take(keys, hashes, n, loaded.scheduler_config.max_tokens)
    meter.resumed(resumed.values())
    samples: dict[int, list[Completion]] = {}
    scheduler: Scheduler | None = None

    def save() -> None:
        if scheduler is not None:
            writer.commit()  # what has ended is not in the checkpoint, so it must be in a part
            # A sample whose row waits for others: computing its last token again ends it again
            ended = {(p, one.sample_index): one.token_ids[:-1] for p, of_row in samples.items() for one in of_row}
            checkpoint.save(keys, hashes, scheduler.unfinished() | ended)

    def after_step(step: StepPlan, its_scheduler: Scheduler) -> None:
        nonlocal scheduler
        watchdog.end()
        scheduler = its_scheduler
        meter.step(step, scheduler)
        writer.commit_if_due()
        checkpoint.save_if_due(save)
        watchdog.begin()

    def before_step() -> bool:
        watchdog.begin()
        return should_stop()

    def save_all() -> None:
        writer.commit()
        save()

    num_answered = 0
    watchdog = Watchdog(loaded.step_timeout, writer.store.path / "hang.txt", save_all)
    with watchdog:
        for finished in loaded.engine.generate(
            window,
            loaded.scheduler_config,
            loaded.sampling,
            store.row_keys[window.index],
            hits_stop=detokenizer.hits_stop if detokenizer.stop else None,
            should_stop=before_step,
            on_step=after_step,
            resumed=resumed,
            say=meter.progress.say,
        ):
            watchdog.end()
            position = finished.position
            of_row = samples.setdefault(position, [])
            of_row.append(complete(int(store.rows[window.index[position]]), finished, detokenizer))
            meter.finished(finished)
            if len(of_row) == n:  # a row is committed whole, so that a resumed run never owes half of one
                for entry in distinct.rows(position).tolist():
                    answers = fan_out(samples[position], int(store.rows[entry]), num_samples)
                    writer.add(*answers)
                    num_answered += len(answers)
                del samples[position]
    if scheduler is not None and not scheduler.done:  # it was stopped
        save()
    return num_answered


def fan_out(answers: list[Completion], row: int, num_samples: int) -> list[Completion]:
    """`answers` of one row as those of `row`: its own as they are, else copies, for which nothing was computed."""
    own = [replace(one, row=row) for one in answers]
    copied = [replace(one, num_cached_tokens=one.num_prompt_tokens, num_preemptions=0) for one in own]
    first = own if answers[0].row == row else copied
    return first + [replace(copied[0], sample_index=s) for s in range(len(first), num_samples)]


def load_engine(
    inputs: Inputs,
    folder: RunFolder,
    place: Path,
    window: Window,
    n: int,
    more_follow: bool,
    largest: int | None,
    progress: Progress,
) -> Loaded:
    """The engine, its pool sized for `window` with `n` samples of each row; with more_follow, for any of the portions.

    place: a folder in which only this process writes.
    """
    job = inputs.job
    progress.phase("load")
    device = choose_device(job.engine.device)
    threads = prepare_cpu(job.engine.threads)
    dtype = choose_dtype(job.engine.dtype, device)
    kv_dtype = choose_kv_dtype(job.engine.kv_dtype, dtype)
    try:
        ops = select_ops(job.engine.backend, device, job.engine.batch_invariant)
    except ValueError as error:
        raise UsageError(f"engine: {error}") from None
    products, int8 = folder.products(), job.engine.dtype == "int8"
    model = load_decoder(inputs.files, device, dtype, ops, inputs.max_model_len, products, int8)
    agreed = products or folder.choose_products(model.products, place)
    if not products and agreed != model.products:  # another worker chose first
        del model
        model = load_decoder(inputs.files, device, dtype, ops, inputs.max_model_len, agreed, int8)
    size = choose_size(
        device, window, kv_bytes_per_token(inputs.config, kv_dtype), job.engine.kv_memory,
        job.engine.max_num_batched_tokens, job.engine.max_running_requests, inputs.max_tokens, n, more_follow, largest,
    )  # fmt: skip
    engine = fit_kv_cache(
        lambda num_blocks: Engine(model, ops, num_blocks, job.engine.block_size, device, kv_dtype),
        size.num_blocks,
        progress.say,
    )
    progress.close()
    num_tokens, share = (engine.num_blocks - 1) * job.engine.block_size, engine.num_blocks / size.num_blocks
    progress.say(
        f"engine: {device} with {threads} threads, {'int8 and ' * int8}{str(dtype).removeprefix('torch.')}, "
        f"backend {ops.backend} ({ops.backend_reason}), KV pool of {num_tokens:,} tokens "
        f"of {str(kv_dtype).removeprefix('torch.')} ({size.kv_bytes * share / 2**20:,.0f} MiB, {size.reason})"
    )
    for choice in ops.choices:
        if choice.implementation != ops.backend:
            progress.say(f"engine: {choice.op} runs on {choice.implementation}, because {choice.reason}")

    eos = frozenset(job.sampling.stop_token_ids)
    if not job.sampling.ignore_eos:
        eos |= eos_token_ids(inputs.files)
    # torch's attention reads a cache of another dtype request by request
    shares_reads = ops.shares_prefix_reads and (kv_dtype == dtype or ops.backend != "torch")
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_running_requests=size.max_running_requests,
        max_model_len=inputs.max_model_len,
        max_tokens=inputs.max_tokens,
        num_samples=n,
        eos_token_ids=eos,
        prefix_cache=job.engine.prefix_cache,
        prefix_groups=job.engine.prefix_cache and shares_reads,
        hidden_tokens=hidden_tokens(device, dtype),
    )
    detokenizer = Detokenizer(inputs.tokenizer, job.sampling.stop, eos)
    shape = model_shape(inputs.config, dtype, kv_dtype)
    return Loaded(engine, scheduler_config, sampling_config(job), detokenizer, shape, job.engine.step_timeout)


def complete(row: int, finished: Finished, detokenizer: Detokenizer) -> Completion:
    """A finished request as the answer of its row."""
    completion = Completion(
        row,
        finished.sample_index,
        finished.token_ids,
        num_prompt_tokens=finished.num_prompt_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        num_preemptions=finished.num_preemptions,
        fault=finished.fault,
    )
    if finished.fault is None:
        completion.finish_reason = finished.finish_reason
        completion.text, completion.stop_reason = detokenizer.finish(finished.token_ids, finished.finish_reason)
    return completion


class Meter:
    """Turns steps and finished requests into progress (tokens to compute, known for prompts, estimated for answers), and
    counts the work that they were."""

    def __init__(self, max_tokens: int, progress: Progress) -> None:
        self.max_tokens, self.progress = max_tokens, progress
        self.num_requests = self.num_planned = self.num_finished = self.num_output = 0
        self.num_sampled = self.num_tokens = self.context = self.spared_tokens = self.spared_context = 0

    def window(self, window: Window, num_samples: int) -> None:
        """Another window begins."""
        self.num_requests += len(window) * num_samples
        self.num_planned += window.num_computed()
        self.progress.phase("run", self.num_planned + self.num_requests * self.max_tokens)
        self.progress.update(self.num_tokens)

    def resumed(self, token_ids: Collection[np.ndarray]) -> None:
        if token_ids:
            self.progress.say(f"going on with {len(token_ids)} unfinished answers of {sum(map(len, token_ids)):,} tokens")

    def step(self, step: StepPlan, scheduler: Scheduler) -> None:
        counts = scheduler.stats
        first, computed = step.first_position.astype(np.int64), step.num_scheduled.astype(np.int64)
        self.num_tokens += int(computed.sum())
        self.context += int((computed * first + computed * (computed + 1) // 2).sum())
        self.num_sampled += len(step.sample_slots)
        seen = counts.num_cached + counts.num_prefill
        facts = (
            f"answers {self.num_finished}/{self.num_requests}, {len(step.slots)} running, "
            f"hits {counts.num_cached / max(seen, 1):.0%}, prefill {counts.num_prefill:,} decode {counts.num_decode:,}"
        )
        mean_output = self.num_output / self.num_finished if self.num_finished else self.max_tokens
        total = self.num_planned + counts.num_recomputed + int(self.num_requests * max(mean_output - 1, 0))
        self.progress.update(int(computed.sum()), facts, total)

    def finished(self, finished: Finished) -> None:
        self.num_finished += 1
        self.num_output += len(finished.token_ids)
        cached = finished.num_cached_tokens
        self.spared_tokens += cached
        self.spared_context += cached * (cached + 1) // 2

    def work(self, counts: SchedulerStats) -> tuple[Work, Work]:
        """What was computed and read, and what would have been without a plan: no prompt shared, nor its reads."""
        done = Work(counts.num_steps, self.num_tokens, self.num_sampled, self.context, counts.num_kv_read)
        return done, done._replace(
            query_tokens=self.num_tokens + self.spared_tokens,
            context=self.context + self.spared_context,
            kv_read=counts.num_kv_visible + self.spared_tokens,
        )
