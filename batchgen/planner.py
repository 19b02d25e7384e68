"""`batchgen plan`: everything about a job that can be known without its weights, as lines for a person."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.data.rows import iter_rows
from batchgen.engine.sizing import available_memory, choose_device, choose_dtype, choose_kv_dtype, choose_size
from batchgen.job import Job
from batchgen.models.config import kv_bytes_per_token, num_matmul_parameters
from batchgen.plan.duplicates import repeats
from batchgen.plan.estimate import length_figures, lru_computed
from batchgen.prompts import Inputs, entry_ranges, make_token_store, open_inputs, plan_requests, plan_rows, sampling_config
from batchgen.records import Window
from batchgen.report.progress import Progress
from batchgen.signals import StopSignals
from batchgen.text.reorder import reordered
from batchgen.text.template import PromptRenderer
from batchgen.text.token_store import TokenStore
from batchgen.text.tokens_in_making import TokensInMaking

FILE_ORDER_ROWS = 20_000  # simulating a cache costs a microsecond a block; beyond this many rows a prefix of the file does
NUM_FAULTS_SHOWN = 5
ADVICE_ROWS = 2000  # are enough to see what rows share


def plan_job(job: Job, reorder_fields: bool = False) -> list[str]:
    """Tokenize the job into a temporary store and describe it. Raises what run_job raises before it loads weights.

    reorder_fields: say too what another order of the prompt's parts would save.
    """
    progress = Progress()
    with StopSignals(), tempfile.TemporaryDirectory(prefix="batchgen-plan-") as folder:
        progress.phase("open")
        inputs = open_inputs(job, with_weights=False)
        began, cpu_began = time.perf_counter(), time.process_time()
        store = make_token_store(inputs, Path(folder) / "tokens.arrow", progress)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        progress.phase("plan")
        lines = describe_rows(store) + describe_first_prompt(inputs, store)
        num_tokens = int(store.lengths.sum(dtype=np.int64))
        lines.append(
            f"tokenizing  {num_tokens / max(seconds, 1e-9):,.0f} tokens/s read, rendered and encoded; "
            f"{num_tokens / max(cpu_seconds, 1e-9):,.0f} a core"
        )
        if store.lengths.any():
            lines += describe_windows(inputs, store)
        if reorder_fields:
            lines += advise_order(inputs, Path(folder), progress)
        progress.close()
        return lines


def advise_order(inputs: Inputs, folder: Path, progress: Progress) -> list[str]:
    """What the prompt's template would save with its paragraphs in another order, tried on the first ADVICE_ROWS rows."""
    name = "user" if inputs.job.prompt.user is not None else "text"
    template = getattr(inputs.job.prompt, name)
    if template is None:
        return ["order       prompt.messages are taken as they are; there is nothing to move"]
    limit = min(inputs.job.input.limit or ADVICE_ROWS, ADVICE_ROWS)
    sample = inputs._replace(job=with_changes(inputs.job, input={"limit": limit}))
    files = inputs.renderer.files
    rows = [row | files for row in first_rows(sample, sorted(inputs.renderer.columns))]
    try:
        better = reordered(template, rows)
    except ValueError as error:
        return [f"order       prompt.{name} cannot be taken apart: {error}"]
    if better is None:
        return [f"order       prompt.{name} has first what most rows share; nothing to move"]
    job = with_changes(sample.job, prompt={name: better})
    counts = []
    for i, one in enumerate((sample, sample._replace(job=job, renderer=PromptRenderer(job.prompt, inputs.tokenizer)))):
        store = make_token_store(one, folder / f"advice-{i}.arrow", progress)
        window = plan_rows(one.job, store, np.arange(store.num_rows))
        counts.append((window.num_computed(), int(window.lengths.sum())))
    (now, total), (then, new_total) = counts
    if then >= now:
        return [
            f"order       moving paragraphs of prompt.{name} would save nothing ({now:,} tokens to compute, {then:,} then)"
        ]
    return [
        f"order       this prompt.{name} would leave {then:,} tokens to compute instead of {now:,} for the first "
        f"{len(rows):,} rows ({1 - then / new_total:.0%} saved instead of {1 - now / total:.0%}); answers may differ:",
        *(f"  | {line}" for line in better.split("\n")),
    ]


def with_changes(job: Job, **sections: dict[str, Any]) -> Job:
    return job.model_copy(update={name: getattr(job, name).model_copy(update=values) for name, values in sections.items()})


def first_rows(inputs: Inputs, columns: list[str]) -> list[dict[str, Any]]:
    """Values of `columns` in the rows of the job, but for those that cannot be read."""
    rows: list[dict[str, Any]] = []
    row_filter = inputs.row_filter
    columns = sorted({*columns, *(row_filter.columns if row_filter else ())})
    for source in inputs.reader.batches(columns):
        for row in iter_rows(source.batch, columns):
            if isinstance(row, dict) and (row_filter is None or row_filter.keeps(row) is True):
                rows.append(row)
        if len(rows) >= ADVICE_ROWS:
            break
    return rows[: inputs.job.input.limit]


def describe_rows(store: TokenStore) -> list[str]:
    faults = dict(sorted(store.faults().items(), key=lambda item: int(store.rows[item[0]])))
    lines = [f"rows        {store.num_rows:,}, of which {len(faults):,} would fail"]
    for code, count in Counter(fault.code for fault in faults.values()).most_common():
        shown = [f"row {store.rows[i]}: {f.message}" for i, f in faults.items() if f.code == code][:NUM_FAULTS_SHOWN]
        more = f", and {count - len(shown):,} more" if count > len(shown) else ""
        lines += [f"  {code}: {count:,}"] + [f"    {text}" for text in shown[:-1]] + [f"    {shown[-1]}{more}"]
    return lines


