"""run_job: the straight line from a job file to merged results. The file to read first.

Job -> Reader -> Template -> Tokenizer -> Token store -> Plan -> Engine -> Detokenize -> PartWriter -> Merge -> Report
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from batchgen.plan.window import plan_window
from batchgen.records import Completion, Prompt, RowFault, Window
from batchgen.report.progress import Progress
from batchgen.report.summary import summary_lines
from batchgen.signals import StopSignals
from batchgen.text.detokenizer import Detokenizer
from batchgen.text.template import PromptRenderer, RowFilter
from batchgen.text.token_store import TokenStore, TokenStoreWriter
from batchgen.text.tokenize import tokenize
from batchgen.text.tokenizer import Tokenizer, load_tokenizer

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
            store = stored_tokens(inputs, folder, progress)
            folder.update_state({"num_rows": store.num_rows, "num_samples": job.sampling.n, "finished": False})
            with PartWriter(folder, job.output.commit_rows, job.output.commit_seconds, job.output.compression) as writer:
                owed = rows_owed(store, writer)
                if resumed:
                    progress.say(
                        f"going on in {folder.path}: {store.num_rows - len(owed)} of {store.num_rows} rows are done"
                    )
                result = answer(inputs, store, owed, writer, progress, stop)
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
    dtype = choose_dtype(job.engine.dtype, choose_device(job.engine.device))
    prints["engine.dtype"] = "int8" if job.engine.dtype == "int8" else str(dtype).removeprefix("torch.")
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


def stored_tokens(inputs: Inputs, folder: RunFolder, progress: Progress) -> TokenStore:
    """The job's prompts as token ids: found in the run folder (whose fingerprint holds), or made."""
    path = folder.path / "tokens.arrow"
    try:
        return TokenStore.open(path)
    except FileNotFoundError:
        pass
    except CorruptRunError as error:
        progress.say(f"{error}; tokenizing again")
        path.unlink()
    return make_token_store(inputs, path, progress)


def make_token_store(inputs: Inputs, path: Any, progress: Progress) -> TokenStore:
    def counted() -> Iterator[Prompt]:
        for prompt in read_prompts(inputs):
            yield prompt
            progress.update(1)

    limit = inputs.job.input.limit
    progress.phase("tokenize", min(inputs.reader.num_rows, limit or inputs.reader.num_rows), "row")
    with TokenStoreWriter(path) as writer:
        tokenize(
            counted(),
            inputs.tokenizer,
            writer,
            add_special_tokens=inputs.renderer.add_special_tokens,
            max_prompt_tokens=inputs.max_model_len - 1,
            on_too_long=inputs.job.prompt.on_too_long,
        )
    return TokenStore.open(path)


def rows_owed(store: TokenStore, writer: PartWriter) -> np.ndarray:
    """[n] int64: entries of the store without committed answers. All samples of a row are committed together."""
    done, _ = writer.finished()
    return np.flatnonzero(~np.isin(store.rows, done))


def plan_rows(job: Job, store: TokenStore, entries: np.ndarray, sort: bool = True) -> Window:
    """The window of those entries of the store that have tokens."""
    healthy = entries[store.lengths[entries] > 0]
    return plan_window(store.tokens, healthy, store.lengths[healthy], job.engine.block_size, sort)


# ---- the engine -----------------------------------------------------------------------------------------------------


class EngineResult(NamedTuple):
    num_answered: int
    num_prompt_tokens: int  # of the rows that went through the engine
    num_planned: int  # prompt tokens that the plan said would be computed
    engine: Engine | None


