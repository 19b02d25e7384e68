"""A real Slurm of several pretended nodes on this machine, by slurm-local.sh, and what a test asks of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster") / "slurm-local.sh"
PARTITION = "PartitionName=spread Nodes=ALL MaxTime=INFINITE LLN=YES"  # a job goes to the node with the least to do


def why_not() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons run as root here"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "there is no Slurm, and no apt-get to install Debian's packages of it"
    return None


class SlurmCluster:
    """`with SlurmCluster(folder, 3) as slurm:` folder: short, as sockets lie in it."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        settings = {
            "DIR": str(folder),
            "NODES": str(num_nodes),
            "CPUS": "2",
            "EXTRA": PARTITION,
            "KILLWAIT": "20",
            "RETURN": "0",
        }
        self.environ = os.environ | {f"SLURM_LOCAL_{name}": value for name, value in settings.items()}
        self.environ["PATH"] += ":/usr/sbin:/sbin"

    def __enter__(self) -> SlurmCluster:
        subprocess.run([SCRIPT, "start"], env=self.environ, check=True)
        self.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([SCRIPT, "stop"], env=self.environ, check=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """The first line of each field that `scontrol show job` has: JobState, NodeList, Restarts, EndTime ..."""
        return dict(re.findall(r"(\w+)=(\S+)", self.call("scontrol", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait(self, what: str, happened: Callable[[], bool], seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < give_up, f"not within {seconds:.0f} s: {what}\n{self.call('squeue')}"
            time.sleep(0.3)
