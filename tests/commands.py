"""Runs `batchgen` as its users do, and as a child of a process that has imported everything already.

A command takes two to four seconds to import torch and transformers. Tests that need dozens of runs, or that stop a run at
a given moment, fork theirs from one warm server: each is a process of its own, with its own signals and exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).parents[1]
ENTRY = "from batchgen.cli import main; main()"
LIMIT = 120.0  # seconds; no run here takes so long

SERVER = """
import contextlib, gc, json, os, sys
from batchgen.environment import prepare_environment
prepare_environment()  # before torch
import numpy, pyarrow, torch
torch.set_num_threads(1)
import batchgen.answering, batchgen.cli, batchgen.planner, batchgen.runner
import datasets, transformers.utils.chat_template_utils
from batchgen.models.loader import load_config, resolve_model
from batchgen.text.tokenizer import load_tokenizer
tests = sys.argv[2]
files = resolve_model(sys.argv[1])  # for the modules of transformers that this imports
load_config(files), load_tokenizer(files.folder)
batchgen.answering.select_ops("torch"), pyarrow.array(numpy.zeros(1))
gc.freeze()
print("ready", flush=True)
while line := sys.stdin.readline():
    request = json.loads(line)
    if "wait" in request:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        print(json.dumps(None if pid == 0 else os.waitstatus_to_exitcode(status)), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["batchgen", *request["args"]]
    if request["faults"]:
        sys.path.insert(0, tests)
        module = __import__(request["faults"].pop("module", "fault_points"))
        module.install(**request["faults"])
    code = 0
    try:
        batchgen.cli.main()
    except SystemExit as end:
        code = end.code or 0
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # taking the interpreter down would take a second
"""


class Result(NamedTuple):
    code: int  # negative: the signal that killed it
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """What an expected failure must be: one line that begins with the program's name, and no traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("batchgen: ")]
        assert len(lines) == 1 and self.stderr.splitlines()[-1] == lines[0], self.stderr
        return lines[0].removeprefix("batchgen: ")


class Process(NamedTuple):
    """A run that was started and not waited for. `pid` gets the signals."""

    pid: int
    poll: Callable[[], int | None]
    stdout: Path
    stderr: Path

    def wait(self) -> Result:
        give_up = time.monotonic() + LIMIT
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"does not end: {self.stderr.read_text()}")
            time.sleep(0.002)
        return Result(code, self.stdout.read_text(), self.stderr.read_text())

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the caller finds out by waiting
            os.kill(self.pid, number)

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """Poll as fast as possible; False if the process ended first."""
        while not happened():
            if self.poll() is not None:
                return False
        return True


class WarmServer:
    """Forks batchgen commands. One request at a time; close it by leaving the `with`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.num_started = folder, 0
        self.codes: dict[int, int] = {}
        command = [sys.executable, "-c", SERVER, str(model), str(ROOT / "tests")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        *args: str | Path,
        cwd: Path,
        faults: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        stdout: str | None = None,
        stderr: str | None = None,
    ) -> Process:
        """`faults`: keywords of fault_points.install, or of that of another `module`, for
        this one command, and `env` more of its environment. `stdout`,
        `stderr`: files to print to."""
        self.num_started += 1
        out, err = (self.folder / f"{self.num_started}.{name}" for name in ("out", "err"))
        out.touch(), err.touch()  # the child may be slow to open them
        pid = self._ask(
            args=[str(a) for a in args], cwd=str(cwd), stdout=stdout or str(out), stderr=stderr or str(err), faults=faults,
            env=env or {},
        )  # fmt: skip

        def poll() -> int | None:
            if pid not in self.codes:
                code = self._ask(wait=pid)
                if code is None:
                    return None
                self.codes[pid] = code
            return self.codes[pid]

        return Process(pid, poll, out, err)

    def run(self, *args: str | Path, cwd: Path, **settings: Any) -> Result:
        """`settings`: see start."""
        return self.start(*args, cwd=cwd, **settings).wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


def run_cold(*args: str | Path, cwd: Path, variables: dict[str, str] | None = None) -> Result:
    """A command in a new interpreter, as from a shell."""
    command = [sys.executable, "-c", ENTRY, *map(str, args)]
    env = environment() | (variables or {})
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)
    return Result(done.returncode, done.stdout, done.stderr)


def start_cold(*args: str | Path, cwd: Path) -> Process:
    out, err = cwd / "cold.out", cwd / "cold.err"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *map(str, args)], cwd=cwd, env=environment(), stdout=stdout, stderr=stderr
        )
    return Process(process.pid, process.poll, out, err)


def catches_signals(pid: int) -> bool:
    """Whether the process has installed a handler for TERM (before that no program can help it)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def write_rows(path: Path, columns: dict[str, Any] | pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
    return path


def write_job(folder: Path, **sections: dict[str, Any] | None) -> Path:
    """A job over rows.parquet with a column `q`; each section adds to (prompt: replaces) what is here; None: without it."""
    job: dict[str, dict[str, Any]] = {
        "model": {"path": "toy"},
        "input": {"path": "rows.parquet"},
        "prompt": {"user": "{{ q }}"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "out"},
        "engine": {"threads": 1, "device": "cpu"},
    }
    for name, values in sections.items():
        if values is None:
            del job[name]
        else:
            job[name] = values if name == "prompt" else job[name] | values
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def results(folder: Path) -> pa.Table:
    """All files of a run's results, in the order of their names."""
    files = sorted((folder / "results").glob("*.parquet"))
    assert files, f"no results in {folder}"
    return pa.concat_tables([pq.read_table(file) for file in files])
