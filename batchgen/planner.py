"""`batchgen plan`: everything about a job that can be known without its weights, as lines for a person."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from batchgen.engine.sizing import available_memory, choose_device, choose_dtype, choose_kv_dtype, choose_size
from batchgen.job import Job
from batchgen.models.config import kv_bytes_per_token, num_matmul_parameters
from batchgen.plan.duplicates import Distinct
from batchgen.plan.estimate import length_figures, lru_computed
from batchgen.prompts import Inputs, make_token_store, open_inputs, plan_requests, plan_rows, sampling_config
from batchgen.report.progress import Progress
from batchgen.signals import StopSignals
from batchgen.text.token_store import TokenStore

FILE_ORDER_ROWS = 20_000  # simulating a cache costs a microsecond a block; beyond this many rows a prefix of the file does
NUM_FAULTS_SHOWN = 5


def plan_job(job: Job) -> list[str]:
    """Tokenize the job into a temporary store and describe it. Raises what run_job raises before it loads weights."""
    progress = Progress()
    with StopSignals(), tempfile.TemporaryDirectory(prefix="batchgen-plan-") as folder:
        progress.phase("open")
        inputs = open_inputs(job, with_weights=False)
        store = make_token_store(inputs, Path(folder) / "tokens.arrow", progress)
        progress.phase("plan")
        lines = describe_rows(store) + describe_first_prompt(inputs, store)
        distinct, n = plan_requests(job, plan_rows(job, store, np.arange(store.num_rows)))
        if len(distinct.window):
            lines += describe_window(inputs, store, distinct, n)
        progress.close()
        return lines


def describe_rows(store: TokenStore) -> list[str]:
    faults = store.faults()
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


def describe_window(inputs: Inputs, store: TokenStore, distinct: Distinct, n: int) -> list[str]:
    """n: samples that are computed of each row."""
    job, window, num_rows = inputs.job, distinct.window, len(distinct.entries)
    figures = length_figures(store.lengths[distinct.entries])
    room = inputs.max_model_len - store.lengths[distinct.entries]
    cut = int((room < inputs.max_tokens).sum())
    lines = [
        f"prompts     {figures.total:,} tokens; mean {figures.mean:.0f}, median {figures.median:.0f}, "
        f"95 % below {figures.p95:.0f}, longest {figures.longest}; the model takes {inputs.max_model_len}",
        f"answers     up to {inputs.max_tokens} tokens each, {job.sampling.n} for each row"
        + (f"; {cut:,} rows have less room than that in the model" if cut else ""),
        f"requests    {len(window) * n:,}; "
        + (
            f"{num_rows - len(window):,} rows repeat an earlier prompt and get its answer"
            if sampling_config(job).is_greedy
            else "each answer is drawn for itself, of equal prompts too"
        ),
    ]
    device = choose_device(job.engine.device)
    dtype = choose_dtype(job.engine.dtype, device)
    engine = job.engine
    kv_dtype = choose_kv_dtype(engine.kv_dtype, dtype)
    per_token = kv_bytes_per_token(inputs.config, kv_dtype)
    size = choose_size(
        device, window, per_token, engine.kv_memory, engine.max_num_batched_tokens, engine.max_running_requests,
        inputs.max_tokens, n,
    )  # fmt: skip
    computed = window.num_computed()
    in_file = plan_rows(job, store, np.arange(min(store.num_rows, FILE_ORDER_ROWS)), sort=False)
    cached_blocks = size.num_blocks - 1
    in_file_saved = 1 - lru_computed(in_file, cached_blocks) / int(in_file.lengths.sum())
    part = "" if len(in_file) == num_rows else f" (first {len(in_file):,} rows)"
    lines += [
        f"prefix      {1 - computed / figures.total:.1%} of prompt tokens saved in plan order ({computed:,} to compute); "
        f"in file order with an LRU cache of the same memory {in_file_saved:.1%}{part}",
    ]
    path = int((window.lengths + inputs.max_tokens).max())
    weights = num_matmul_parameters(inputs.config) * dtype.itemsize
    free = available_memory(device)
    lines += [
        f"KV memory   {per_token:,} bytes a token in {str(kv_dtype).removeprefix('torch.')}; "
        f"pool of {cached_blocks * window.block_size:,} tokens = {size.kv_bytes / 2**20:,.0f} MiB ({size.reason}); "
        f"the longest request needs {path * per_token / 2**20:,.0f} MiB",
        f"weights     about {weights / 2**20:,.0f} MiB as {str(dtype).removeprefix('torch.')} on {device}; "
        f"{free / 2**30:.1f} GiB there for the KV pool",
    ]
    too_long = int((-(-np.minimum(window.lengths + inputs.max_tokens, inputs.max_model_len) // window.block_size)
                    > cached_blocks).sum())  # fmt: skip
    if too_long:
        lines.append(f"  {too_long:,} rows do not fit into that pool and would fail; raise engine.kv_memory")
    return lines
