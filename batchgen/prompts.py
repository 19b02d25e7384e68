"""A job's rows up to their plan: what is opened and checked, prompts as token ids, and which of them are planned together.

Reader -> Template -> Tokenizer -> Token store -> Plan. Knows no weights and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.data.job_rows import JobRows
from batchgen.data.push import check_target
from batchgen.data.reader import Reader, open_reader, require_columns
from batchgen.data.rows import iter_rows, row_keys
from batchgen.data.run_folder import DTYPE, INPUT_FILE, RunFolder
from batchgen.data.schema import results_schema
from batchgen.engine.sampler import SamplingConfig
from batchgen.engine.sizing import choose_device, choose_dtype
from batchgen.errors import CorruptRunError
from batchgen.job import Job
from batchgen.models.config import ModelConfig
from batchgen.models.loader import ModelFiles, fingerprint, load_config, resolve_model
from batchgen.plan.cost_order import cost_order
from batchgen.plan.duplicates import Distinct, each_alone, without_duplicates
from batchgen.plan.partition import Partitioning, choose_partitioning, cut_large, merge_small
from batchgen.plan.window import plan_window
from batchgen.records import Prompt, RowFault, Window
from batchgen.report.progress import Progress
from batchgen.text.openai_request import COLUMNS as REQUEST_COLUMNS
from batchgen.text.openai_request import request_fault
from batchgen.text.template import PromptRenderer, RowFilter
from batchgen.text.token_store import TokenStore, TokenStoreWriter, remove_store
from batchgen.text.tokenize import tokenize
from batchgen.text.tokenizer import Tokenizer, load_tokenizer
from batchgen.text.tokens_in_making import TokensInMaking


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

    @property
    def most_rows(self) -> int:
        """Rows of the job before they are read: no fewer than there are after input.where."""
        return min(self.reader.num_rows, self.job.input.limit or self.reader.num_rows)


def open_inputs(job: Job, with_weights: bool = True) -> Inputs:
    """Open data, tokenizer and templates and check them against each other."""
    reader = open_reader(job.input)
    row_filter = RowFilter(job.input.where) if job.input.where is not None else None
    for column in sorted(row_filter.columns) if row_filter else ():
        require_columns(reader.schema, {"input.where": column})
    if job.output.extract is not None and job.output.extract.expected is not None:
        require_columns(reader.schema, {"output.extract.expected": job.output.extract.expected})
    results_schema(reader.schema, job)
    if job.output.push_to is not None:
        check_target(job.output.push_to)
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


def job_fingerprint(inputs: Inputs, computes_here: bool = True) -> dict[str, Any]:
    """Everything that changes an answer: a run folder goes on only with the same. computes_here: whether this machine is
    one of those that answer; if not, engine.dtype may stay open (see run_folder.DTYPE)."""
    job = inputs.job
    prints = job.settings_that_change_answers()
    # the content of model and tokenizer counts, not where they lie
    for name in ("model.path", "model.revision", "model.tokenizer"):
        prints.pop(name)
    if job.engine.dtype == "auto" and (computes_here or job.engine.device == "cpu"):
        prints[DTYPE] = str(choose_dtype("auto", choose_device(job.engine.device))).removeprefix("torch.")
    elif computes_here:
        choose_dtype(job.engine.dtype, choose_device(job.engine.device))  # refuses what the device cannot do
    prints |= {f"model file {name}": value for name, value in fingerprint(inputs.files).items()}
    if job.model.tokenizer is not None:
        prints |= {f"tokenizer file {name}": value for name, value in fingerprint(inputs.tokenizer_files).items()}
    return prints | {INPUT_FILE + name: value for name, value in inputs.reader.fingerprint().items()}


def read_prompts(inputs: Inputs) -> Iterator[Prompt]:
    """The job's rows as prompts, in input order: those that input.where keeps, at most input.limit."""
    job, row_filter, renderer = inputs.job, inputs.row_filter, inputs.renderer
    are_requests = job.input.format == "openai-batch"
    needed = renderer.columns | (row_filter.columns if row_filter else set()) | (REQUEST_COLUMNS if are_requests else set())
    columns = sorted(needed)
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
                fault = request_fault(row, job.prompt.messages is not None, job.sampling) if are_requests else None
                prompt = renderer.render(row, position, key) if fault is None else Prompt(position, key, fault=fault)
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
    num_rows = inputs.most_rows

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


def job_rows(store: TokenStore) -> JobRows:
    """Who the rows are and what they ask, so that committed answers find them."""
    faults = store.faults()
    prompts = ("\0".join(faults[i]).encode() if i in faults else store.tokens(i) for i in range(store.num_rows))
    return JobRows.of(store.rows, store.row_keys, prompts)


def plan_rows(job: Job, store: TokenStore, entries: np.ndarray, sort: bool = True) -> Window:
    """The window of those entries ([n] int64, increasing) of the store that have tokens. Their tokens are in memory."""
    healthy = entries[store.lengths[entries] > 0]
    first, end = (int(healthy[0]), int(healthy[-1]) + 1) if len(healthy) else (0, 0)
    return plan_window(store.pack(first, end), healthy, store.lengths[healthy], job.engine.block_size, sort)


def sampling_config(job: Job) -> SamplingConfig:
    chosen = job.sampling
    return SamplingConfig(chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed, chosen.min_p)


def plan_requests(job: Job, window: Window) -> tuple[Distinct, int]:
    """What of `window` has to be computed, in the order of cost, and how many samples of each row: where the likeliest
    token is taken, equal prompts have one answer and all samples are the same."""
    distinct, n = each_alone(window), job.sampling.n
    if sampling_config(job).is_greedy:
        distinct, n = without_duplicates(window), 1
    return distinct.in_order_of(cost_order(distinct.window)), n


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
