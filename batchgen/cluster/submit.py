"""`batchgen submit`: three Slurm jobs for one job file, as scripts a person can read, change and submit by hand.

    prepare   one task: tokenizes and plans, into the run folder; needs no GPU
    answer    the array: each task answers its units of the plan, then what slow or dead tasks left
    merge     one task, when the array has ended in whatever way: results/, or what is missing and how to get it

Python is the process that Slurm signals (`exec`). USR1 comes before the time limit; the task then commits and asks to run
again. TERM comes with preemption, requeue and scancel; Slurm itself runs the task again after the first two.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchgen.cluster.environment import NUM_TASKS
from batchgen.errors import BatchgenError, UsageError

WARNING_SECONDS = 120  # before the time limit; Slurm looks at limits every 30 s
RESERVED = ("--array", "-a", "--dependency", "-d", "--signal", "--output", "-o", "--open-mode", "--chdir", "-D", "--wrap")
_ABOUT_GPUS = ("--gres", "--gpus", "-G", "--ntasks-per-gpu", "--mem-per-gpu", "--cpus-per-gpu")


class Scripts(NamedTuple):
    prepare: str
    answer: str
    merge: str


def parse_array(text: str) -> tuple[int, str]:
    """`N` or `N%M` (at most M at a time) -> (N, what sbatch's --array takes). Raises UsageError."""
    match = re.fullmatch(r"([1-9]\d*)(%[1-9]\d*)?", text)
    if match is None:
        raise UsageError(f"--array {text}: give the number of tasks, such as 8, or 8%4 for at most four at a time")
    return int(match[1]), f"0-{int(match[1]) - 1}{match[2] or ''}"


def write_scripts(
    job_file: Path, overrides: Sequence[str], folder: Path, array: str, options: Sequence[str], working_folder: Path
) -> Scripts:
    """The text of the three scripts. options: of sbatch, as the user gave them; those about GPUs go to the array only.

    Raises UsageError for an option that the scripts set themselves.
    """
    for option in options:
        if option.partition("=")[0] in RESERVED:
            raise UsageError(f"{option}: submit sets this itself; leave it out, or change the script that --print shows")
    num_tasks, indices = parse_array(array)
    name = re.sub(r"[^\w.-]", "-", folder.name) or "batchgen"
    run = [sys.executable, "-m", "batchgen.cli"]
    job = [str(job_file), *(word for override in overrides for word in ("--set", override))]

    def script(part: str, options: Sequence[str], log: str, *own: str, command: Sequence[str]) -> str:
        lines = [f"--job-name={name}-{part}", f"--chdir={working_folder}", f"--output={folder / 'logs' / log}", *own]
        given = [shlex.join(options)] if options else []
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {line}" for line in [*lines, *given]),
                f"export {NUM_TASKS}={num_tasks} PYTHONSAFEPATH=1",
                *(["export HF_HUB_OFFLINE=1  # `prepare` has fetched what there is to fetch"] if part == "answer" else []),
                f"exec {shlex.join([*run, *command])}",
                "",
            ]
        )

    light = without_gpus(options)
    return Scripts(
        script("prepare", light, "prepare.log", "--open-mode=append", command=["prepare", *job, "--tasks", str(num_tasks)]),
        script(
            "answer", options, "answer-%a.log", f"--array={indices}", "--open-mode=append", "--requeue",
            f"--signal=B:USR1@{WARNING_SECONDS}", command=["run", *job, "--shard", "auto"],
        ),
        script("merge", light, "merge.log", "--open-mode=append", command=["merge", str(folder)]),
    )  # fmt: skip


def without_gpus(options: Sequence[str]) -> list[str]:
    """`options` less those about GPUs, and less their values where these are words of their own."""
    kept, skip = [], False
    for option in options:
        if skip:
            skip = False
            continue
        name, has_value, _ = option.partition("=")
        if name.startswith(_ABOUT_GPUS):
            skip = not has_value and name in (*_ABOUT_GPUS,) and option == name
        else:
            kept.append(option)
    return kept


def submit(scripts: Scripts, folder: Path) -> list[tuple[str, str]]:
    """Write the scripts into DIR/submit and submit them, each after the one before it: [(part, Slurm's job id)].

    Raises UsageError where there is no sbatch, BatchgenError with Slurm's own words if it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch on this machine; --print shows the scripts, to be submitted elsewhere")
    paths = save(scripts, folder)
    ids: list[tuple[str, str]] = []
    for part, path in paths.items():
        # answer only after prepare went well; merge however the array ended
        after = {"answer": "afterok", "merge": "afterany"}.get(part)
        dependency = [f"--dependency={after}:{ids[-1][1]}"] if after else []
        if part == "answer":
            dependency.append("--kill-on-invalid-dep=yes")
        done = subprocess.run(["sbatch", "--parsable", *dependency, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            begun = f" ({', '.join(f'{p} is job {i}' for p, i in ids)}: scancel what should not run)" if ids else ""
            raise BatchgenError(f"sbatch refused {path}: {' '.join(done.stderr.split())}{begun}")
        ids.append((part, done.stdout.strip().partition(";")[0]))
    return ids


def save(scripts: Scripts, folder: Path) -> dict[str, Path]:
    """DIR/submit/PART.sh of each; DIR/logs, which Slurm does not make."""
    (folder / "submit").mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    paths = {}
    for part, text in scripts._asdict().items():
        paths[part] = folder / "submit" / f"{part}.sh"
        paths[part].write_text(text)
        paths[part].chmod(0o755)
    return paths
