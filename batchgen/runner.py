"""run_job: the straight line from a job file to merged results. The file to read first.

Job -> Reader -> Template -> Tokenizer -> Token store -> Plan -> Engine -> Detokenize -> PartWriter -> Merge -> Report
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from batchgen_kernels import select_ops

from batchgen.data.durable import write_atomically
from batchgen.data.merge import MergeSummary, merge
from batchgen.data.reader import Reader, open_reader, require_columns
from batchgen.data.rows import iter_rows, row_keys
from batchgen.data.run_folder import RunFolder, read_job_file
from batchgen.data.schema import results_schema
from batchgen.data.writer import PartWriter
from batchgen.engine.engine import Engine
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sizing import choose_device, choose_dtype, choose_kv_dtype, choose_size, prepare_cpu
from batchgen.engine.step import Finished, SchedulerConfig, StepPlan
from batchgen.errors import CorruptRunError, UsageError
from batchgen.job import Job
from batchgen.models.config import ModelConfig, kv_bytes_per_token
from batchgen.models.loader import ModelFiles, eos_token_ids, fingerprint, load_config, load_decoder, resolve_model
from batchgen.plan.partition import Partitioning, choose_partitioning, cut_large, merge_small
from batchgen.plan.window import plan_window
from batchgen.records import Completion, Prompt, RowFault, Window
from batchgen.report.progress import Progress
from batchgen.report.summary import summary_lines
from batchgen.signals import StopSignals
from batchgen.text.detokenizer import Detokenizer
from batchgen.text.template import PromptRenderer, RowFilter
from batchgen.text.token_store import TokenStore, TokenStoreWriter, remove_store
from batchgen.text.tokenize import tokenize
from batchgen.text.tokenizer import Tokenizer, load_tokenizer
from batchgen.text.tokens_in_making import TokensInMaking

EXIT_OK, EXIT_SOME_ROWS_FAILED = 0, 3


class Inputs(NamedTuple):
    """All that a job reads but its weights. Whatever can be refused is refused while this is made."""

    job: Job
    reader: Reader
    files: ModelFiles
    tokenizer_files: ModelFiles
    config: ModelConfig
    tokenizer: Tokenizer
    renderer: PromptRenderer
    row_filter: RowFilter | None
    max_model_len: int

    @property
    def max_tokens(self) -> int:
        """Longest answer: what is asked for, but no more than the model takes."""
        return min(self.job.sampling.max_tokens, self.max_model_len)


def run_job(job: Job, progress: Progress | None = None) -> int:
    """Run, or go on with, a job; returns the exit code. Raises BatchgenError subclasses for what a user can mend."""
    progress = progress or Progress()
    with StopSignals() as stop:
        progress.phase("open")
        inputs = open_inputs(job)
        with RunFolder(job.output.path) as folder:
            resumed = folder.begin(job.model_dump(mode="json", by_alias=True), job_fingerprint(inputs))
            folder.update_state({"num_samples": job.sampling.n, "finished": False})
            with (
                stored_tokens(inputs, folder, progress) as tokens,
                PartWriter(folder, job.output.commit_rows, job.output.commit_seconds, job.output.compression) as writer,
            ):
                done = np.unique(writer.finished()[0])
                if resumed:
                    rows = "the rows" if tokens.num_rows is None else f"{tokens.num_rows} rows"
                    progress.say(f"going on in {folder.path}: {len(done)} of {rows} are done")
                result = answer(inputs, tokens, done, writer, progress, stop)
                store = tokens.whole()
            folder.update_state({"num_rows": store.num_rows})
            progress.phase("merge", store.num_rows, "row")
            merged = merge(inputs.reader, job, folder, np.sort(store.rows), job.sampling.n)
            progress.close()
            summary = summarize(merged, result, progress.seconds)
            if result.num_answered or not folder.summary.exists():  # a run with nothing left to do keeps the figures
                write_atomically(folder.summary, lambda f: f.write(json.dumps(summary, indent=2).encode()))
    for line in summary_lines(summary):
        progress.say(line)
    progress.say(f"results   {folder.results}")
    return EXIT_OK if merged.by_status.keys() <= {"ok"} else EXIT_SOME_ROWS_FAILED


# ---- before the engine ----------------------------------------------------------------------------------------------


def open_inputs(job: Job, with_weights: bool = True) -> Inputs:
    """Open data, tokenizer and templates and check them against each other."""
    reader = open_reader(job.input)
    row_filter = RowFilter(job.input.where) if job.input.where is not None else None
    for column in sorted(row_filter.columns) if row_filter else ():
        require_columns(reader.schema, {"input.where": column})
    if job.output.extract is not None and job.output.extract.expected is not None:
        require_columns(reader.schema, {"output.extract.expected": job.output.extract.expected})
    results_schema(reader.schema, job)
    files = resolve_model(job.model.path, job.model.revision, with_weights=with_weights)
    config = load_config(files)
    tokenizer_files = files
    if job.model.tokenizer is not None:
        tokenizer_files = resolve_model(job.model.tokenizer, with_weights=False)
    tokenizer = load_tokenizer(tokenizer_files.folder)
    renderer = PromptRenderer(job.prompt, tokenizer)
    for column in sorted(renderer.columns):
        require_columns(reader.schema, {"prompt": column})
    max_model_len = min(job.model.max_model_len or config.max_supported_len, config.max_supported_len)
    return Inputs(job, reader, files, tokenizer_files, config, tokenizer, renderer, row_filter, max_model_len)


def job_fingerprint(inputs: Inputs) -> dict[str, Any]:
    """Everything that changes an answer: a run folder goes on only with the same."""
    job = inputs.job
    prints = job.settings_that_change_answers()
    # the content of model and tokenizer counts, not where they lie
    for name in ("model.path", "model.revision", "model.tokenizer"):
        prints.pop(name)
    prints["engine.dtype"] = str(choose_dtype(job.engine.dtype, choose_device(job.engine.device))).removeprefix("torch.")
    prints |= {f"model file {name}": value for name, value in fingerprint(inputs.files).items()}
    if job.model.tokenizer is not None:
        prints |= {f"tokenizer file {name}": value for name, value in fingerprint(inputs.tokenizer_files).items()}
    return prints | {f"input file {name}": value for name, value in inputs.reader.fingerprint().items()}


def read_prompts(inputs: Inputs) -> Iterator[Prompt]:
    """The job's rows as prompts, in input order: those that input.where keeps, at most input.limit."""
    job, row_filter, renderer = inputs.job, inputs.row_filter, inputs.renderer
    columns = sorted(renderer.columns | (row_filter.columns if row_filter else set()))
    id_column = job.input.id_column
    num_taken = 0
    for source in inputs.reader.batches(sorted({*columns, *([id_column] if id_column else [])})):
        ids = source.batch.column(id_column) if id_column else None
        keys = row_keys(source.source, source.source_row, source.batch.num_rows, ids).tolist()
        for i, row in enumerate(iter_rows(source.batch, columns)):
            position, key = source.row + i, keys[i]
            if isinstance(row, RowFault):
                prompt = Prompt(position, key, fault=row)
            elif (kept := row_filter.keeps(row) if row_filter else True) is True:
                prompt = renderer.render(row, position, key)
            elif kept is False:
                continue
            else:
                prompt = Prompt(position, key, fault=kept)
            yield prompt
            num_taken += 1
            if num_taken == job.input.limit:
                return


