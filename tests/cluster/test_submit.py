"""The scripts of `submit`, read as a person and as sbatch would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from batchgen.cluster.submit import parse_array, without_gpus, write_scripts
from batchgen.errors import UsageError

OPTIONS = ["-p", "gpu", "--gres=gpu:1", "--gpus", "2", "--time=4:00:00", "--gpus-per-task=1", "-G", "1", "--mem", "32G"]


def scripts(options=OPTIONS, array="4%2"):
    return write_scripts(Path("my jobs/eval.yaml"), ["input.limit=3", "prompt.user=a b"], Path("/out/a run"), array, options,
                         Path("/home/me"))  # fmt: skip


def test_each_script_is_bash_and_says_what_it_runs(tmp_path):
    for part, text in scripts()._asdict().items():
        (tmp_path / part).write_text(text)
        subprocess.run(["bash", "-n", tmp_path / part], check=True)
        assert text.startswith("#!/bin/bash\n#SBATCH --job-name=a-run-" + part)
        assert text.rstrip().splitlines()[-1].startswith("exec ")  # so that Slurm's signals reach python
        assert "export BATCHGEN_NUM_TASKS=4" in text
    answer = scripts().answer
    assert "#SBATCH --array=0-3%2\n" in answer and "#SBATCH --signal=B:USR1@120\n" in answer and "--requeue" in answer
    assert "run 'my jobs/eval.yaml' --set input.limit=3 --set 'prompt.user=a b' --shard auto" in answer
    assert "HF_HUB_OFFLINE=1" in answer and "HF_HUB_OFFLINE" not in scripts().prepare


def test_options_about_gpus_go_to_the_array_only():
    assert without_gpus(OPTIONS) == ["-p", "gpu", "--time=4:00:00", "--mem", "32G"]
    assert "#SBATCH -p gpu --gres=gpu:1 --gpus 2" in scripts().answer
    assert "#SBATCH -p gpu --time=4:00:00 --mem 32G\n" in scripts().merge


@pytest.mark.parametrize("option", ["--array=3", "-d", "--signal=USR1@3", "--output=x", "-o"])
def test_what_submit_sets_itself_is_refused(option):
    with pytest.raises(UsageError, match="submit sets this itself"):
        scripts([option])


def test_arrays():
    assert parse_array("8") == (8, "0-7") and parse_array("8%3") == (8, "0-7%3") and parse_array("1") == (1, "0-0")
    for wrong in ("0", "-1", "0-7", "8%0", "x", ""):
        with pytest.raises(UsageError, match="give the number of tasks"):
            parse_array(wrong)
