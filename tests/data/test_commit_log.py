"""The log after a crash: a torn last record is as if it were not there; damage anywhere else costs only itself."""

import pytest

from batchgen.data.commit_log import CommitLog
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
def test_a_bad_record_before_the_last_costs_only_itself(log, line, damage):
    lines = log.path.read_bytes().splitlines(keepends=True)
    whole = b"".join(lines)
    lines[line] = damage(lines[line])
    log.path.write_bytes(b"".join(lines) + whole[-50:])  # and the last one is torn
    left = [part for i, part in enumerate(PARTS) if i != line]
    fresh = CommitLog(log.path)
    assert fresh.inspect() == (left, 1, sum(map(len, lines))) and log.read() == left
    fresh.append(PARTS[line])
    assert fresh.read() == [*left, PARTS[line]]


def test_rewrite(log):
    log.rewrite([PARTS[0], PARTS[2]])
    log.append(PARTS[1])
    assert CommitLog(log.path).inspect()[:2] == ([PARTS[0], PARTS[2], PARTS[1]], 0)
    assert [path.name for path in log.path.parent.iterdir()] == ["commit.log"]
