"""How far a run is, read from its folder while it works or after. Takes no lock and imports nothing heavy."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from batchgen.data.commit_log import CommitLog
from batchgen.data.run_folder import read_holder, read_job_file


@dataclass(frozen=True)
class RunStatus:
    """Counts are in answers: one for each (row, sample). Answers that count no more (their row has changed, or was answered
    once more) are left out, as far as the last run has counted them when it began."""

    path: Path
    num_answers: int | None  # owed in all; None before the rows are counted
    num_committed: int
    num_failed: int  # of the committed ones
    num_parts: int
    is_finished: bool  # merged into results/
    last_commit_at: float | None  # seconds since 1970
    locked_by: str | None  # such as "process 4711 on node3"; None if no process works here


def read_status(path: str | os.PathLike[str]) -> RunStatus:
    """Raises RunFolderError if `path` is not a run folder, CorruptRunError if its job.json is damaged."""
    folder = Path(path)
    state = read_job_file(folder)["state"]
    parts = CommitLog(folder / "commit.log").read()
    num_rows, num_samples = state.get("num_rows"), state.get("num_samples", 1)
    new = [part for part in parts if part.number > state.get("standing_since_part", 0)]
    return RunStatus(
        path=folder,
        num_answers=None if num_rows is None else num_rows * num_samples,
        num_committed=state.get("standing_rows", 0) * num_samples + sum(part.num_rows for part in new),
        num_failed=state.get("standing_failed", 0) * num_samples + sum(part.num_failed for part in new),
        num_parts=len(parts),
        is_finished=bool(state.get("finished")) and (folder / "results").is_dir(),
        last_commit_at=parts[-1].committed_at if parts else None,
        locked_by=_holder(folder / "LOCK"),
    )


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Whether `batchgen prepare` has made it ready for several tasks; cluster/status.py tells more of such a one."""
    return (Path(path) / "plan" / "units.arrow").exists()


def _holder(lock_file: Path) -> str | None:
    """Whether someone has the lock shows only by asking for it; shared, and let go at once."""
    try:
        handle = os.open(lock_file, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return read_holder(lock_file)
    finally:
        os.close(handle)
