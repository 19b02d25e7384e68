"""The log after a crash: a torn last record is as if it were not there; damage anywhere else is told."""

import pytest

from batchgen.data.commit_log import CommitLog
from batchgen.errors import CorruptRunError
from batchgen.records import Part

PARTS = [Part(f"part-{i:06d}.parquet", i, 100 * i, f"{i:032x}", i, i + 9, 0, 1.5 * i) for i in (1, 2, 3)]


@pytest.fixture
def log(tmp_path):
    log = CommitLog(tmp_path / "commit.log")
    for part in PARTS:
        log.append(part)
    return log


def test_what_is_appended_is_read(log):
    assert log.read() == CommitLog(log.path).read() == PARTS
    assert CommitLog(log.path.parent / "none.log").read() == []


def test_a_record_torn_at_any_byte_is_dropped_and_cut_away_by_the_next_append(log):
    image = log.path.read_bytes()
    last = image.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(image)):
        log.path.write_bytes(image[:end])
        fresh = CommitLog(log.path)
        assert fresh.read() == PARTS[:2], end
        fresh.append(PARTS[2])
        assert log.path.read_bytes() == image


def test_a_last_record_whose_bytes_are_wrong_is_torn_too(log):
    """The file's length can reach the disk before its bytes do."""
    image = log.path.read_bytes()
    for torn in (image[:-20] + b"\0" * 20, image[:-20] + b"\0" * 19 + b"\n", image.replace(b"1003", b"1004")):
        log.path.write_bytes(torn)
        assert CommitLog(log.path).read() == (PARTS[:2] if torn != image else PARTS)


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize(
    "damage", [lambda line: line[:-9] + b"\n", lambda line: line.replace(b"00", b"01", 1), lambda _: b"\n"]
)
def test_a_bad_record_before_the_last_is_corruption(log, line, damage):
    lines = log.path.read_bytes().splitlines(keepends=True)
    lines[line] = damage(lines[line])
    log.path.write_bytes(b"".join(lines))
    with pytest.raises(CorruptRunError, match=f"commit.log: record {line + 1} of 3 is damaged. Delete that line"):
        CommitLog(log.path).read()


def test_a_line_may_be_deleted_as_the_message_says(log):
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + lines[2])
    assert CommitLog(log.path).read() == [PARTS[0], PARTS[2]]
