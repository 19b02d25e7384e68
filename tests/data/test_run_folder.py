"""Who may write in a run folder, and for which job; and what `status` reads from it."""

import json
import os
import subprocess
import sys
import time

import pytest
from some_rows import some_rows

from batchgen.data.run_folder import INPUT_FILE, RunFolder, set_aside
from batchgen.data.status import read_status
from batchgen.data.writer import PartWriter
from batchgen.errors import BatchgenError, CorruptRunError, RunFolderError

ROWS = some_rows(10)
HOLD = """
import sys
from batchgen.data.run_folder import INPUT_FILE, RunFolder, set_aside
with RunFolder(sys.argv[1]):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/run."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_the_name_of_the_first(holder, tmp_path):
    with (
        pytest.raises(RunFolderError, match=f"run: in use by process {holder.pid} on .*wait for it"),
        RunFolder(tmp_path / "run"),
    ):
        pass
    holder.kill()
    holder.wait()
    with RunFolder(tmp_path / "run"):  # the lock died with its holder
        assert json.loads((tmp_path / "run/LOCK").read_text())["pid"] == os.getpid()
    with RunFolder(tmp_path / "run"):
        pass


def test_a_job_may_go_on_with_harmless_changes_only(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        assert folder.begin({"engine": 1}, {"sampling.seed": 0, "sampling.stop": ["a"], "model.path": "m"}) is False
        folder.update_state({"num_rows": 5})
    with RunFolder(tmp_path / "run") as folder:
        assert folder.begin({"engine": 2}, {"sampling.seed": 0, "sampling.stop": ("a",), "model.path": "m"}) is True
        assert (folder.read()["job"], folder.state) == ({"engine": 2}, {"num_rows": 5})
        with pytest.raises(RunFolderError) as caught:
            folder.begin({"engine": 3}, {"sampling.seed": 1, "sampling.stop": ["a"], "input.a": "ff" * 100})
        lines = str(caught.value).splitlines()
        assert lines[1] == f'  input.a: was absent, is now "{"f" * 59}... (202 characters)'
        assert lines[2] == '  model.path: was "m", is now absent'
        assert lines[3] == "  sampling.seed: was 0, is now 1"
        assert "another output.path" in lines[4] and len(lines) == 5
        assert folder.read()["job"] == {"engine": 2}


@pytest.mark.parametrize("id_column", [None, "id"])
@pytest.mark.parametrize(
    ("files", "needs_ids"),
    [
        ({"a": "1", "b": "2", "c": "3"}, False),
        ({"a": "1", "b": "changed"}, True),
        ({"a": "1"}, True),
        ({"a": "1", "renamed": "2"}, True),
    ],
)
def test_how_the_input_may_change(tmp_path, files, needs_ids, id_column):
    def fingerprint(files):
        return {"input.id_column": id_column} | {INPUT_FILE + name: value for name, value in files.items()}

    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, fingerprint({"a": "1", "b": "2"}))
        (folder.path / "tokens.arrow").touch()
        folder.update_state({"finished": True})
        folder.begin({}, fingerprint({"a": "1", "b": "2"}))
        assert not folder.input_has_changed and (folder.path / "tokens.arrow").exists()
        if needs_ids and id_column is None:
            with pytest.raises(RunFolderError, match="another job"):
                folder.begin({}, fingerprint(files))
            assert (folder.path / "tokens.arrow").exists() and folder.state["finished"]
            return
        assert folder.begin({}, fingerprint(files)) and folder.input_has_changed
        assert not (folder.path / "tokens.arrow").exists() and not folder.state["finished"]
        assert folder.read()["fingerprint"] == fingerprint(files)
        folder.check_input({INPUT_FILE + name: value for name, value in files.items()})
        with pytest.raises(RunFolderError, match=r"(?s)input file b: was .*run the job again"):
            folder.check_input({INPUT_FILE + name: value for name, value in {"a": "1", "b": "other"}.items()})


def test_a_folder_of_an_older_format_is_refused(folder):
    folder.job_file.write_text(folder.job_file.read_text().replace('"version": 2', '"version": 1'))
    for use in (lambda: folder.begin({}, {}), lambda: folder.check_input({})):
        with pytest.raises(RunFolderError, match=r"made by batchgen .* begin anew with --restart"):
            use()


@pytest.mark.parametrize("key", ["state", "fingerprint", "job", "version", "batchgen"])
def test_a_job_file_whose_parts_are_something_else(folder, key):
    record = json.loads(folder.job_file.read_text())
    for damaged in ({**record, key: None}, {name: value for name, value in record.items() if name != key}):
        folder.job_file.write_text(json.dumps(damaged))
        with pytest.raises(CorruptRunError, match=f"damaged: what it has as {key} is no"):
            read_status(folder.path)


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(RunFolderError, match=r"not empty and not a batchgen run \(it holds thesis.tex\)"),
        RunFolder(tmp_path),
    ):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="is a file"), RunFolder(tmp_path / "thesis.tex"):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other/job.json").write_text('{"name": "x"}')
    with pytest.raises(RunFolderError, match=r"job.json is not batchgen's"), RunFolder(tmp_path / "other") as folder:
        folder.begin({}, {})


def test_set_aside(tmp_path, holder):
    run = tmp_path / "run"
    with pytest.raises(RunFolderError, match="in use by process"):
        set_aside(run)
    holder.kill()
    holder.wait()
    assert set_aside(run) is None and set_aside(tmp_path / "none") is None
    for number in (1, 2, 3):
        with RunFolder(run) as folder:
            folder.begin({"number": number}, {})
        assert set_aside(f"{run}/") == tmp_path / f"run.{number}" and not run.exists()
        assert RunFolder(tmp_path / f"run.{number}").read()["job"] == {"number": number}
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="not a batchgen run"):
        set_aside(tmp_path)


def test_a_folder_that_is_moved_while_its_lock_is_waited_for(tmp_path, holder, monkeypatch):
    """Else two --restart at a time: the second would get the lock of the old folder and move the new one."""
    run = tmp_path / "run"

    def move_and_release(_):
        run.rename(tmp_path / "run.1")
        run.mkdir()
        (run / "LOCK").touch()
        holder.kill()
        holder.wait()
        monkeypatch.undo()

    monkeypatch.setattr(time, "sleep", move_and_release)
    with pytest.raises(RunFolderError, match="has moved it aside just now"):
        set_aside(run)
    assert run.exists() and not (tmp_path / "run.2").exists()


def test_a_rerun_is_recorded_and_goes_on(tmp_path):
    prints = {"sampling.max_tokens": 1, "sampling.n": 1, "engine.dtype": "float32", "prompt.user": "x"}
    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, prints)
    for key in ("sampling.n", "prompt.user", "input file a", "model.path"):
        with pytest.raises(RunFolderError, match=rf"(?s)more has changed:\n  {key}: .*without --only"):
            folder.check_rerun(prints | {"sampling.max_tokens": 2, key: "y"})
    changed = folder.check_rerun(prints | {"sampling.max_tokens": 2, "engine.dtype": "bfloat16"})
    assert changed == {"engine.dtype": "bfloat16", "sampling.max_tokens": 2}
    assert folder.begin_rerun("failed", changed, 4) == folder.begin_rerun("failed", changed, 6) == 4
    assert folder.begin_rerun("truncated", changed, 6) == 6
    folder.end_rerun()
    assert folder.begin_rerun("truncated", changed, 8) == 8
    assert [(one["only"], one["finished"]) for one in folder.read()["history"]] == [
        ("failed", False), ("truncated", True), ("truncated", False),
    ]  # fmt: skip
    assert folder.read()["fingerprint"] == prints


def test_a_crash_before_job_json_does_not_lock_the_folder_out(tmp_path):
    with RunFolder(tmp_path / "run"):
        (tmp_path / "run/job.json.tmp").write_text('{"for')
    with RunFolder(tmp_path / "run") as folder:
        assert folder.begin({}, {}) is False


def test_what_a_crash_left_aside_is_deleted(folder):
    (folder.path / "summary.json.tmp").touch()
    (folder.path / "results.tmp").mkdir()  # the merge's own
    folder.__exit__()
    with RunFolder(folder.path):
        assert sorted(os.listdir(folder.path)) == ["LOCK", "job.json", "parts", "results.tmp"]


def test_answers_without_a_job_are_not_adopted(tmp_path, answer):
    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, {"a": 1})
        with PartWriter(folder, ROWS) as writer:
            writer.add(answer(0))
        folder.job_file.unlink()
        with pytest.raises(CorruptRunError, match=r"committed answers but no job.json"):
            folder.begin({}, {"a": 2})


def test_a_job_file_that_cannot_be_replaced_stays(folder, monkeypatch):
    before = folder.job_file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BatchgenError, match=r"job.json: cannot write: No space left on device"):
        folder.update_state({"num_rows": 3})
    assert folder.job_file.read_bytes() == before
    assert not folder.job_file.with_name("job.json.tmp").exists()


def test_status(tmp_path, answer, holder):
    with pytest.raises(RunFolderError, match=r"not a run folder: there is no job.json"):
        read_status(tmp_path / "run")
    holder.kill()
    holder.wait()
    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, {})
        assert read_status(folder.path).num_answers is None
        folder.update_state({"num_rows": 10, "num_samples": 2})
        with PartWriter(folder, ROWS, commit_rows=3) as writer:
            for row in range(7):
                writer.add(answer(row, fault="too_long" if row == 1 else None))
            status = read_status(folder.path)
            assert (status.num_answers, status.num_committed, status.num_failed, status.num_parts) == (20, 6, 1, 2)
            assert status.locked_by is not None and f"process {os.getpid()} on" in status.locked_by
            assert not status.is_finished and time.time() - (status.last_commit_at or 0) < 60
    status = read_status(tmp_path / "run")
    assert (status.num_committed, status.locked_by) == (7, None)


def test_a_dtype_that_prepare_left_open_is_that_of_whoever_computes_first(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, {"engine.dtype": "auto", "a": 1})
        assert folder.begin({}, {"engine.dtype": "auto", "a": 1})
    one, other = {"engine.dtype": "bfloat16", "a": 1}, {"engine.dtype": "float32", "a": 1}
    worker = RunFolder(tmp_path / "run")
    for prints in (one, other):
        worker.check_prepared(prints)
    worker.choose_dtype(one, tmp_path)
    worker.choose_dtype(one, tmp_path)
    with pytest.raises(RunFolderError, match=r'engine.dtype: was "bfloat16", is now "float32"'):
        worker.choose_dtype(other, tmp_path)
    with pytest.raises(RunFolderError, match=r"engine.dtype"), worker as folder:
        folder.begin({}, other)
    with worker as folder:
        assert folder.begin({}, {"engine.dtype": "auto", "a": 1})
        assert folder.read()["fingerprint"]["engine.dtype"] == "bfloat16"
        assert folder.check_rerun(one) == {} and folder.check_rerun(other) == {"engine.dtype": "float32"}
    assert not list(tmp_path.glob("*.tmp"))
