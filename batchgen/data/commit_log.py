"""commit.log: one checksummed JSON record a line, one line a committed part. What it does not name does not exist."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from batchgen.data.durable import explain_os_errors, fsync_folder
from batchgen.errors import CorruptRunError
from batchgen.records import Part


class CommitLog:
    """Append-only. One process appends at a time (the run folder's lock sees to that); anyone may read."""

    def __init__(self, path: Path):
        self.path = path
        self._good_bytes: int | None = None  # where the next record goes; known after the first read

    def read(self) -> list[Part]:
        """All committed parts, oldest first. A torn last record (the crash came while it was written) is left out.

        Raises CorruptRunError for a bad record before the last one: no crash leaves that behind.
        """
        return self._read()[0]

    def append(self, part: Part) -> None:
        """Add one record, durable on return. A torn last record is cut away first.

        Raises BatchgenError if the disk refuses; what it left of the record is torn, and so not there.
        """
        if self._good_bytes is None:
            self._good_bytes = self._read()[1]
        line = _to_line(part)
        with explain_os_errors(self.path):
            is_new = not self.path.exists()
            with open(self.path, "ab") as file:
                file.truncate(self._good_bytes)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_folder(self.path.parent)
        self._good_bytes += len(line)

    def _read(self) -> tuple[list[Part], int]:
        """Good records, and the number of bytes they take at the start of the file."""
        if not self.path.exists():
            return [], 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        parts: list[Part] = []
        num_bytes = 0
        for number, line in enumerate(lines, start=1):
            part = _from_line(line)
            if part is None and number < len(lines):
                raise CorruptRunError(
                    f"{self.path}: record {number} of {len(lines)} is damaged. Delete that line to compute the rows of its "
                    "part again, then run the same command; the other parts stay"
                )
            if part is not None:
                parts.append(part)
                num_bytes += len(line)
        return parts, num_bytes


def _to_line(part: Part) -> bytes:
    record = json.dumps(part._asdict(), sort_keys=True)
    return json.dumps({"record": record, "xxh3": _checksum(record)}).encode() + b"\n"


def _from_line(line: bytes) -> Part | None:
    try:
        outer = json.loads(line)
        if not line.endswith(b"\n") or _checksum(outer["record"]) != outer["xxh3"]:
            return None
        return Part(**json.loads(outer["record"]))
    except (ValueError, TypeError, KeyError):
        return None


def _checksum(record: str) -> str:
    return xxhash.xxh3_64_hexdigest(record.encode())
