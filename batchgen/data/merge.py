"""Input rows and committed answers, zipped into results/: input order, all input columns as they were, answers beside them.

Written to results.tmp, then swapped in. It may be repeated; whatever a crash leaves, a repeat mends. Where files and row
groups end depends on input and answers alone, not on how the answers came to be in parts: same content, same bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.answers import SortedAnswers
from batchgen.data.commit_log import CommitLog
from batchgen.data.durable import explain_os_errors, fsync_folder
from batchgen.data.extract import extract_column, is_correct
from batchgen.data.job_rows import JobRows
from batchgen.data.reader import Reader, require_columns
from batchgen.data.rows import iter_rows
from batchgen.data.run_folder import RunFolder
from batchgen.data.schema import carried_columns, results_schema
from batchgen.job import Job, OutputSection

_PIECE_BYTES = 64 * 2**20
_ROW_GROUP_ROWS = 65_536
_ROW_GROUP_BYTES = 128 * 2**20


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
    """Write results/part-00000.parquet ... from all committed parts; one output row for each (row, sample_index).

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
    files = [folder.results / name for name in writer.names]
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


class ResultsWriter:
    """part-00000.parquet, part-00001.parquet ... of `rows_per_file` rows each, durable when closed. At least one file."""

    def __init__(self, folder: Path, schema: pa.Schema, output: OutputSection):
        self.folder, self.schema, self.output = folder, schema, output
        self.names: list[str] = []
        self._file: BinaryIO | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._rows_in_file = 0
        self._held: list[pa.RecordBatch] = []
        self._bytes_held = 0

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
            if not self.names:
                self._open_next()
            self._close_file()
        elif self._file is not None:
            with contextlib.suppress(OSError):  # what it writes on closing; the error that led here is the one to tell
                self._file.close()

    def write(self, batch: pa.RecordBatch, num_bytes: int) -> None:
        """num_bytes: of the batch, by which row groups are kept small."""
        bytes_per_row = num_bytes // max(1, batch.num_rows)
        while batch.num_rows:
            room = self.output.rows_per_file - self._rows_in_file - self._rows_held
            if room == 0:
                self._flush()
                self._close_file()
                continue
            taken = batch.slice(0, min(room, _ROW_GROUP_ROWS - self._rows_held))
            self._held.append(taken)
            self._bytes_held += taken.num_rows * bytes_per_row
            batch = batch.slice(taken.num_rows)
            if self._rows_held == _ROW_GROUP_ROWS or self._bytes_held >= _ROW_GROUP_BYTES:
                self._flush()

    @property
    def _rows_held(self) -> int:
        return sum(one.num_rows for one in self._held)

    def _flush(self) -> None:
        if not self._held:
            return
        if self._file is None:
            self._open_next()
        assert self._parquet is not None
        table = pa.Table.from_batches(self._held, self.schema)
        with explain_os_errors(self.folder / self.names[-1]):
            self._parquet.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self._rows_in_file += table.num_rows
        self._held, self._bytes_held = [], 0

    def _open_next(self) -> None:
        self.names.append(f"part-{len(self.names):05d}.parquet")
        path = self.folder / self.names[-1]
        with explain_os_errors(path):
            self._file = open(path, "wb")  # noqa: SIM115 (held open between writes)
            self._parquet = pq.ParquetWriter(self._file, self.schema, compression=self.output.compression)

    def _close_file(self) -> None:
        if self._file is None or self._parquet is None:
            return
        with explain_os_errors(self.folder / self.names[-1]), self._file as file:
            self._parquet.close()
            file.flush()
            os.fsync(file.fileno())
        self._file, self._rows_in_file = None, 0
