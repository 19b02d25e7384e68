"""`batchgen prepare`: what the workers of a job share, made once: fetched files, tokens, and the plan cut into units."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from batchgen.cluster.owed import owed_units
from batchgen.cluster.units import Units, read_units, write_units
from batchgen.data.run_folder import RunFolder
from batchgen.data.standard_input import refuse_standard_input
from batchgen.data.workers import AllAnswers
from batchgen.job import Job
from batchgen.plan.shards import cut, num_units, row_costs
from batchgen.prompts import Inputs, entry_ranges, job_fingerprint, job_rows, open_inputs, plan_rows, stored_tokens
from batchgen.report.progress import Progress
from batchgen.signals import StopSignals
from batchgen.text.token_store import TokenStore
from batchgen.text.tokens_in_making import TokensInMaking


def prepare_job(job: Job, num_tasks: int, words: str, progress: Progress | None = None) -> list[str]:
    """Make the run folder ready for `run --shard`; what was done, as lines for a person. It may be repeated at any time:
    units stay as they are once one of them has been claimed, whatever the number of tasks.

    words: the job file and its --set, for messages that say what to run again. Raises what run_job raises.
    """
    progress = progress or Progress()
    refuse_standard_input(job)
    with StopSignals():
        progress.phase("open")
        inputs = open_inputs(job)
        with RunFolder(job.output.path) as folder:
            folder.begin(job.model_dump(mode="json", by_alias=True), job_fingerprint(inputs, computes_here=False))
            with stored_tokens(inputs, folder, progress) as tokens:
                store = tokens.whole()
            folder.update_state({"num_rows": store.num_rows, "num_samples": job.sampling.n})
            progress.phase("plan")
            units = shared_units(inputs, folder, store, num_tasks, words)
            ledger = AllAnswers(folder.path, job_rows(store)).look()
            owed = owed_units(folder.path, units, store, ledger)
            progress.close()
    num_owed = int(np.count_nonzero(~ledger.is_answered))
    return [
        f"{folder.path}: {store.num_rows:,} rows, {num_owed:,} without an answer, in {len(owed)} of {len(units)} units"
        + ("" if units.num_tasks == num_tasks else f", cut for {units.num_tasks} tasks, which fits any number"),
        f"answer    batchgen run {words} --shard I/{num_tasks}   for I from 0 to {num_tasks - 1}, wherever you like",
        f"merge     batchgen merge {folder.path}",
    ]


def shared_units(inputs: Inputs, folder: RunFolder, store: TokenStore, num_tasks: int, words: str) -> Units:
    """The units of the folder; cut anew for another number of tasks as long as none of them has been claimed."""
    units = read_units(folder.path)
    if units is None or (units.num_tasks != num_tasks and not any((folder.path / "leases").glob("[0-9]*"))):
        units = cut_units(inputs, store, num_tasks, words)
        write_units(folder.path, units)
    return units


def cut_units(inputs: Inputs, store: TokenStore, num_tasks: int, job: str) -> Units:
    """Plan the whole job, one window in memory at a time, and cut it. Rows without tokens go with a window's last unit."""
    entries: list[np.ndarray] = []
    costs: list[float] = []
    for _, begin, end in entry_ranges(TokensInMaking(store)):
        window = plan_rows(inputs.job, store, np.arange(begin, end))
        of_rows = row_costs(window, inputs.max_tokens)
        share = max(1, round(num_units(store.num_rows, num_tasks) * (end - begin) / max(1, store.num_rows)))
        cuts = cut(window, of_rows, share)
        faulty = begin + np.flatnonzero(store.lengths[begin:end] == 0)
        for u, (first, last) in enumerate(itertools.pairwise(cuts.tolist())):
            rows = window.index[first:last] if u < share - 1 else np.concatenate([window.index[first:], faulty])
            if len(rows):
                entries.append(np.sort(rows))
                costs.append(float(of_rows[first:last].sum()))
    offsets = np.cumsum([0, *map(len, entries)])
    values = np.concatenate([np.empty(0, np.int64), *entries])
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    return Units(lists, np.array(costs), num_tasks, job)
