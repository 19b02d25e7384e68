"""run_job: the straight line from a job file to merged results. The file to read first.

Job -> Reader -> Template -> Tokenizer -> Token store -> Plan -> Engine -> Detokenize -> PartWriter -> Merge -> Report
       prompts.py ..................................   answering.py .............................
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.answering import EngineResult, answer, owed_windows
from batchgen.cluster.owed import missing_rows, owed_units
from batchgen.cluster.replicas import run_replicas
from batchgen.cluster.units import read_units
from batchgen.cluster.worker import num_replicas
from batchgen.data.checkpoint import Checkpoint
from batchgen.data.durable import write_atomically
from batchgen.data.merge import MergeSummary, merge
from batchgen.data.push import push
from batchgen.data.reader import open_reader
from batchgen.data.rerun import Choice, rows_to_rerun
from batchgen.data.run_folder import INPUT_FILE, RunFolder, read_job_file, set_aside
from batchgen.data.workers import adopt
from batchgen.data.writer import PartWriter
from batchgen.errors import CorruptRunError
from batchgen.job import Job
from batchgen.prompts import job_fingerprint, job_rows, open_inputs, stored_tokens
from batchgen.report.progress import Progress
from batchgen.report.summary import summary_lines
from batchgen.signals import StopSignals
from batchgen.text.token_store import TokenStore

EXIT_OK, EXIT_SOME_ROWS_FAILED = 0, 3


def run_job(job: Job, progress: Progress | None = None, restart: bool = False, only: Choice | None = None) -> int:
    """Run, or go on with, a job; returns the exit code. Raises BatchgenError subclasses for what a user can mend.

    `restart` moves what is in the run folder aside first; `only` answers these rows of a finished job once more.
    """
    progress = progress or Progress()
    with StopSignals() as stop:
        progress.phase("open")
        inputs = open_inputs(job)
        if restart and (aside := set_aside(job.output.path)) is not None:
            progress.say(f"what was in {job.output.path} is now in {aside}")
        with RunFolder(job.output.path) as folder:
            prints = job_fingerprint(inputs)
            settings = {} if only is None else folder.check_rerun(prints)
            resumed = only is None and folder.begin(job.model_dump(mode="json", by_alias=True), prints)
            folder.update_state({"num_samples": job.sampling.n, "finished": False})
            with stored_tokens(inputs, folder, progress) as tokens:
                with_replicas = only is None and num_replicas(job) > 1
                is_shared = only is not None or with_replicas or (folder.path / "workers").is_dir()
                store, output = tokens.whole() if is_shared else tokens.head(), job.output
                with PartWriter(
                    folder, job_rows(store), output.commit_rows, output.commit_seconds, output.compression
                ) as writer:
                    for repair in writer.repairs:
                        progress.say(repair)
                    if writer.repairs and folder.read().get("history"):
                        progress.say("what an earlier --only answered in these parts falls back to the answers before it")
                    tell_adopted(writer, progress)
                    chosen = None
                    if only is not None:
                        chosen = rows_to_rerun(only, settings, folder, writer, inputs.reader, job.input.id_column)
                        chosen, hopeless = with_prompts(store, chosen)
                        progress.say(
                            f"answering {len(chosen)} rows once more"
                            + (f"; {hopeless} have no prompt that a model could answer, which stays so" if hopeless else "")
                        )
                    if resumed:
                        of = "" if tokens.num_rows is None else f" of {tokens.num_rows}"
                        progress.say(
                            f"going on in {folder.path}: {len(writer.finished())}{of} rows are done"
                            + ("; the input has changed since" if folder.input_has_changed else "")
                        )
                    if with_replicas:
                        folder.update_state({"num_rows": store.num_rows})
                        result = run_replicas(inputs, folder, store, writer, progress, stop)
                        tell_adopted(writer, progress)
                    else:
                        checkpoint = Checkpoint(folder.path, prints, output.checkpoint_seconds, ignore=only is not None)
                        if checkpoint.fault is not None:
                            progress.say(checkpoint.fault)
                        portions = owed_windows(inputs, folder, tokens, writer, checkpoint, chosen)
                        result = answer(inputs, folder, portions, writer, progress, stop, checkpoint, lambda: tokens.failed)
                    rows = writer.rows
            if only is not None:
                folder.end_rerun()
            progress.phase("merge", len(rows), "row")
            merged = merge(inputs.reader, job, folder, rows, job.sampling.n)
            if job.output.push_to is not None:
                push(merged.files, job.output.push_to)
            progress.close()
            summary = summarize(merged, result, progress.seconds)
            if result.num_answered or not folder.summary.exists():  # a run with nothing left to do keeps the figures
                write_atomically(folder.summary, lambda f: f.write(json.dumps(summary, indent=2).encode()))
    for line in summary_lines(summary):
        progress.say(line)
    progress.say(f"results   {folder.results}")
    return EXIT_OK if merged.by_status.keys() <= {"ok"} else EXIT_SOME_ROWS_FAILED


def tell_adopted(writer: PartWriter, progress: Progress) -> None:
    """Take what workers have committed, and say so."""
    num_adopted, damages = adopt(writer)
    for damage in damages:
        progress.say(damage)
    if num_adopted:
        progress.say(f"took {num_adopted} parts that workers have committed")


def with_prompts(store: TokenStore, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Those of `rows` (positions) that have tokens, and how many have none."""
    answerable = store.rows[np.isin(store.rows, rows) & (store.lengths > 0)]
    return answerable, len(rows) - len(answerable)


