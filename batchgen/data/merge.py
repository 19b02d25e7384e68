"""Input rows and committed answers, zipped into results/: input order, all input columns as they were, answers beside them.

Written to results.tmp, then swapped in. It may be repeated; whatever a crash leaves, a repeat mends. Where files and row
groups end depends on input and answers alone, not on how the answers came to be in parts: same content, same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.answers import SortedAnswers
from batchgen.data.commit_log import CommitLog
from batchgen.data.durable import explain_os_errors, fsync_folder
from batchgen.data.extract import extract_column, is_correct
from batchgen.data.job_rows import JobRows
from batchgen.data.reader import Reader, require_columns
from batchgen.data.results_writer import ResultsWriter
from batchgen.data.rows import iter_rows
from batchgen.data.run_folder import RunFolder
from batchgen.data.schema import carried_columns, results_schema
from batchgen.job import Job

_PIECE_BYTES = 64 * 2**20


class MergeSummary(NamedTuple):
    files: list[Path]
    num_answers: int
    by_status: dict[str, int]  # ok, error, skipped -> answers; statuses that occur
    by_error_code: dict[str, int]
    num_correct: int = 0  # of num_scored; both 0 without output.extract.expected
    num_scored: int = 0  # answers to rows with an expected value; failed ones count as wrong

    @property
    def accuracy(self) -> float | None:
        return self.num_correct / self.num_scored if self.num_scored else None


def merge(reader: Reader, job: Job, folder: RunFolder, rows: JobRows, n: int) -> MergeSummary:
    """Write results/part-00000 ... from all committed parts; one output row for each (row, sample_index).

    `rows`: the job's rows as they stand in the input. Beside them memory is bounded, whatever their number.
    Raises CorruptRunError if a (row, sample) is missing or a part is damaged, UsageError if columns collide, BatchgenError
    if the disk refuses.
    """
    schema = results_schema(reader.schema, job)
    aside, old = folder.path / "results.tmp", folder.path / "results.old"
    with explain_os_errors(folder.results):
        _recover(folder.results, old)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    answers = SortedAnswers(folder, CommitLog(folder.commit_log).read(), rows, n, aside / "spill")
    tally = _Tally()
    with ResultsWriter(aside, schema, job.output) as writer:
        for asked, answered in _zip(reader, job, rows.rows, answers):
            num_bytes = asked.nbytes + _answer_bytes(answered)
            writer.write(_joined(asked, answered, schema, job, tally), num_bytes)
    with explain_os_errors(folder.results):
        shutil.rmtree(aside / "spill", ignore_errors=True)
        fsync_folder(aside)
        if folder.results.exists():
            os.replace(folder.results, old)
        os.replace(aside, folder.results)
        fsync_folder(folder.path)
        shutil.rmtree(old, ignore_errors=True)
    folder.update_state({"num_rows": len(rows), "num_samples": n, "finished": True})
    files = sorted(folder.results.iterdir())
    return MergeSummary(
        files, len(rows) * n, dict(tally.status), dict(tally.error_code), tally.num_correct, tally.num_scored
    )


def _answer_bytes(answered: pa.RecordBatch) -> int:
    """About; and unlike nbytes the same however it lies in memory."""
    text = pc.sum(pc.binary_length(answered.column("generated_text"))).as_py() or 0
    return int(text) + 4 * int(pc.sum(answered.column("num_output_tokens")).as_py() or 0) + 64 * answered.num_rows


def _recover(results: Path, old: Path) -> None:
    """After a crash between the two renames of the swap, the old results go back to their name."""
    if old.exists() and not results.exists():
        os.replace(old, results)
    shutil.rmtree(old, ignore_errors=True)


def _zip(
    reader: Reader, job: Job, rows: np.ndarray, answers: SortedAnswers
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """(input rows, their answers), both with one line for each answer, in pieces of bounded size."""
    buckets = answers.buckets()
    n, bucket, bucket_start = answers.n, None, -answers.bucket_rows
    for begin, batch in _job_rows(reader, _columns_read(reader, job), rows):
        row_bytes = batch.get_total_buffer_size() / max(1, batch.num_rows)
        piece_rows = max(1, int(_PIECE_BYTES / max(1, row_bytes * n)))
        done = 0
        while done < batch.num_rows:
            at = begin + done
            if at >= bucket_start + answers.bucket_rows:
                bucket, bucket_start = next(buckets), bucket_start + answers.bucket_rows
            assert bucket is not None
            # buckets end at multiples of the grid too, so no piece ends where it would not with other buckets
            size = min(piece_rows, batch.num_rows - done, answers.grid_rows - at % answers.grid_rows)
            asked = batch.slice(done, size)
            if n > 1:
                asked = asked.take(pa.array(np.repeat(np.arange(size), n)))
            answered = bucket.slice((at - bucket_start) * n, size * n).combine_chunks().to_batches()[0]
            yield asked, answered
            done += size
    for _ in buckets:  # none is left unless there are no rows; then this checks that there are no answers either
        raise AssertionError("more buckets than rows")


def _job_rows(reader: Reader, columns: list[str], rows: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(position in `rows` of the first, input rows that are in `rows`) for each batch that holds some."""
    if not len(rows):
        return
    for source in reader.batches(columns):
        begin, end = np.searchsorted(rows, [source.row, source.row + source.batch.num_rows])
        chosen = rows[begin:end] - source.row
        if len(chosen) == source.batch.num_rows:
            yield int(begin), source.batch
        elif len(chosen):
            yield int(begin), source.batch.take(pa.array(chosen))
        if end == len(rows):
            return


def _columns_read(reader: Reader, job: Job) -> list[str]:
    columns = carried_columns(reader.schema, job)
    expected = job.output.extract.expected if job.output.extract else None
    if expected is not None:
        require_columns(reader.schema, {"output.extract.expected": expected})
        if expected not in columns:
            columns.append(expected)
    return columns


class _Tally:
    def __init__(self) -> None:
        self.status: Counter[str] = Counter()
        self.error_code: Counter[str] = Counter()
        self.num_correct = 0
        self.num_scored = 0


def _joined(asked: pa.RecordBatch, answered: pa.RecordBatch, schema: pa.Schema, job: Job, tally: _Tally) -> pa.RecordBatch:
    columns = [asked.column(name) for name in carried_columns(asked.schema, job)] + list(answered.columns)
    tally.status.update(answered.column("status").to_pylist())
    tally.error_code.update(code for code in answered.column("error_code").to_pylist() if code is not None)
    extract = job.output.extract
    if extract is not None:
        values = extract_column(answered.column("generated_text").to_pylist(), extract)
        columns.append(pa.array(values, pa.string()))
        if extract.expected is not None:
            expected = [
                row[extract.expected] if isinstance(row, dict) else None for row in iter_rows(asked, [extract.expected])
            ]
            correct = [is_correct(value, right, extract) for value, right in zip(values, expected, strict=True)]
            columns.append(pa.array(correct, pa.bool_()))
            tally.num_scored += sum(one is not None for one in correct)
            tally.num_correct += sum(one is True for one in correct)
    return pa.RecordBatch.from_arrays(columns, schema=schema)
