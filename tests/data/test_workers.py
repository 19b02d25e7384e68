"""Workers' parts become the run's: each once, none of them lost, damaged ones told and owed again."""

from __future__ import annotations

import os

import pytest
from some_rows import some_rows

from batchgen.data import workers
from batchgen.data.commit_log import CommitLog
from batchgen.data.part_store import PartStore
from batchgen.data.workers import AllAnswers, adopt
from batchgen.data.writer import PartWriter

ROWS = some_rows(12)


@pytest.fixture
def work(folder, answer):
    """work("0001.0", [3, 4], [5]): a worker commits a part for each list of rows."""

    def work(name, *parts, failed=()):
        store = PartStore(folder.path / "workers" / name)
        store.parts.mkdir(parents=True)
        with PartWriter(store, ROWS) as writer:
            for rows in parts:
                for row in rows:
                    writer.add(answer(row, fault="too_long" if row in failed else None))
                writer.commit()
        return store

    return work


def adopted(folder):
    with PartWriter(folder, ROWS) as writer:
        result = adopt(writer)
    with PartWriter(folder, ROWS) as again:
        assert again.repairs == []
        return *result, again.finished().tolist()


@pytest.mark.parametrize("links", [True, False])
def test_each_part_that_is_needed_once(folder, answer, work, monkeypatch, links):
    if not links:
        monkeypatch.setattr(workers.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    with PartWriter(folder, ROWS) as writer:
        writer.add(answer(0), answer(1))
    work("0000.0", [2, 3], [4])
    work("0001.0", [1], [4, 5])  # row 1 and row 4 are answered: the second part comes for row 5
    work("0002.0", [2, 3], [4, 5])  # the same rows again
    assert adopted(folder) == (3, [], [0, 1, 2, 3, 4, 5])
    parts = CommitLog(folder.commit_log).read()
    assert [part.name for part in parts] == [f"part-{i:06d}.parquet" for i in (1, 2, 3, 4)]
    assert adopted(folder) == (0, [], [0, 1, 2, 3, 4, 5]) and CommitLog(folder.commit_log).read() == parts


def test_a_damaged_part_is_kept_aside_and_its_rows_are_owed(folder, work):
    store = work("0000.0", [2, 3], [4])
    path = store.parts / "part-000001.parquet"
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)
    num_adopted, told, finished = adopted(folder)
    assert (num_adopted, finished) == (1, [4]) and "its checksum differs" in told[0] and "2 answers" in told[0]
    assert sorted(os.listdir(store.parts)) == ["damaged-part-000001.parquet", "part-000002.parquet"]
    assert adopted(folder) == (0, [], [4]), "told once"
    assert AllAnswers(folder.path, ROWS).look().is_answered.nonzero()[0].tolist() == [4], "a worker computes them again"


def test_all_answers_grow_as_workers_commit(folder, answer, work):
    everyone = AllAnswers(folder.path, ROWS)
    assert not everyone.look().is_answered.any()
    work("0000.0", [2, 3], failed={3})
    assert everyone.look().is_answered.nonzero()[0].tolist() == [2, 3] and everyone.look().is_failed.sum() == 1
    with PartWriter(folder, ROWS) as writer:
        writer.add(answer(7))
    (folder.path / "workers/0001.0").mkdir()  # has just begun
    assert everyone.look().is_answered.nonzero()[0].tolist() == [2, 3, 7]