def stored_tokens(inputs: Inputs, folder: RunFolder, progress: Progress) -> TokensInMaking:
    """The job's prompts as token ids: found in the run folder (whose fingerprint holds), or made in the background."""
    path = folder.path / "tokens.arrow"
    try:
        return TokensInMaking(TokenStore.open(path))
    except FileNotFoundError:
        pass
    except CorruptRunError as error:
        progress.say(f"{error}; tokenizing again")
        remove_store(path)
    return start_token_store(inputs, path, progress)


def make_token_store(inputs: Inputs, path: Path, progress: Progress) -> TokenStore:
    """Tokenize the whole job, and wait for it."""
    with start_token_store(inputs, path, progress) as tokens:
        return tokens.whole()


def start_token_store(inputs: Inputs, path: Path, progress: Progress) -> TokensInMaking:
    """Read, render and tokenize the job in a thread; where it outgrows the store's head, into partitions."""
    num_rows = min(inputs.reader.num_rows, inputs.job.input.limit or inputs.reader.num_rows)

    def partition(head: TokenStore) -> Partitioning:
        return choose_partitioning(plan_rows(inputs.job, head, np.arange(head.num_rows)), num_rows)

    def fill(writer: TokenStoreWriter, counted: Callable[[Iterator[Prompt]], Iterator[Prompt]]) -> None:
        tokenize(
            counted(read_prompts(inputs)),
            inputs.tokenizer,
            writer,
            add_special_tokens=inputs.renderer.add_special_tokens,
            max_prompt_tokens=inputs.max_model_len - 1,
            on_too_long=inputs.job.prompt.on_too_long,
        )

    making = TokensInMaking()
    making.start(path, partition, fill, lambda: progress.phase("tokenize", num_rows, "row"), progress.update)
    return making


