"""Committed means safe: whatever a crash leaves in the folder, each finished row is there once and no other is."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from some_rows import some_rows

from batchgen.data.commit_log import CommitLog
from batchgen.data.job_rows import JobRows
from batchgen.data.ledger import Ledger
from batchgen.data.part import PART_SCHEMA, read_part
from batchgen.data.run_folder import RunFolder
from batchgen.data.schema import SCHEMA_VERSION
from batchgen.data.writer import PartWriter
from batchgen.errors import BatchgenError, CorruptRunError, TooManyFailedRows
from batchgen.records import Completion, FinishReason

ROWS = some_rows(10)


def committed(folder):
    return sorted(PartWriter(folder, ROWS).finished().tolist())


def test_a_part_holds_what_was_added_sorted_in_the_versioned_schema(folder, answer):
    with PartWriter(folder, ROWS, commit_rows=4) as writer:
        for completion in (answer(7, 1), answer(2, fault="too_long"), answer(7, 0, text="a\ud83d é"), answer(5)):
            writer.add(completion)
        assert writer.num_waiting == 0
    table = pq.read_table(folder.parts / "part-000001.parquet")
    assert table.schema.equals(PART_SCHEMA)
    assert table.schema.metadata[b"batchgen.schema_version"] == str(SCHEMA_VERSION).encode()
    failed, fifth, surrogate, last = table.to_pylist()
    assert [row["row"] for row in table.to_pylist()] == [2, 5, 7, 7] and last["sample_index"] == 1
    assert (failed["status"], failed["error_code"], failed["generated_text"]) == ("error", "too_long", None)
    assert failed["error_message"] == "row 2: too_long" and failed["finish_reason"] == "error"
    assert (fifth["status"], fifth["generated_text"], fifth["finish_reason"]) == ("ok", "answer 5.0", "stop")
    assert (fifth["token_ids"], fifth["num_output_tokens"], fifth["num_prompt_tokens"]) == ([0], 1, 7)
    assert surrogate["generated_text"] == "a\ufffd é"
    (part,) = writer.parts
    assert (part.num_rows, part.min_row, part.max_row, part.num_failed) == (4, 2, 7, 1)
    assert part.num_bytes == (folder.parts / part.name).stat().st_size


def test_commits_by_number_and_by_time(folder, answer, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    writer = PartWriter(folder, ROWS, commit_rows=3, commit_seconds=10)
    for row in range(4):
        writer.add(answer(row))
    assert ([part.num_rows for part in writer.parts], writer.num_waiting) == ([3], 1)
    now[0] += 9.9
    assert not writer.commit_if_due()
    now[0] += 0.2
    assert writer.commit_if_due() and not writer.commit_if_due()
    assert [part.num_rows for part in writer.parts] == [3, 1]
    assert writer.commit() is None


def test_finished_and_how(folder, answer):
    assert PartWriter(folder, ROWS).finished().tolist() == []
    cut = Completion(3, 1, np.arange(9, dtype=np.int32), "cut", FinishReason.LENGTH)
    with PartWriter(folder, ROWS, commit_rows=2) as writer:
        for one in ([answer(4, 0), answer(4, 1, fault="x")], [answer(3, 0), cut], [answer(1)], [answer(4, 0), answer(4, 1)]):
            writer.add(*one)
            writer.commit()
    for parts, failed, truncated in ((1, [4], []), (2, [4], [3]), (4, [], [3])):
        ledger = Ledger(folder, writer.parts[:parts], ROWS)
        assert (np.flatnonzero(ledger.is_failed).tolist(), np.flatnonzero(ledger.is_truncated).tolist()) == (
            failed,
            truncated,
        )
    assert ledger.part_number.tolist() == [0, 3, 0, 2, 4, *[0] * 5]
    assert PartWriter(folder, ROWS).finished().tolist() == [1, 3, 4]


def test_the_error_budget_counts_rows_and_commits_before_it_stops(folder, answer):
    with PartWriter(folder, ROWS, commit_rows=100) as writer:
        owed = np.array([5, 6, 7, 8, 9])
        writer.expect(np.arange(10), 2)
        writer.add(answer(0, 0, fault="x"), answer(0, 1, fault="x"))
        writer.add(answer(1), answer(2, fault="x"))
        with pytest.raises(
            TooManyFailedRows, match=r"3 rows have failed, .* allows 2 \(in this run x: 3; row 0: row 0: x\)"
        ):
            writer.add(answer(3, fault="x"), answer(4))
        assert writer.num_waiting == 0 and sum(part.num_rows for part in writer.parts) == 6
    writer = PartWriter(folder, ROWS)
    with pytest.raises(TooManyFailedRows, match=r"3 rows have failed, .* allows 2\. "):
        writer.expect(owed, 2)
    standing = {"standing_rows": 5, "standing_failed": 3, "standing_since_part": 1}
    assert writer.expect(owed) == writer.expect(owed, 3) == standing
    assert writer.expect(np.array([0, 2, 9]), 1) == standing | {"standing_rows": 3, "standing_failed": 1}


def test_what_the_log_does_not_name_does_not_exist(folder, answer):
    with PartWriter(folder, ROWS, commit_rows=2) as writer:
        for row in range(4):
            writer.add(answer(row))
    image = (folder.parts / "part-000002.parquet").read_bytes()
    (folder.parts / "part-000003.parquet").write_bytes(image)  # whole, but its record was not written
    (folder.parts / "part-000004.parquet").write_bytes(image[:100])  # a final name on half a file
    (folder.parts / "part-000005.parquet").touch()
    (folder.parts / "part-000006.parquet.tmp").write_bytes(image)
    writer = PartWriter(folder, ROWS)
    assert sorted(os.listdir(folder.parts)) == ["part-000001.parquet", "part-000002.parquet"]
    writer.add(answer(9))
    writer.close()
    assert committed(folder) == [0, 1, 2, 3, 9]
    assert sorted(os.listdir(folder.parts))[-1] == "part-000003.parquet"


def test_a_crash_between_part_and_log_leaves_the_rows_owed(folder, answer, monkeypatch):
    writer = PartWriter(folder, ROWS)
    writer.add(answer(0))
    monkeypatch.setattr(CommitLog, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer.commit()
    monkeypatch.undo()
    assert os.listdir(folder.parts) == ["part-000001.parquet"]
    assert committed(folder) == [] and os.listdir(folder.parts) == []


def flip(path):
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)


@pytest.mark.parametrize(
    ("damage", "said", "is_kept"),
    [
        (lambda path: path.unlink(), "missing; its 2 answers are computed again", False),
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "50 bytes long instead of", True),
        (flip, "changed since it was committed", True),
    ],
)
def test_a_damaged_part_is_set_aside_and_its_rows_are_owed(folder, answer, damage, said, is_kept):
    with PartWriter(folder, ROWS, commit_rows=2) as writer:
        for row in range(4):
            writer.add(answer(row))
    path = folder.parts / "part-000001.parquet"
    damage(path)
    with PartWriter(folder, ROWS) as writer:
        (repair,) = writer.repairs
        assert repair.startswith(f"{path}: {said}") and repair.endswith("its 2 answers are computed again")
        assert ("kept as damaged-part-000001.parquet" in repair) is is_kept
        assert sorted(writer.finished().tolist()) == [2, 3]
        writer.add(answer(0), answer(1))
    assert PartWriter(folder, ROWS).repairs == [] and committed(folder) == [0, 1, 2, 3]
    kept = ["damaged-part-000001.parquet"] * is_kept
    assert sorted(os.listdir(folder.parts)) == [*kept, "part-000002.parquet", "part-000003.parquet"]


def test_no_part_takes_the_name_of_a_damaged_one(folder, answer):
    for _ in range(2):
        with PartWriter(folder, ROWS) as writer:
            writer.add(answer(0))
        (folder.parts / "damaged-part-000002.parquet").touch()
        flip(folder.parts / writer.parts[-1].name)
    PartWriter(folder, ROWS)
    assert sorted(os.listdir(folder.parts)) == [f"damaged-part-00000{n}" for n in ("1.parquet", "2.parquet", "3.parquet")]


def test_a_damaged_record_costs_the_rows_of_its_part_only(folder, answer):
    with PartWriter(folder, ROWS, commit_rows=2) as writer:
        for row in range(6):
            writer.add(answer(row))
    (folder.parts / "part-000009.parquet.tmp").touch()
    lines = folder.commit_log.read_bytes().splitlines(keepends=True)
    folder.commit_log.write_bytes(lines[0] + lines[1].replace(b"part", b"tarp") + lines[2])
    writer = PartWriter(folder, ROWS)
    assert ["commit.log: 1 of its records are damaged" in repair for repair in writer.repairs] == [True]
    assert sorted(writer.finished().tolist()) == [0, 1, 4, 5]
    assert folder.commit_log.read_bytes() == lines[0] + lines[2]
    names = ["damaged-part-000002.parquet", "part-000001.parquet", "part-000003.parquet"]
    assert sorted(os.listdir(folder.parts)) == names, "its part may be good, but nothing says so"
    assert PartWriter(folder, ROWS).repairs == []


def test_a_crash_while_damage_is_mended(folder, answer, monkeypatch):
    """The part is aside, its record still there: the next start finds it missing."""
    with PartWriter(folder, ROWS, commit_rows=1) as writer:
        writer.add(answer(0)), writer.add(answer(1))
    flip(folder.parts / "part-000001.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "rewrite", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            PartWriter(folder, ROWS)
    assert committed(folder) == [1]
    assert sorted(os.listdir(folder.parts)) == ["damaged-part-000001.parquet", "part-000002.parquet"]


def test_a_part_that_is_damaged_while_it_is_used(folder, answer):
    with PartWriter(folder, ROWS) as writer:
        writer.add(answer(0))
    flip(folder.parts / "part-000001.parquet")
    with pytest.raises(CorruptRunError, match=r"changed since it was committed.*run the job again"):
        read_part(folder, writer.parts[0])


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_full_disk_is_told_and_nothing_is_lost_when_there_is_room_again(folder, answer, monkeypatch, step):
    writer = PartWriter(folder, ROWS)
    writer.add(answer(0))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open" if step == "open" else f"os.{step}", full)
        with pytest.raises(BatchgenError, match=r"part-000001.parquet: cannot write: No space left on device"):
            writer.commit()
    assert writer.num_waiting == 1
    assert not any(name.endswith(".tmp") for name in os.listdir(folder.parts))
    writer.add(answer(1))
    writer.close()
    assert committed(folder) == [0, 1]


def test_a_full_disk_at_the_log_alone(folder, answer, monkeypatch):
    writer = PartWriter(folder, ROWS, commit_rows=1)
    writer.add(answer(0))
    before = folder.commit_log.read_bytes()
    calls = []
    real = os.fsync

    def full_the_third_time(handle):  # part, folder, log
        calls.append(handle)
        if len(calls) == 3:
            os.ftruncate(handle, len(before) + 10)  # half a record got there
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_the_third_time)
        with pytest.raises(BatchgenError, match=r"commit.log: cannot write: No space left"):
            writer.add(answer(1))
    assert CommitLog(folder.commit_log).read() == writer.parts
    writer.close()
    assert committed(folder) == [0, 1]


def test_the_order_of_durability(folder, answer, monkeypatch):
    """fsync the file, then name it, then fsync the folder, then the log: seen as the system calls come."""
    seen = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle):
        seen.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        real_fsync(handle)

    def replace(old, new):
        seen.append(f"name {os.path.basename(new)}")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    writer = PartWriter(folder, ROWS, commit_rows=1)
    writer.add(answer(0))
    part = "part-000001.parquet"
    assert seen == [f"fsync {part}.tmp", f"name {part}", "fsync parts", "fsync commit.log", "fsync run"]


NUM_ROWS = 1500
WORK = f"""
import sys
import numpy as np
from batchgen.data.job_rows import JobRows
from batchgen.data.run_folder import RunFolder
from batchgen.data.writer import PartWriter
from batchgen.records import Completion, FinishReason
rows = JobRows.of(np.arange({NUM_ROWS}), np.arange({NUM_ROWS}, dtype=np.uint64), [b""] * {NUM_ROWS})
with RunFolder(sys.argv[1]) as folder:
    folder.begin({{}}, {{}})
    writer = PartWriter(folder, rows, commit_rows=5)
    done = set(writer.finished().tolist())
    print(len(done), flush=True)
    for row in range({NUM_ROWS}):
        if row not in done:
            writer.add(Completion(row, 0, text=f"answer {{row}}", finish_reason=FinishReason.STOP))
            if not writer.num_waiting:
                print("committed", flush=True)
    writer.close()
"""


def test_kill_9_at_random_moments(tmp_path):
    """Ten deaths of a process that does nothing but commit, then one that may finish: each row exactly once."""
    rng = random.Random(0)
    command = [sys.executable, "-c", WORK, str(tmp_path / "run")]
    started_with = []
    for _ in range(10):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            started_with.append(int(process.stdout.readline()))
            for _ in range(rng.randint(1, 15)):
                process.stdout.readline()
            time.sleep(rng.uniform(0, 0.003))  # somewhere in the next commit
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    assert started_with == sorted(set(started_with)), "each start must find what the one before committed"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = JobRows.of(np.arange(NUM_ROWS), np.arange(NUM_ROWS, dtype=np.uint64), [b""] * NUM_ROWS)
    with RunFolder(tmp_path / "run") as folder:
        assert sorted(PartWriter(folder, rows).finished().tolist()) == list(range(NUM_ROWS))
        tables = [read_part(folder, part) for part in CommitLog(folder.commit_log).read()]
        texts = [text for table in tables for text in table["generated_text"].to_pylist()]
        assert sorted(texts) == sorted(f"answer {row}" for row in range(NUM_ROWS))
