"""commit.log: one checksummed JSON record a line, one line a committed part. What it does not name does not exist."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import xxhash

from batchgen.data.durable import explain_os_errors, fsync_folder, write_atomically
from batchgen.records import Part


class LogContent(NamedTuple):
    parts: list[Part]  # of the good records, oldest first
    num_damaged: int  # records before the last good one that are not good: no crash leaves that behind
    num_bytes: int  # up to the end of the last good record: what follows is torn, and the next append cuts it away


class CommitLog:
    """Append-only. One process appends at a time (the run folder's lock sees to that); anyone may read."""

    def __init__(self, path: Path):
        self.path = path
        self._good_bytes: int | None = None  # where the next record goes; known after the first read

    def read(self) -> list[Part]:
        """All committed parts, oldest first. A torn last record (the crash came while it was written) is left out, as are
        damaged ones."""
        return self.inspect().parts

    def append(self, *parts: Part) -> None:
        """Add a record for each, durable on return. A torn last record is cut away first.

        Raises BatchgenError if the disk refuses; what it left of the record is torn, and so not there.
        """
        if self._good_bytes is None:
            self._good_bytes = self.inspect().num_bytes
        lines = b"".join(map(_to_line, parts))
        with explain_os_errors(self.path):
            is_new = not self.path.exists()
            with open(self.path, "ab") as file:
                file.truncate(self._good_bytes)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_folder(self.path.parent)
        self._good_bytes += len(lines)

    def rewrite(self, parts: list[Part]) -> None:
        """Make it hold records of `parts` only, in one step. Raises BatchgenError if the disk refuses; it then stays."""
        lines = [_to_line(part) for part in parts]
        write_atomically(self.path, lambda file: file.writelines(lines))
        self._good_bytes = None

    def inspect(self) -> LogContent:
        if not self.path.exists():
            return LogContent([], 0, 0)
        parts: list[Part] = []
        at = good_bytes = num_bad = num_damaged = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            at += len(line)
            part = _from_line(line)
            if part is None:
                num_bad += 1
            else:
                parts.append(part)
                good_bytes, num_damaged = at, num_bad
        return LogContent(parts, num_damaged, good_bytes)


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