def rows_owed(store: TokenStore, first: int, end: int, done: np.ndarray) -> np.ndarray:
    """[n] int64: entries of [first, end) without committed answers; `done` is the sorted rows that have theirs.

    All samples of a row are committed together.
    """
    rows = store.rows[first:end]
    at = np.minimum(np.searchsorted(done, rows), max(len(done) - 1, 0))
    is_done = done[at] == rows if len(done) else np.zeros(len(rows), bool)
    return first + np.flatnonzero(~is_done)


def plan_rows(job: Job, store: TokenStore, entries: np.ndarray, sort: bool = True) -> Window:
    """The window of those entries ([n] int64, increasing) of the store that have tokens. Their tokens are in memory."""
    healthy = entries[store.lengths[entries] > 0]
    first, end = (int(healthy[0]), int(healthy[-1]) + 1) if len(healthy) else (0, 0)
    return plan_window(store.pack(first, end), healthy, store.lengths[healthy], job.engine.block_size, sort)


def entry_ranges(tokens: TokensInMaking) -> Iterator[tuple[TokenStore, int, int]]:
    """What is planned together, as ranges of entries of a store: the head as soon as it is there, then, when all rows have
    been read, the partitions."""
    head = tokens.head()
    yield head, 0, int(head.file_starts[1])
    store = tokens.whole()
    starts = store.file_starts[1:]
    num_tokens = [int(store.lengths[a:b].sum(dtype=np.int64)) for a, b in pairwise(starts.tolist())]
    for files in merge_small(np.diff(starts).tolist(), num_tokens):
        begin, end = int(starts[files.start]), int(starts[files.stop])
        for first, last in cut_large(begin, store.lengths[begin:end]):
            yield store, first, last


# ---- the engine -----------------------------------------------------------------------------------------------------


@dataclass
class EngineResult:
    num_answered: int = 0
    num_prompt_tokens: int = 0  # of the rows that went through the engine
    num_planned: int = 0  # prompt tokens that the plan said would be computed
    engine: Engine | None = None


class Loaded(NamedTuple):
    """The engine with its weights, and how it answers."""

    engine: Engine
    scheduler_config: SchedulerConfig
    sampling: SamplingConfig
    detokenizer: Detokenizer