def describe_first_prompt(inputs: Inputs, store: TokenStore) -> list[str]:
    """The first healthy prompt as the model will see it, with its first and last ids."""
    healthy = np.flatnonzero(store.lengths > 0)
    if len(healthy) == 0:
        return []
    ids = store.tokens(int(healthy[0]))
    text = inputs.tokenizer.decode(ids, skip_special_tokens=False)
    shown = text if len(text) <= 600 else f"{text[:300]} [...] {text[-300:]}"
    ends = f"{ids[:8].tolist()} ... {ids[-4:].tolist()}" if len(ids) > 12 else str(ids.tolist())
    lines = [f"  | {line}" for line in shown.splitlines()]
    return [f"prompt      of row {store.rows[healthy[0]]}, {len(ids)} tokens, ids {ends}", *lines]


class WindowSums(NamedTuple):
    """Figures of all windows together, and the first one that has rows."""

    first: Window
    num_windows: int
    num_requests: int  # that are computed
    num_computed: int  # prompt tokens
    num_duplicates: int


def sum_windows(job: Job, store: TokenStore) -> WindowSums:
    """Plan the windows as a run would, one in memory at a time. Equal prompts lie in one window, or in the head and one."""
    first, num_windows, requests, computed, duplicates = None, 0, 0, 0, 0
    in_head: set[bytes] = set()
    for _, begin, end in entry_ranges(TokensInMaking(store)):
        window = plan_rows(job, store, np.arange(begin, end))
        if len(window) == 0:
            continue
        distinct, n = plan_requests(job, window)
        first, num_windows = first or distinct.window, num_windows + 1
        requests += len(distinct.window) * n
        computed += distinct.window.num_computed()
        repeated = repeats(window)
        duplicates += int(repeated.sum())
        if begin == 0 and end < store.num_rows:
            in_head = {window.prompt(i).tobytes() for i in np.flatnonzero(~repeated).tolist()}
        elif in_head:
            duplicates += sum(window.prompt(i).tobytes() in in_head for i in np.flatnonzero(~repeated).tolist())
    assert first is not None, "a store with tokens has a window with rows"
    return WindowSums(first, num_windows, requests, computed, duplicates)


def describe_windows(inputs: Inputs, store: TokenStore) -> list[str]:
    """Of a store in which some row has tokens."""
    job, n = inputs.job, inputs.job.sampling.n
    lengths = store.lengths[store.lengths > 0]
    sums = sum_windows(job, store)
    figures = length_figures(lengths)
    cut = int((inputs.max_model_len - lengths < inputs.max_tokens).sum())
    lines = [
        f"prompts     {figures.total:,} tokens; mean {figures.mean:.0f}, median {figures.median:.0f}, "
        f"95 % below {figures.p95:.0f}, longest {figures.longest}; the model takes {inputs.max_model_len}",
        f"answers     up to {inputs.max_tokens} tokens each, {n} for each row"
        + (f"; {cut:,} rows have less room than that in the model" if cut else ""),
        f"requests    {sums.num_requests:,}; {sums.num_duplicates:,} rows repeat an earlier prompt"
        + ("" if sampling_config(job).is_greedy else ", and each of their answers is drawn for itself"),
    ]
    if sums.num_windows > 1:
        lines.append(f"windows     {sums.num_windows:,}, each planned when the one before is answered")
    device = choose_device(job.engine.device)
    dtype = choose_dtype(job.engine.dtype, device)
    engine = job.engine
    kv_dtype = choose_kv_dtype(engine.kv_dtype, dtype)
    per_token = kv_bytes_per_token(inputs.config, kv_dtype)
    size = choose_size(
        device, sums.first, per_token, engine.kv_memory, engine.max_num_batched_tokens, engine.max_running_requests,
        inputs.max_tokens, n, sums.num_windows > 1,
    )  # fmt: skip
    computed = sums.num_computed
    in_file = plan_rows(job, store, np.arange(min(int(store.file_starts[1]), FILE_ORDER_ROWS)), sort=False)
    cached_blocks = size.num_blocks - 1
    in_file_saved = 1 - lru_computed(in_file, cached_blocks) / int(in_file.lengths.sum())
    part = "" if len(in_file) == len(lengths) else f" (first {len(in_file):,} rows)"
    lines += [
        f"prefix      {1 - computed / figures.total:.1%} of prompt tokens saved in plan order ({computed:,} to compute); "
        f"in file order with an LRU cache of the same memory {in_file_saved:.1%}{part}",
    ]
    path = int((lengths + inputs.max_tokens).max())
    weights = num_matmul_parameters(inputs.config) * dtype.itemsize
    free = available_memory(device)
    lines += [
        f"KV memory   {per_token:,} bytes a token in {str(kv_dtype).removeprefix('torch.')}; "
        f"pool of {cached_blocks * engine.block_size:,} tokens = {size.kv_bytes / 2**20:,.0f} MiB ({size.reason}); "
        f"the longest request needs {path * per_token / 2**20:,.0f} MiB",
        f"weights     about {weights / 2**20:,.0f} MiB as {str(dtype).removeprefix('torch.')} on {device}; "
        f"{free / 2**30:.1f} GiB there for the KV pool",
    ]
    too_long = int((-(-np.minimum(lengths + inputs.max_tokens, inputs.max_model_len) // engine.block_size)
                    > cached_blocks).sum())  # fmt: skip
    if too_long:
        lines.append(f"  {too_long:,} rows do not fit into that pool and would fail; raise engine.kv_memory")
    return lines
