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
from batchgen.data.hf_dataset import is_dataset
from batchgen.data.run_folder import RunFolder
from batchgen.data.standard_input import refuse_standard_input
from batchgen.errors import BatchgenError, UsageError
from batchgen.job import Job

WARNING_SECONDS = 120  # before the time limit; Slurm looks at limits every 30 s
_OWN = ("array", "dependency", "signal", "output", "open-mode", "chdir", "wrap", "job-name", "parsable", "test-only", "wait")
_OWN_SHORT = "adoDJWhV"
_ABOUT_GPUS = (
    *("--gres", "--gres-flags", "--gpus", "-G", "--gpus-per-node", "--gpus-per-socket", "--gpus-per-task", "--gpu-bind"),
    *("--gpu-freq", "--cpus-per-gpu", "--mem-per-gpu", "--ntasks-per-gpu", "--tres-per-task"),
)


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
    job_file: Path,
    overrides: Sequence[str],
    folder: Path,
    array: str,
    options: Sequence[str],
    working_folder: Path,
    offline: bool = True,
) -> Scripts:
    """The text of the three scripts. folder: the run's, absolute. options: of sbatch, as the user gave them; those about
    GPUs go to the array only. offline: the tasks need nothing of the hub but what `prepare` has fetched.

    Raises UsageError for an option that the scripts set themselves.
    """
    check_options(options)
    num_tasks, indices = parse_array(array)
    name = re.sub(r"[^\w.-]", "-", folder.name) or "batchgen"
    logs = str(folder / "logs").replace("\\", r"\\").replace("%", "%%")
    job = [str(job_file), *(word for override in overrides for word in ("--set", override))]

    def script(part: str, options: Sequence[str], log: str, *own: str, command: Sequence[str]) -> str:
        lines = [
            *(
                [f"--job-name={name}-{part}"],
                [f"--chdir={working_folder}"],
                [f"--output={logs}/{log}", "--open-mode=append"],
            ),
            *([option] for option in own),
            *([options] if options else []),
        ]
        exports = [f"{NUM_TASKS}={num_tasks}", "PYTHONSAFEPATH=1"]
        if part == "answer" and offline:
            exports.append("HF_HUB_OFFLINE=1")  # `prepare` has fetched what there is to fetch
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {shlex.join(line)}" for line in lines),
                f"export {' '.join(exports)}",
                f"exec {shlex.join([*batchgen_command(), *command])}  # Slurm's signals go to this process",
                "",
            ]
        )

    light = without_gpus(options)
    return Scripts(
        script("prepare", light, "prepare.log", command=["prepare", *job, "--tasks", str(num_tasks)]),
        script(
            "answer", options, "answer-%a.log", f"--array={indices}", "--requeue", f"--signal=B:USR1@{WARNING_SECONDS}",
            command=["run", *job, "--shard", "auto"],
        ),
        script("merge", light, "merge.log", command=["merge", str(folder)]),
    )  # fmt: skip


def check_job(job: Job) -> None:
    """Raises UsageError for what would show only in the tasks' logs."""
    refuse_standard_input(job)
    RunFolder(job.output.path).refuse_foreign_folder()
    if isinstance(replicas := job.engine.replicas, int) and replicas > 1:
        raise UsageError(
            f"engine.replicas: {replicas}: a task of an array is one worker; ask for {replicas} times as many tasks, with "
            "one GPU each, and --set engine.replicas=1"
        )


def may_be_offline(job: Job) -> bool:
    """Whether tasks need no more of the hub than its cache has: files at hf:// addresses are read from there each time."""
    paths = [job.input.path] if isinstance(job.input.path, str) else job.input.path
    return is_dataset(job.input) or not any(path.startswith("hf://") for path in paths)


def batchgen_command() -> list[str]:
    """The command of this installation: another node's PATH need not have it."""
    command = Path(sys.executable).with_name("batchgen")
    return [str(command)] if command.exists() else [sys.executable, "-c", "from batchgen.cli import main; main()"]


def check_options(options: Sequence[str]) -> None:
    """Raises UsageError for what is no option and for what submit sets itself, abbreviations (--out=X, -oX) included."""
    if options and not options[0].startswith("-"):
        raise UsageError(f"{options[0]}: neither the job file nor an option of sbatch")
    for option in options:
        name = option.partition("=")[0]
        if name.startswith("--"):
            own = len(name) > 3 and any(long.startswith(name[2:]) for long in _OWN)
        else:
            own = len(name) > 1 and name[0] == "-" and name[1] in _OWN_SHORT
        if own:
            raise UsageError(f"{option}: submit sets this itself; leave it out, or change the script that --print shows")


def without_gpus(options: Sequence[str]) -> list[str]:
    """`options` less those about GPUs, and less their values where these are words of their own."""
    kept, skip = [], False
    for option in options:
        about_gpus = option.partition("=")[0] in _ABOUT_GPUS or option.startswith("-G")
        if not (skip or about_gpus):
            kept.append(option)
        skip = not skip and option in _ABOUT_GPUS
    return kept


def submit(scripts: Scripts, folder: Path) -> list[tuple[str, str]]:
    """Write the scripts into DIR/submit and submit them, each after the one before it: [(part, Slurm's job id)].

    Raises UsageError where there is no sbatch, BatchgenError with Slurm's own words if it refuses one of them; those before
    it are cancelled then.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch on this machine; --print shows the scripts, to be submitted elsewhere")
    ids: list[tuple[str, str]] = []
    for part, path in save(scripts, folder).items():
        command = ["sbatch", "--parsable", *dependency(part, ids[-1][1] if ids else ""), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            for _, begun in reversed(ids):
                subprocess.run(["scancel", begun], capture_output=True, check=False)
            raise BatchgenError(f"sbatch refused {path}: {' '.join(done.stderr.split())}; nothing is submitted")
        ids.append((part, done.stdout.strip().partition(";")[0]))
    return ids


def dependency(part: str, before: str) -> list[str]:
    """What sbatch is told of the job before it: answer only after prepare went well, merge however the array ended."""
    if part == "answer":
        return [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"]
    return [f"--dependency=afterany:{before}"] if part == "merge" else []


def by_hand(folder: Path) -> list[str]:
    """Shell commands that do what `submit` does with the scripts of a run folder."""
    return [
        " ".join([f"{part}=$(sbatch --parsable", *dependency(part, f"${before}"), shlex.quote(f"{folder}/submit/{part}.sh")])
        + ")"
        for before, part in zip(("", "prepare", "answer"), Scripts._fields, strict=True)
    ]


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
