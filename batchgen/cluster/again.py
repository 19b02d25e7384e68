"""What to type to run tasks of a shared job again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def command_to_rerun(folder: Path, job: str, num_tasks: int, tasks: Sequence[int]) -> str:
    """A shell command. job: the job file and its --set, as `prepare` was given them; tasks: not empty."""
    script = folder.absolute() / "submit" / "answer.sh"
    if script.exists():
        return f"sbatch --array={','.join(map(str, tasks))} {shlex.quote(str(script))}"
    if len(tasks) == 1:
        return f"batchgen run {job} --shard {tasks[0]}/{num_tasks}"
    return f"for i in {' '.join(map(str, tasks))}; do batchgen run {job} --shard $i/{num_tasks}; done"
