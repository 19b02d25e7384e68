"""Rows that are piped in, kept in a temporary file, as they are read more than once. Knows no format."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import fsspec

from batchgen.data.files import InputFile
from batchgen.errors import BatchgenError, InputError
from batchgen.job import Job

NAME = "-"


def spool() -> tuple[InputFile, tempfile.TemporaryDirectory[str]]:
    """All of standard input as a file, and the folder that goes, with it, when the second is let go.

    Raises InputError if nothing is piped in, BatchgenError if the disk refuses.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise InputError("input.path: - is standard input, and nothing is piped in; write: batchgen run JOB < rows.jsonl")
    folder = tempfile.TemporaryDirectory(prefix="batchgen-")
    path = Path(folder.name) / "standard input"  # messages name it
    try:
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
    except OSError as error:
        raise BatchgenError(
            f"{path}: cannot keep standard input: {error.strerror or error}; set TMPDIR to a folder with room"
        ) from None
    return InputFile(NAME, str(path), fsspec.filesystem("file")), folder


def refuse_standard_input(job: Job) -> None:
    if job.input.path == NAME:
        raise InputError("input.path: - is standard input, which only one process can read; save the rows to a file first")