def answer(
    inputs: Inputs, tokens: TokensInMaking, done: np.ndarray, writer: PartWriter, progress: Progress, stop: StopSignals
) -> EngineResult:
    """Answer every row but those in `done` (sorted), window by window, and hand the answers to the writer, row by row.

    A window is planned when its turn comes, so one is in memory at a time. The batch drains between two windows: a few
    hundred steps of a smaller batch against the hundred thousand rows of a window.
    """
    job, n = inputs.job, inputs.job.sampling.n
    result, meter = EngineResult(), Meter(n, inputs.max_tokens, progress)
    loaded: Loaded | None = None
    for store, first, end in entry_ranges(tokens):
        owed = rows_owed(store, first, end, done)
        faults = store.faults(owed)
        for i, fault in faults.items():
            writer.add(*(Completion(int(store.rows[i]), s, fault=fault) for s in range(n)))
        result.num_answered += len(faults) * n
        window = plan_rows(job, store, owed)
        if len(window) == 0:
            continue
        if loaded is None:
            loaded = load_engine(inputs, window, tokens.num_rows is None or end < tokens.num_rows, progress)
        meter.window(window)
        with stop.deferred():
            answer_window(window, store, loaded, n, writer, meter, lambda: stop.received is not None or tokens.failed)
            writer.commit()
        result.num_prompt_tokens += int(window.lengths.sum(dtype=np.int64)) * n
        del window  # before the next one is planned
    return EngineResult(
        result.num_answered + meter.num_finished,
        result.num_prompt_tokens,
        meter.num_planned,
        loaded.engine if loaded else None,
    )


def answer_window(
    window: Window,
    store: TokenStore,
    loaded: Loaded,
    n: int,
    writer: PartWriter,
    meter: Meter,
    should_stop: Callable[[], bool],
) -> None:
    detokenizer = loaded.detokenizer

    def after_step(step: StepPlan, scheduler: Scheduler) -> None:
        meter.step(step, scheduler)
        writer.commit_if_due()

    samples: dict[int, list[Completion]] = {}
    for finished in loaded.engine.generate(
        window,
        loaded.scheduler_config,
        loaded.sampling,
        store.row_keys[window.index],
        hits_stop=detokenizer.hits_stop if detokenizer.stop else None,
        should_stop=should_stop,
        on_step=after_step,
    ):
        row = int(store.rows[window.index[finished.position]])
        of_row = samples.setdefault(row, [])
        of_row.append(complete(row, finished, detokenizer))
        meter.finished(finished)
        if len(of_row) == n:  # a row is committed whole, so that a resumed run never owes half of one
            writer.add(*samples.pop(row))


def load_engine(inputs: Inputs, window: Window, more_follow: bool, progress: Progress) -> Loaded:
    """The engine, its pool sized for `window`; with more_follow, for any window."""
    job, n = inputs.job, inputs.job.sampling.n
    progress.phase("load")
    device = choose_device(job.engine.device)
    threads = prepare_cpu(job.engine.threads)
    dtype = choose_dtype(job.engine.dtype, device)
    kv_dtype = choose_kv_dtype(job.engine.kv_dtype, dtype)
    try:
        ops = select_ops(job.engine.backend, device)
    except ValueError as error:
        raise UsageError(f"engine.backend: {error}") from None
    model = load_decoder(inputs.files, device, dtype, ops, inputs.max_model_len)
    size = choose_size(
        device, window, kv_bytes_per_token(inputs.config, kv_dtype), job.engine.kv_memory,
        job.engine.max_num_batched_tokens, job.engine.max_running_requests, inputs.max_tokens, n, more_follow,
    )  # fmt: skip
    engine = Engine(model, ops, size.num_blocks, job.engine.block_size, device, kv_dtype)
    progress.close()
    progress.say(
        f"engine: {device} with {threads} threads, {str(dtype).removeprefix('torch.')}, backend {ops.backend} "
        f"({ops.backend_reason}), KV pool of {(size.num_blocks - 1) * job.engine.block_size:,} tokens "
        f"of {str(kv_dtype).removeprefix('torch.')} ({size.kv_bytes / 2**20:,.0f} MiB, {size.reason})"
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
    )
    chosen = job.sampling
    sampling = SamplingConfig(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed, chosen.min_p)
    detokenizer = Detokenizer(inputs.tokenizer, job.sampling.stop, eos)
    return Loaded(engine, scheduler_config, sampling, detokenizer)


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
    """Turns steps and finished requests into progress: tokens to compute, known for prompts, estimated for answers."""

    def __init__(self, num_samples: int, max_tokens: int, progress: Progress) -> None:
        self.num_samples, self.max_tokens, self.progress = num_samples, max_tokens, progress
        self.num_rows = self.num_planned = self.num_finished = self.num_output = self.num_stepped = 0

    def window(self, window: Window) -> None:
        """Another window begins."""
        self.num_rows += len(window)
        self.num_planned += window.num_computed()
        self.progress.phase("run", self.num_planned + self.num_rows * self.num_samples * self.max_tokens)
        self.progress.update(self.num_stepped)

    def step(self, step: StepPlan, scheduler: Scheduler) -> None:
        counts = scheduler.stats
        seen = counts.num_cached + counts.num_prefill
        facts = (
            f"rows {self.num_finished // self.num_samples}/{self.num_rows}, {len(step.slots)} running, "
            f"hits {counts.num_cached / max(seen, 1):.0%}, prefill {counts.num_prefill:,} decode {counts.num_decode:,}"
        )
        mean_output = self.num_output / self.num_finished if self.num_finished else self.max_tokens
        num_requests = self.num_rows * self.num_samples
        total = self.num_planned + counts.num_recomputed + int(num_requests * max(mean_output - 1, 0))
        num_tokens = int(step.num_scheduled.sum())
        self.num_stepped += num_tokens
        self.progress.update(num_tokens, facts, total)

    def finished(self, finished: Finished) -> None:
        self.num_finished += 1
        self.num_output += len(finished.token_ids)


