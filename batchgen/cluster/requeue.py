"""A task of a Slurm array that is near its time limit asks to run again, if it got anywhere in the time it had.

USR1 is the warning that `submit` asks for (--signal=B:USR1@...). TERM needs nothing: after preemption, requeue and the loss
of a node Slurm runs the task again by itself, and after scancel nobody wants it to.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from batchgen.errors import Interrupted

PATIENCE_SECONDS = 60.0  # for scontrol; the warning comes longer before the limit


def requeue(interrupted: Interrupted, environ: Mapping[str, str]) -> Interrupted:
    """Ask Slurm to run this task again; what to end with: `interrupted`, whose message now says what came of it.

    An attempt that committed no answer would be the same again, for ever, so that one ends. To be called when everything is
    written and signals are ignored: TERM follows at once.
    """
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if interrupted.signal != "USR1" or interrupted.num_answered is None or array is None or index is None:
        return interrupted
    if interrupted.num_answered == 0:
        outcome = (
            "not asking Slurm to run it again, as no answer was finished in the time it had: give the task a longer --time"
        )
    else:
        task = f"{array}_{index}"  # SLURM_JOB_ID would be the whole array's in one of its tasks
        refusal = _run("scontrol", "requeue", task)
        outcome = f"Slurm runs task {task} again" if refusal is None else f"Slurm will not run task {task} again: {refusal}"
    return Interrupted(f"{interrupted}; {outcome}", interrupted.signal)


def _run(*command: str) -> str | None:
    """None if it went well, else why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return None if done.returncode == 0 else f"{' '.join(command)}: {' '.join(done.stderr.split()) or done.returncode}"
