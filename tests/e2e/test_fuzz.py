"""Two hundred random bad inputs (bad_things.py): no traceback, no hang, a documented exit code, the culprit by name.

The same seeds in every run. More of them: BATCHGEN_FUZZ=5000 pytest tests/e2e/test_fuzz.py; one alone:
BATCHGEN_FUZZ_SEED=17 pytest tests/e2e/test_fuzz.py -k schemas. The folder of one that failed is kept.
"""

from __future__ import annotations

import collections
import os
import shutil
from pathlib import Path
from random import Random

import pytest
from bad_things import KINDS, ONE_TOKEN, Bad, Scene, table
from commands import Result, WarmServer, results, run_cold, write_job, write_rows

NUM_INPUTS = int(os.environ.get("BATCHGEN_FUZZ", "204"))
ONLY_SEED = os.environ.get("BATCHGEN_FUZZ_SEED")
COLD = [  # kind, seed; most of them end before torch is imported, which takes seconds
    ("parquet_bytes", 1), ("schemas", 2), ("job_bytes", 2), ("job_bytes", 3), ("job_bytes", 5),
    ("job_values", 1), ("job_values", 2), ("job_values", 5), ("run_folder", 3), ("run_folder", 7),
]  # fmt: skip
DOCUMENTED = {0, 1, 2, 3}  # 4 and 75 have causes that none of these has


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, toy: Path, server: WarmServer) -> Scene:
    import datasets
    from models.test_gguf import write_gguf

    here = tmp_path_factory.mktemp("scene")
    finished = here / "finished"
    finished.mkdir()
    (finished / "toy").symlink_to(toy)
    write_rows(finished / "rows.parquet", table())
    write_job(finished, sampling=ONE_TOKEN, output={"path": "out", "commit_rows": 3}, prompt={"text": "{{ q }}"})
    assert server.run("run", "job.yaml", cwd=finished).code == 0
    datasets.Dataset(table().drop_columns(["d"])).save_to_disk(here / "dataset")
    return Scene(toy, write_gguf(toy, here / "toy.gguf"), finished, here / "dataset")


@pytest.mark.parametrize("kind", KINDS)
def test_bad_inputs(kind: str, tmp_path: Path, scene: Scene, server: WarmServer) -> None:
    number = NUM_INPUTS // len(KINDS)
    seeds = [int(ONLY_SEED)] if ONLY_SEED else range(number)
    faults, codes = [], collections.Counter()
    for seed in seeds:
        here = tmp_path / str(seed)
        here.mkdir()
        (here / "toy").symlink_to(scene.toy)
        bad = KINDS[kind](here, scene, Random(f"{kind} {seed}"))
        try:
            outcome = server.run(*bad.args, cwd=here)
        except AssertionError as error:  # it hangs
            outcome = Result(-1, "", str(error))
        codes[outcome.code] += 1
        fault = what_is_wrong(bad, outcome, here)
        if fault:
            faults.append(f"{kind} {seed}: {fault}\n    {bad.args}\n    {outcome.code} {outcome.stderr[-600:]}")
        else:
            shutil.rmtree(here)
    print(f"\n{kind}: exit codes {dict(codes)}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("kind", "seed"), COLD)
def test_a_cold_program(kind: str, seed: int, tmp_path: Path, scene: Scene) -> None:
    """What the warm one has imported and set up already is no help here."""
    (tmp_path / "toy").symlink_to(scene.toy)
    bad = KINDS[kind](tmp_path, scene, Random(f"{kind} {seed}"))
    assert what_is_wrong(bad, outcome := run_cold(*bad.args, cwd=tmp_path), tmp_path) is None, outcome


def what_is_wrong(bad: Bad, outcome: Result, here: Path) -> str | None:
    if outcome.code not in DOCUMENTED:
        return "exit code"
    if "Traceback" in outcome.stderr or "batchgen: unexpected" in outcome.stderr or "Exception ignored" in outcome.stderr:
        return "not expected"
    if outcome.code in (1, 2):
        said = outcome.stderr[outcome.stderr.rfind("batchgen: ") :] if "batchgen: " in outcome.stderr else ""
        if not said.removeprefix("batchgen: ").strip():
            return "says nothing"
        if bad.names and not any(name in said for name in bad.names):
            return f"names none of {bad.names}"
        return None
    if bad.args[0] == "run" and (here / "out/results").is_dir():
        answers = results(here / "out")
        rows = next((answers[name] for name in ("bg_row", "row") if name in answers.schema.names), None)
        if rows is not None and (rows.to_pylist() != list(range(answers.num_rows))):
            return "rows are missing, double or out of order"
    return None
