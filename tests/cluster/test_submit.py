"""The scripts of `submit`, read as a person and as sbatch would."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commands import run_cold, write_job, write_rows

from batchgen.cluster.submit import by_hand, check_job, parse_array, submit, without_gpus, write_scripts
from batchgen.errors import BatchgenError, UsageError
from batchgen.job import load_job

OPTIONS = [
    "-p",
    "gpu",
    "--gres=gpu:1",
    "--gpus",
    "2",
    "--time=4:00:00",
    "--gpus-per-task",
    "1",
    "-G1",
    "-G",
    "1",
    "--mem",
    "32G",
]


def scripts(options=OPTIONS, array="4%2", folder="/out/a run", offline=True):
    overrides = ["input.limit=3", "prompt.user=a b"]
    return write_scripts(Path("my jobs/eval.yaml"), overrides, Path(folder), array, options, Path("/home/me"), offline)


def test_each_script_is_bash_and_says_what_it_runs(tmp_path):
    for part, text in scripts()._asdict().items():
        (tmp_path / part).write_text(text)
        subprocess.run(["bash", "-n", tmp_path / part], check=True)
        assert text.startswith("#!/bin/bash\n#SBATCH --job-name=a-run-" + part)
        assert text.rstrip().splitlines()[-1].startswith("exec ")  # so that Slurm's signals reach python
        assert "export BATCHGEN_NUM_TASKS=4" in text and "#SBATCH '--output=/out/a run/logs/" in text
    answer = scripts().answer
    assert "#SBATCH --array=0-3%2\n" in answer
    assert "#SBATCH --signal=B:USR1@120\n" in answer and "#SBATCH --requeue\n" in answer
    assert "run 'my jobs/eval.yaml' --set input.limit=3 --set 'prompt.user=a b' --shard auto" in answer
    assert "HF_HUB_OFFLINE=1" in answer and "HF_HUB_OFFLINE" not in scripts().prepare + scripts(offline=False).answer
    assert "#SBATCH --output=/a%%b/logs/answer-%a.log" in scripts(folder="/a%b").answer


def test_options_about_gpus_go_to_the_array_only():
    assert without_gpus(OPTIONS) == ["-p", "gpu", "--time=4:00:00", "--mem", "32G"]
    assert "#SBATCH -p gpu --gres=gpu:1 --gpus 2" in scripts().answer
    assert "#SBATCH -p gpu --time=4:00:00 --mem 32G\n" in scripts().merge


@pytest.mark.parametrize(
    "option", ["--array=3", "-d", "--signal=USR1@3", "--output=x", "-o", "-ox", "--out=x", "--test-only"]
)
def test_what_submit_sets_itself_is_refused(option):
    with pytest.raises(UsageError, match="submit sets this itself"):
        scripts(["-p", "gpu", option])


def test_a_stray_word_is_refused():
    with pytest.raises(UsageError, match="gpu: neither the job file nor an option"):
        scripts(["gpu", "--mem=3G"])


def test_arrays():
    assert parse_array("8") == (8, "0-7") and parse_array("8%3") == (8, "0-7%3") and parse_array("1") == (1, "0-0")
    for wrong in ("0", "-1", "0-7", "8%0", "x", ""):
        with pytest.raises(UsageError, match="give the number of tasks"):
            parse_array(wrong)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Programs of Slurm's names that write down how they were called; sbatch refuses what has `bad` in its options."""
    calls = tmp_path / "calls"
    for name, then in (
        ("sbatch", 'grep -q bad "${@: -1}" && { echo invalid bad >&2; exit 1; }; wc -l <calls'),
        ("scancel", ""),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\ncd {tmp_path}; echo {name} "$@" >>calls\n{then}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return lambda: calls.read_text().splitlines()


def test_each_job_waits_for_the_one_before_it(tmp_path, slurm):
    assert submit(scripts(), tmp_path / "out") == [("prepare", "1"), ("answer", "2"), ("merge", "3")]
    made = tmp_path / "out/submit"
    assert slurm() == [
        f"sbatch --parsable {made}/prepare.sh",
        f"sbatch --parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {made}/answer.sh",
        f"sbatch --parsable --dependency=afterany:2 {made}/merge.sh",
    ]
    assert (tmp_path / "out/logs").is_dir() and os.access(made / "answer.sh", os.X_OK)
    subprocess.run(["bash", "-ec", "\n".join(by_hand(tmp_path / "out"))], check=True)
    assert [line.replace("afterok:4", "afterok:1").replace("afterany:5", "afterany:2") for line in slurm()[3:]] == slurm()[
        :3
    ]


def test_what_was_submitted_before_a_refusal_is_cancelled(tmp_path, slurm):
    with pytest.raises(BatchgenError, match=r"sbatch refused .*answer.sh: invalid bad; nothing is submitted"):
        submit(scripts(["--gres=bad"]), tmp_path / "out")
    assert slurm()[-1] == "scancel 1" and len(slurm()) == 3


def test_the_command(tmp_path, slurm):
    write_rows(tmp_path / "rows.parquet", {"q": ["a"]})
    job = write_job(tmp_path, output={"path": "out"})
    words = ["submit", job.name, "--array", "3%2", "-p", "gpu", "--gres", "gpu:1", "--set", "input.limit=1"]
    shown = run_cold(*words, "--print", cwd=tmp_path)
    assert shown.code == 0 and not (tmp_path / "out").exists(), shown
    assert "#SBATCH -p gpu --gres gpu:1\n" in shown.stdout
    done = run_cold(*words, cwd=tmp_path)
    assert done.code == 0 and "answer is job 2" in done.stdout, done
    for path in (tmp_path / "out/submit").iterdir():
        assert path.read_text() in shown.stdout
    assert f"--chdir={tmp_path}\n" in (tmp_path / "out/submit/answer.sh").read_text()
    mixed = run_cold(*words, "--set", "output.path=.", cwd=tmp_path)
    assert mixed.code == 2 and "not empty and not a batchgen run" in mixed.error
    wrong = run_cold("submit", "-p", "gpu", job.name, "--array", "3", cwd=tmp_path)
    assert wrong.code == 2 and "the job file comes first" in wrong.error


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"input": {"path": "-"}}, "only one process can read"),
        ({"engine": {"replicas": 2}}, "ask for 2 times as many tasks"),
    ],
)
def test_jobs_that_no_array_can_do_are_refused_at_once(tmp_path, section, told):
    write_rows(tmp_path / "rows.parquet", {"q": ["a"]})
    with pytest.raises(UsageError, match=told):
        check_job(load_job(write_job(tmp_path, **section), []))
