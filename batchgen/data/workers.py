"""What the workers of a job have committed, each in a part store of its own below workers/; and how it becomes the run's.

A worker's part is adopted by a hard link (a copy where there are none) and a record in the run's own commit log. Nothing of
a worker's is deleted. It may be broken off anywhere and repeated.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from batchgen.data.commit_log import CommitLog
from batchgen.data.durable import explain_os_errors, fsync_folder, write_atomically
from batchgen.data.job_rows import JobRows
from batchgen.data.ledger import Ledger
from batchgen.data.part import read_part_columns
from batchgen.data.part_store import PartStore
from batchgen.data.recover import damage_of, keep_aside, next_number, part_name
from batchgen.data.writer import PartWriter
from batchgen.errors import CorruptRunError
from batchgen.records import Part


def worker_stores(folder: Path) -> list[PartStore]:
    """In the order of their names, which is the order in which their parts are adopted."""
    workers = folder / "workers"
    return [PartStore(path) for path in sorted(workers.iterdir()) if path.is_dir()] if workers.is_dir() else []


class AllAnswers:
    """Which rows are answered by anyone, as far as it was last looked."""

    def __init__(self, folder: Path, rows: JobRows) -> None:
        self.folder, self.rows = folder, rows
        self.ledger = Ledger(PartStore(folder), [], rows)
        self._counted: set[tuple[Path, str]] = set()

    def look(self) -> Ledger:
        """Count the parts that were committed since. One that cannot be read holds no answers; adopt tells of it."""
        for store in [PartStore(self.folder), *worker_stores(self.folder)]:
            for part in CommitLog(store.commit_log).read():
                if (store.path, part.checksum) not in self._counted:
                    self._counted.add((store.path, part.checksum))
                    try:
                        self.ledger.count(store, part)
                    except CorruptRunError:
                        continue
        return self.ledger


def adopt(writer: PartWriter) -> tuple[int, list[str]]:
    """Make parts of workers those of the run folder that `writer` writes in: the ones that hold an answer to a row that has
    none yet. (how many, a sentence for each damaged one.) Of two answers to a row the first one adopted counts alone, unless
    the second comes with others that are needed; they are equal, but for what a device may round.

    Raises BatchgenError if the disk refuses.
    """
    folder, ledger = writer.store, writer.ledger
    known = {part.checksum for part in writer.parts}
    number = next_number(folder)
    adopted: list[Part] = []
    told: list[str] = []
    for store in worker_stores(folder.path):
        for part in CommitLog(store.commit_log).read():
            if part.checksum in known:
                continue
            path = store.parts / part.name
            damage = damage_of(path, part)
            if damage is not None:
                if path.exists():
                    kept = keep_aside(path)
                    told.append(
                        f"{path}: {damage}; it is kept as {kept.name}; its {part.num_rows} answers are computed again"
                    )
                continue
            owners = read_part_columns(store, part, ["row_key", "prompt_hash"])
            index = ledger.rows.find(owners["row_key"].to_numpy(), owners["prompt_hash"].to_numpy())
            if not np.any(~ledger.is_answered[index[index >= 0]]):
                continue
            own = part._replace(name=part_name(number + len(adopted)))
            with explain_os_errors(folder.parts):
                _link_or_copy(path, folder.parts / own.name)
            ledger.count(folder, own)
            known.add(own.checksum)
            adopted.append(own)
    if adopted:
        with explain_os_errors(folder.parts):
            fsync_folder(folder.parts)  # parts before their records
        writer.log.append(*adopted)
        writer.parts += adopted
    return len(adopted), told


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        with open(source, "rb") as file:
            write_atomically(target, lambda copy: shutil.copyfileobj(file, copy))
