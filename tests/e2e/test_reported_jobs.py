"""Faults of jobs that users of other batch tools have reported, from end to end: each docstring tells the fault.

Some have a home of their own: answers that slide to another row (test_bad_inputs.py), a half-written part, a full disk and
a signal at any system call (test_faults.py), kill -9 at any moment (test_kill.py).
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from commands import results, write_job, write_rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


NO_PROMPTS = [None, "", 7, user("x" * 10_000), [{"role": "", "content": None}], []]
CODES = ["null_prompt", "bad_messages", "bad_messages", "prompt_too_long", "bad_messages", "empty_prompt"]


def test_bad_rows_among_a_thousand_and_a_whole_file_of_them(here: Path, server: Any) -> None:
    """One prompt that is too long ends a batch of hundreds of thousands; a null surfaces as an obscure type error."""
    good = [{"id": i, "m": user(f"say {i % 7}")} for i in range(994)]
    bad = [{"id": 1000 + i, "m": value} for i, value in enumerate(NO_PROMPTS)]
    rows = [bad[0], *good[:500], bad[1], bad[2], bad[3], *good[500:], bad[4], bad[5]]  # first, side by side, last
    write_lines(here / "in/a.jsonl", rows)
    write_lines(here / "in/b.jsonl", [{"id": 2000 + i, "m": None} for i in range(100)])
    job = write_job(here, input={"path": "in"}, prompt={"messages": "m"}, sampling={"max_tokens": 1, "ignore_eos": True})
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3 and "Traceback" not in outcome.stderr
    table = results(here / "out")
    assert table["id"].to_pylist() == [row["id"] for row in rows] + [2000 + i for i in range(100)]
    told = dict(zip(table["id"].to_pylist(), table["error_code"].to_pylist(), strict=True))
    assert [told[row["id"]] for row in bad] == CODES and all(table["error_message"][i].as_py() for i in (0, 501, 999))
    assert [told[row["id"]] for row in good] == [None] * 994 and {told[2000 + i] for i in range(100)} == {"null_prompt"}


@pytest.mark.parametrize("place", range(3))
def test_a_long_prompt_has_as_many_answers_as_any(place: int, here: Path, server: Any) -> None:
    """A prompt that is too long gets two outputs, and every later answer stands one row off."""
    texts = ["one", "two", "three"]
    job = write_job(here, sampling={"max_tokens": 4, "n": 2})
    write_rows(here / "rows.parquet", {"q": texts})
    assert server.run("run", job, "--set", "output.path=good", cwd=here).code == 0
    write_rows(here / "rows.parquet", {"q": [("long " * 200) if i == place else text for i, text in enumerate(texts)]})
    assert server.run("run", job, cwd=here).code == 3
    good, got = results(here / "good").to_pylist(), results(here / "out").to_pylist()
    assert [(row["row"], row["sample_index"]) for row in got] == [(i, s) for i in range(3) for s in range(2)]
    for one, other in zip(good, got, strict=True):
        assert other["token_ids"] == ([] if other["row"] == place else one["token_ids"])


def test_order_of_files_on_two_copies(here: Path, server: Any) -> None:
    """Answers in the order in which they end; a folder read in the order in which the file system lists it, which is
    another one on another machine, so that rows are done twice or never."""
    words = ["a", "a rather long question about", "tell"]
    for name, order in {"one": range(1, 13), "two": (7, 12, 3, 1, 10, 2, 11, 5, 9, 4, 8, 6)}.items():
        for i in order:
            write_rows(here / name / f"part-{i}.parquet", {"q": [f"{word} {i}" for word in words], "n": [i * 3] * 3})
        job = write_job(here, input={"path": name}, output={"path": f"of-{name}"}, engine={"max_running_requests": 3})
        assert server.run("run", job, "--set", "sampling.max_tokens=12", cwd=here).code == 0
    one, two = results(here / "of-one"), results(here / "of-two")
    assert one.equals(two)
    assert one["n"].to_pylist() == [i * 3 for i in sorted(range(1, 13), key=str) for _ in range(3)]
    assert len(set(one["num_output_tokens"].to_pylist())) > 1, "they did not all end together"


def test_rows_that_were_read_but_not_answered_are_owed(here: Path, server: Any) -> None:
    """A reader that counts a batch as done when it was fetched loses, at a resume, what was on its way; a bar begins anew
    at none of all, and its rate counts what another run did."""
    write_rows(here / "rows.parquet", {"q": [f"say {i}" for i in range(100)]})
    job = write_job(here, output={"commit_rows": 10}, engine={"max_running_requests": 4, "prefix_cache": False})
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    killed = server.run("run", job, cwd=here, faults={"folder": str(here / "out"), "at": "commit.log write 4 after"})
    assert killed.code == -signal.SIGKILL
    resumed = server.run("run", job, cwd=here)
    assert resumed.code == 0 and "40 of 100 rows are done" in resumed.stderr
    assert results(here / "out").equals(results(here / "whole"))
    summary = json.loads((here / "out/summary.json").read_text())
    mine = results(here / "out").to_pylist()
    parts = sorted((here / "out/parts").iterdir())
    now = {row for part in parts[4:] for row in pq.read_table(part)["row"].to_pylist()}
    assert summary["rows"]["answered_now"] == len(now) == 60 and summary["rows"]["answers"] == 100
    assert summary["tokens"]["output"] == sum(row["num_output_tokens"] for row in mine if row["row"] in now)
    assert summary["tokens"]["prompt"] == sum(row["num_prompt_tokens"] for row in mine if row["row"] in now)
    status = json.loads(server.run("status", "out", "--json", cwd=here).stdout)
    assert (status["num_committed"], status["num_answers"], status["is_finished"]) == (100, 100, True)


@pytest.mark.parametrize(
    "point", ["parts/part-000002.parquet.tmp write 1 torn", "results.tmp/part-00000.parquet write 1 torn"]
)
def test_what_has_a_parquet_name_can_be_opened_and_parts_are_as_many_as_asked(point: str, here: Path, server: Any) -> None:
    """A file that a dead job left half written under its final name makes the next run fail on its footer, or all rows
    unreadable; and more, and smaller, files than were asked for."""
    write_rows(here / "rows.parquet", {"q": [f"say {i % 9}" for i in range(95)]})
    job = write_job(here, output={"commit_rows": 10}, sampling={"max_tokens": 2, "temperature": 1.0, "ignore_eos": True})
    assert server.run("run", job, cwd=here, faults={"folder": str(here / "out"), "at": point}).code == -signal.SIGKILL
    for path in [*(here / "out/parts").glob("*.parquet"), *(here / "out").glob("results/*.parquet")]:
        pq.read_table(path)
    number = len(list((here / "out/parts").glob("*.parquet"))) + 1
    (here / f"out/parts/part-{number:06d}.parquet").write_bytes(b"PAR1 of a dead writer")  # named by no record
    assert server.run("run", job, cwd=here).code == 0
    assert results(here / "out").num_rows == 95
    rows = [pq.read_metadata(path).num_rows for path in (here / "out/parts").glob("*.parquet")]
    assert len(rows) == math.ceil(95 / 10) and sum(rows) == 95


@pytest.mark.parametrize("command", [["plan", "job.yaml"], ["show", "out"], ["status", "out"], ["schema"]])
def test_a_disk_that_is_full_where_a_command_prints(command: list[str], here: Path, server: Any) -> None:
    """Success is reported although nothing could be written."""
    write_rows(here / "rows.parquet", {"q": ["a", "b"]})
    write_job(here)
    assert server.run("run", "job.yaml", cwd=here).code == 0
    outcome = server.run(*command, cwd=here, stdout="/dev/full")
    assert outcome.code == 1 and "cannot write: No space left on device" in outcome.error


def test_a_run_whose_screen_is_full_still_answers(here: Path, server: Any) -> None:
    """Its words are lost, its rows are not."""
    write_rows(here / "rows.parquet", {"q": ["a", "b"]})
    outcome = server.run("run", write_job(here), cwd=here, stderr="/dev/full")
    assert outcome.code == 0 and results(here / "out").num_rows == 2


def test_a_folder_that_takes_no_writes(here: Path, server: Any) -> None:
    """/proc refuses new folders even to root."""
    write_rows(here / "rows.parquet", {"q": ["a"]})
    outcome = server.run("run", write_job(here, output={"path": "/proc/self/out"}), cwd=here)
    assert outcome.code == 1 and "/proc/self/out: cannot write" in outcome.error


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGINT])
def test_a_notice_then_the_end(number: signal.Signals, here: Path, server: Any) -> None:
    """A scheduler sends a signal, another one, and thirty seconds later kills: by then it must be over, with what had
    ended safe, also in the middle of an answer of many tokens."""
    write_rows(here / "rows.parquet", {"q": [f"say {i}" for i in range(12)]})
    job = write_job(
        here,
        sampling={"max_tokens": 150, "ignore_eos": True},
        engine={"max_running_requests": 4},
        output={"commit_rows": 4},
    )
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    process = server.start("run", job, cwd=here)
    assert process.wait_until((here / "out/commit.log").exists)
    process.send(number)
    process.send(signal.SIGTERM)
    outcome = process.wait()
    assert outcome.code == 75 and "stopped by SIG" in outcome.error
    done = json.loads(server.run("status", "out", "--json", cwd=here).stdout)["num_committed"]
    assert 4 <= done < 12
    resumed = server.run("run", job, cwd=here)
    assert resumed.code == 0 and f"{done} of 12 rows are done" in resumed.stderr
    keep = ["row", "token_ids", "generated_text", "status"]
    assert results(here / "out").select(keep).equals(results(here / "whole").select(keep))


def test_ids_that_are_no_key(here: Path, server: Any) -> None:
    """Ids of users as the internal key: those that come twice hang, or get each other's answers."""
    ids = ["a", "a", "b", None, ""]
    texts = [f"say {i}" for i in range(5)]
    write_rows(here / "in/1.parquet", {"id": ids, "q": texts})
    write_rows(here / "in/2.parquet", {"id": ids, "q": [f"tell {i}" for i in range(5)]})
    job = write_job(here, input={"path": "in"}, output={"commit_rows": 2}, engine={"max_running_requests": 2})
    killed = server.run("run", job, cwd=here, faults={"folder": str(here / "out"), "at": "commit.log write 2 after"})
    assert killed.code == -signal.SIGKILL
    assert server.run("run", job, cwd=here).code == 0
    table = results(here / "out")
    assert table["id"].to_pylist() == ids * 2 and table["status"].to_pylist() == ["ok"] * 10
    write_rows(here / "alone.parquet", {"q": table["q"].to_pylist()})
    alone = write_job(here, input={"path": "alone.parquet"}, output={"path": "alone"}, engine={"max_running_requests": 1})
    assert server.run("run", alone, cwd=here).code == 0
    assert table["token_ids"].to_pylist() == results(here / "alone")["token_ids"].to_pylist()

    write_rows(here / "in/1.parquet", {"id": ["a", "b", "a", "c", "d"], "q": texts})
    by_id = write_job(here, input={"path": "in", "id_column": "id"}, output={"path": "by-id"})
    write_rows(here / "in/2.parquet", {"id": ["e"], "q": ["f"]})
    assert 'id "a" is in row 0 and in row 2; ids must be unique' in server.run("run", by_id, cwd=here).error
    write_rows(here / "in/1.parquet", {"id": ["a", None], "q": texts[:2]})
    assert "id is null in row 1" in server.run("run", by_id, cwd=here).error
    write_lines(here / "mixed.jsonl", [{"id": 1, "q": "x"}, {"id": "1", "q": "y"}, {"id": 2.5, "q": "z"}])
    mixed = write_job(here, input={"path": "mixed.jsonl", "id_column": "id"}, output={"path": "of-mixed"})
    assert server.run("run", mixed, cwd=here).code == 0, "each value is its own text of JSON, and so its own key"
    assert results(here / "of-mixed")["id"].to_pylist() == ["1", '"1"', "2.5"]
