"""`run --only`: a chosen part of a finished job is answered once more, with other settings; the newest answer counts.

The choice is made of the answers as they stood when the re-run began, and job.json keeps that moment as the number of the
last part then. So the same command goes on with a re-run that was broken off, and begins a new one when that is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from batchgen.data.reader import Reader
from batchgen.data.rows import row_key
from batchgen.data.run_folder import RunFolder
from batchgen.data.writer import PartWriter
from batchgen.errors import RunFolderError, UsageError


class Choice(NamedTuple):
    name: str  # failed, truncated, or what a key file is called by its content
    keys: list[str] | None = None  # lines of the key file


def read_choice(only: str) -> Choice:
    """What --only says. Raises UsageError for a key file that cannot be read or is empty."""
    if only in ("failed", "truncated"):
        return Choice(only)
    try:
        content = Path(only).read_bytes()
        keys = [line for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--only {only}: write failed, truncated, or a file with one id a line: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
    if not keys:
        raise UsageError(f"--only {only}: the file names no row")
    return Choice(f"keys {xxhash.xxh3_64_hexdigest(content)}", keys)


def rows_to_rerun(
    choice: Choice, settings: dict[str, object], folder: RunFolder, writer: PartWriter, reader: Reader, id_column: str | None
) -> np.ndarray:
    """[k] int64: positions of the chosen rows that this re-run has not answered yet. Records its beginning in job.json.

    `settings`: what differs from the job's own. Raises RunFolderError if the job itself has rows without an answer,
    UsageError if a key is of no row.
    """
    ledger = writer.ledger
    num_owed = int((~ledger.is_answered).sum())
    if num_owed:
        raise RunFolderError(f"{folder.path}: {num_owed} rows have no answer yet; run the job without --only first")
    last_part = max((part.number for part in writer.parts), default=0)
    begun_after = folder.begin_rerun(choice.name, settings, last_part)
    if choice.keys is not None:
        chosen = _named(choice.keys, writer, reader, id_column)
    else:
        chosen = ledger.is_failed if choice.name == "failed" else ledger.is_truncated
    not_yet = ledger.part_number <= begun_after  # the newest answers of these are those of then
    return writer.rows.rows[chosen & not_yet]


def _named(keys: list[str], writer: PartWriter, reader: Reader, id_column: str | None) -> np.ndarray:
    """[number of rows] bool: rows with these ids, or without an id column at these positions (the column `row`)."""
    rows, wrong = writer.rows, []
    is_number = id_column is None or pa.types.is_integer(reader.schema.field(id_column).type)
    known = (rows.rows if id_column is None else rows.keys).tolist()
    place = {value: i for i, value in enumerate(known)}
    chosen = np.zeros(len(rows), bool)
    for key in keys:
        try:
            value: int | str = int(key) if is_number else key
        except ValueError:
            wrong.append(key)
            continue
        at = place.get(value if id_column is None else row_key("", 0, value))
        if at is None:
            wrong.append(key)
        else:
            chosen[at] = True
    if wrong:
        what = "row numbers of the results" if id_column is None else f"ids of {id_column}"
        raise UsageError(
            f"--only: {len(wrong)} of {len(keys)} lines are no {what} of this job, such as {', '.join(wrong[:3])}"
        )
    return chosen