def answer(
    inputs: Inputs, store: TokenStore, owed: np.ndarray, writer: PartWriter, progress: Progress, stop: StopSignals
) -> EngineResult:
    """Answer every owed entry of the store and hand the answers to the writer, row by row."""
    job, n = inputs.job, inputs.job.sampling.n
    is_owed = np.isin(np.arange(store.num_rows), owed)
    faults = {i: fault for i, fault in store.faults().items() if is_owed[i]}
    for i, fault in faults.items():
        writer.add(*(Completion(int(store.rows[i]), s, fault=fault) for s in range(n)))
    window = plan_rows(job, store, owed)
    if len(window) == 0:
        return EngineResult(len(faults) * n, 0, 0, None)

    progress.phase("load")
    device = choose_device(job.engine.device)
    threads = prepare_cpu(job.engine.threads)
    dtype = choose_dtype(job.engine.dtype, device)
    kv_dtype = choose_kv_dtype(job.engine.kv_dtype, dtype)
    try:
        ops = select_ops(job.engine.backend, device)
    except ValueError as error:
        raise UsageError(f"engine.backend: {error}") from None
    products, int8 = writer.folder.state.get("products"), job.engine.dtype == "int8"
    model = load_decoder(inputs.files, device, dtype, ops, inputs.max_model_len, products, int8)
    writer.folder.update_state({"products": model.products})  # for the same bits when the run is resumed
    size = choose_size(
        device, window, kv_bytes_per_token(inputs.config, kv_dtype), job.engine.kv_memory,
        job.engine.max_num_batched_tokens, job.engine.max_running_requests, inputs.max_tokens, n,
    )  # fmt: skip
    engine = Engine(model, ops, size.num_blocks, job.engine.block_size, device, kv_dtype)
    progress.close()
    progress.say(
        f"engine: {device} with {threads} threads, {'int8 and ' * int8}{str(dtype).removeprefix('torch.')}, "
        f"backend {ops.backend} ({ops.backend_reason}), KV pool of {(size.num_blocks - 1) * job.engine.block_size:,} tokens "
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
    meter = Meter(window, n, inputs.max_tokens, progress)

    def after_step(step: StepPlan, scheduler: Scheduler) -> None:
        meter.step(step, scheduler)
        writer.commit_if_due()

    samples: dict[int, list[Completion]] = {}
    with stop.deferred():
        for finished in engine.generate(
            window,
            scheduler_config,
            sampling,
            store.row_keys[window.index],
            hits_stop=detokenizer.hits_stop if job.sampling.stop else None,
            should_stop=lambda: stop.received is not None,
            on_step=after_step,
        ):
            row = int(store.rows[window.index[finished.position]])
            of_row = samples.setdefault(row, [])
            of_row.append(complete(row, finished, detokenizer))
            meter.finished(finished)
            if len(of_row) == n:  # a row is committed whole, so that a resumed run never owes half of one
                writer.add(*samples.pop(row))
        writer.commit()
    return EngineResult(meter.num_finished + len(faults) * n, int(window.lengths.sum()) * n, window.num_computed(), engine)


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

    def __init__(self, window: Window, num_samples: int, max_tokens: int, progress: Progress) -> None:
        self.num_requests, self.max_tokens = len(window) * num_samples, max_tokens
        self.num_planned = window.num_computed()
        self.num_finished = self.num_output = 0
        self.num_rows, self.num_samples, self.progress = len(window), num_samples, progress
        progress.phase("run", self.num_planned + self.num_requests * max_tokens)

    def step(self, step: StepPlan, scheduler: Scheduler) -> None:
        counts = scheduler.stats
        seen = counts.num_cached + counts.num_prefill
        facts = (
            f"rows {self.num_finished // self.num_samples}/{self.num_rows}, {len(step.slots)} running, "
            f"hits {counts.num_cached / max(seen, 1):.0%}, prefill {counts.num_prefill:,} decode {counts.num_decode:,}"
        )
        mean_output = self.num_output / self.num_finished if self.num_finished else self.max_tokens
        total = self.num_planned + counts.num_recomputed + int(self.num_requests * max(mean_output - 1, 0))
        self.progress.update(int(step.num_scheduled.sum()), facts, total)

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
        "products": engine.model.products if engine else {},
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
