"""The table of exit codes in the README, the line in --help, and a run for each: 0 only when every row is ok."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from commands import ROOT, WarmServer, write_job, write_rows

from batchgen import errors

CODES = {0, 1, 2, 3, 4, 75}
TOO_LONG = "x" * 9000  # a row that fails


def test_readme_help_and_errors_list_the_same_codes(here: Path, server: WarmServer) -> None:
    table = re.search(r"\| exit code \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())
    assert table is not None and {int(code) for code in re.findall(r"^\| (\d+) ", table[1], re.M)} == CODES
    text = " ".join(server.run("--help", cwd=here).stdout.split())
    assert {int(code) for code in re.findall(r"(?:: |; )(\d+) ", text.split("Exit codes")[1])} == CODES
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    assert {kind.exit_code for kind in kinds} == CODES - {0, 3}, "0 and 3 are no errors"


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_run_ends_with(code: int, here: Path, server: WarmServer) -> None:
    """And the same command after it: done is done, a failed row stays failed, and what broke off goes on."""
    questions = ["say 1", TOO_LONG if code in (3, 4) else "say 2", "say 3"]
    write_rows(here / "rows.parquet", {"q": questions})
    job = write_job(here, sampling={"max_tokens": 400 if code == 75 else 4, "ignore_eos": True})
    settings = {2: ["--set", "model.path=nowhere"], 4: ["--set", "output.max_failed_rows=0"]}.get(code, [])
    if code == 75:
        process = server.start("run", job, cwd=here)
        assert process.wait_until(lambda: "engine:" in process.stderr.read_text())
        process.send(signal.SIGTERM)
        outcome = process.wait()
    else:
        faults = {"module": "broken_model"} if code == 1 else None
        outcome = server.run("run", job, *settings, cwd=here, faults=faults)
    assert outcome.code == code, outcome
    if code in (1, 2, 4, 75):
        assert outcome.error
    again = server.run("run", job, *settings, cwd=here)
    assert again.code == {1: 0, 75: 0}.get(code, code), again


def test_one_sample_that_failed_in_an_earlier_run_is_enough_for_3(here: Path, server: WarmServer) -> None:
    write_rows(here / "rows.parquet", {"q": ["say 1", TOO_LONG, "say 3"]})
    job = write_job(here, sampling={"n": 2})
    faults = {"folder": str(here / "out"), "at": "commit.log write 1 after"}
    assert server.run("run", job, cwd=here, faults=faults).code == -signal.SIGKILL
    assert server.run("run", job, cwd=here).code == 3, "its answers were committed by the run before"
    assert server.run("run", job, "--only", "failed", cwd=here).code == 3