# ---- after the engine -----------------------------------------------------------------------------------------------


def summarize(merged: MergeSummary, result: EngineResult, seconds: dict[str, float]) -> dict[str, Any]:
    """The figures of this run, for summary.json and for the last lines on the screen."""
    engine = result.engine
    counts = engine.stats.counts if engine else None
    prompt, output = result.num_prompt_tokens, counts.num_output if counts else 0
    run_seconds = max(seconds.get("run", 0.0), 1e-9)
    return {
        "rows": {
            "answers": merged.num_answers,
            "answered_now": result.num_answered,
            "by_status": merged.by_status,
            "by_error_code": merged.by_error_code,
        },
        "tokens": {
            "prompt": prompt,
            "computed": counts.num_prefill if counts else 0,
            "cached": counts.num_cached if counts else 0,
            "recomputed": counts.num_recomputed if counts else 0,
            "output": output,
            "saved_predicted": 1 - result.num_planned / prompt if prompt else 0.0,
            "saved_achieved": 1 - counts.num_prefill / prompt if counts and prompt else 0.0,
            "kv_read": counts.num_kv_read if counts else 0,
            "kv_visible": counts.num_kv_visible if counts else 0,
        },
        "steps": counts.num_steps if counts else 0,
        "max_running": counts.max_running if counts else 0,
        "preemptions": counts.num_preemptions if counts else 0,
        "rates": {
            "total": (prompt + output) / run_seconds,
            "prompt": prompt / run_seconds,
            "output": output / run_seconds,
        },
        "seconds": seconds,
        "seconds_in_steps": engine.stats.seconds if engine else {},
        "accuracy": merged.accuracy,
        "correct": merged.num_correct,
        "scored": merged.num_scored,
    }


def merge_again(path: Path) -> MergeSummary:
    """Merge the committed parts of the run folder `path` once more. Raises CorruptRunError if answers are missing."""
    job = Job.model_validate(read_job_file(path)["job"])
    reader = open_reader(job.input)
    with RunFolder(path) as folder:
        folder.check_fingerprint(
            folder.read()["fingerprint"] | {f"input file {name}": value for name, value in reader.fingerprint().items()}
        )
        try:
            store = TokenStore.open(path / "tokens.arrow")
        except FileNotFoundError:
            raise CorruptRunError(
                f"{path}: tokens.arrow is not there, so the run's rows are not known; run the same job file again to go on"
            ) from None
        return merge(reader, job, folder, np.sort(store.rows), job.sampling.n)
