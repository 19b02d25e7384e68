"""The first rows of a run's results, for a person. Reads no more than it prints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.data.run_folder import read_job_file
from batchgen.errors import CorruptRunError, RunFolderError


def first_rows(path: Path, num_rows: int, width: int) -> list[str]:
    """Lines: the files, then each row with one column a line, values cut to `width` characters.

    Raises RunFolderError if `path` is not a run folder or has no results yet, CorruptRunError if they cannot be read.
    """
    read_job_file(path)
    files = sorted(file for pattern in ("part-*", "output.jsonl") for file in (path / "results").glob(pattern))
    if not files:
        raise RunFolderError(f"{path}: no results yet; run the job to its end, `batchgen status {path}` says how far it is")
    try:
        return _lines(files, num_rows, width)
    except (pa.ArrowException, ValueError, OSError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CorruptRunError(
            f"{path / 'results'}: cannot be read: {said}; `batchgen merge {path}` writes the results again"
        ) from None


def _lines(files: list[Path], num_rows: int, width: int) -> list[str]:
    if files[0].suffix == ".jsonl":
        return _lines_of_json(files, num_rows, width)
    counts = [pq.ParquetFile(file).metadata.num_rows for file in files]
    lines = [f"{file}  {count:,} rows" for file, count in zip(files, counts)]
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=max(num_rows, 1)):
            for i in range(min(num_rows, batch.num_rows)):
                lines.append("")
                for name, column in zip(batch.schema.names, batch.columns):
                    lines.append(f"  {name:18s} {_shown(column, i, width)}")
            return lines
    return lines


def _lines_of_json(files: list[Path], num_rows: int, width: int) -> list[str]:
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in files]
    with open(files[0], encoding="utf-8") as file:
        for line in itertools.islice(file, num_rows):
            lines += ["", *(f"  {name:18s} {_cut(value, width)}" for name, value in json.loads(line).items())]
    return lines


def _shown(column: Any, i: int, width: int) -> str:
    try:
        value = column[i].as_py()
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        return f"({type(error).__name__})"
    return _cut(value, width)


def _cut(value: Any, width: int) -> str:
    text = " ".join(repr(value).split()) if not isinstance(value, str) else value.replace("\n", " | ")
    return text if len(text) <= width else f"{text[: width - 4]} ..."
