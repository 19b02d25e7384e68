"""What to type to run tasks of a shared job again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def commands_to_rerun(folder: Path, job: str, num_tasks: int, tasks: Sequence[int]) -> list[str]:
    """Shell commands, each to be run by itself. job: the job file and its --set, as `prepare` was given them."""
    script = folder.absolute() / "submit" / "answer.sh"
    if script.exists():
        return [f"sbatch --array={','.join(map(str, tasks))} {shlex.quote(str(script))}"]
    return [f"batchgen run {job} --shard {task}/{num_tasks}" for task in tasks]