def summarize(merged: MergeSummary, result: EngineResult, seconds: dict[str, float]) -> dict[str, Any]:
    """The figures of this run, for summary.json and for the last lines on the screen."""
    counts = result.counts
    prompt, output = result.num_prompt_tokens, max(0, counts.num_output - counts.num_resumed)
    run_seconds = max(seconds.get("run", 0.0), 1e-9)
    return {
        "rows": {
            "answers": merged.num_answers,
            "answered_now": result.num_answered,
            "repeated": result.num_repeated,
            "by_status": merged.by_status,
            "by_error_code": merged.by_error_code,
        },
        "tokens": {
            "prompt": prompt,
            "computed": counts.num_prefill,
            "cached": counts.num_cached,
            "recomputed": counts.num_recomputed,
            "output": output,
            "resumed": counts.num_resumed,
            "saved_predicted": 1 - result.num_planned / prompt if prompt else 0.0,
            "saved_achieved": 1 - counts.num_prefill / prompt if prompt else 0.0,
            "kv_read": counts.num_kv_read,
            "kv_visible": counts.num_kv_visible,
        },
        "steps": counts.num_steps,
        "max_running": counts.max_running,
        "preemptions": counts.num_preemptions,
        "out_of_memory": counts.num_out_of_memory,
        "failed_steps": counts.num_failed_steps,
        "rates": {
            "total": (prompt + output) / run_seconds,
            "prompt": prompt / run_seconds,
            "output": output / run_seconds,
        },
        "seconds": seconds,
        "seconds_in_steps": result.seconds_in_steps,
        "limits": result.limits,
        "products": result.products,
        "accuracy": merged.accuracy,
        "correct": merged.num_correct,
        "scored": merged.num_scored,
    }


def merge_again(path: Path, progress: Progress) -> MergeSummary:
    """Merge the committed parts of the run folder `path` once more, and those of its workers. Raises CorruptRunError if
    answers are missing."""
    job = Job.model_validate(read_job_file(path)["job"])
    reader = open_reader(job.input)
    with RunFolder(path) as folder:
        folder.check_input({INPUT_FILE + name: value for name, value in reader.fingerprint().items()})
        try:
            store = TokenStore.open(path / "tokens.arrow")
        except FileNotFoundError:
            raise CorruptRunError(
                f"{path}: tokens.arrow is not there, so the run's rows are not known; run the same job file again to go on"
            ) from None
        rows = job_rows(store)
        if (units := read_units(path)) is not None:
            with PartWriter(folder, rows) as writer:
                for repair in writer.repairs:
                    progress.say(repair)
                tell_adopted(writer, progress)
            if owed := owed_units(path, units, store, writer.ledger):
                raise missing_rows(path, units, owed, writer.ledger)
        merged = merge(reader, job, folder, rows, job.sampling.n)
        if job.output.push_to is not None:
            push(merged.files, job.output.push_to)
        return merged
