"""A run folder meets another input, or is to do a part again: what is answered stays, and only what is owed is computed."""

from __future__ import annotations

import json
from pathlib import Path

from commands import WarmServer, results, write_job, write_rows

ANSWER = ["q", "row", "status", "error_code", "generated_text", "finish_reason", "token_ids"]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2}
ASKED = {f"r{i:02d}": f"{'tell me of the' if i % 3 else 'what is'} {i * i}" for i in range(12)} | {"r04": "x" * 9000}


def write_asked(path: Path, asked: dict[str, str], ids: bool = True) -> None:
    write_rows(path, {"id": list(asked), "q": list(asked.values())} if ids else {"q": list(asked.values())})


def answers(folder: Path) -> list[dict]:
    return results(folder).select(ANSWER).to_pylist()


def answered_now(folder: Path) -> int:
    return json.loads((folder / "summary.json").read_text())["rows"]["answered_now"]


def test_with_ids_the_input_may_change_in_any_way(here: Path, server: WarmServer) -> None:
    """Two files become one of another name, rows are shuffled, added, removed; one asks something else under its id."""
    for name, part in (("b", slice(0, 5)), ("a", slice(5, 12))):
        write_asked(here / f"in/{name}.parquet", dict(list(ASKED.items())[part]))
    job = write_job(
        here, input={"path": "in", "id_column": "id"}, sampling=SAMPLING, output={"path": "out", "commit_rows": 5}
    )
    assert server.run("run", job, cwd=here).code == 3, "r04 is too long"
    before = {(row["id"], row["sample_index"]): row for row in results(here / "out").to_pylist()}

    for path in (here / "in").iterdir():
        path.unlink()
    now = dict(sorted(ASKED.items(), key=lambda pair: pair[1][::-1])) | {"r07": "something else", "new": "say 1"}
    del now["r01"], now["r02"]
    write_asked(here / "in/all.parquet", now)
    merged = server.run("merge", "out", cwd=here)
    assert merged.code == 2 and "the input has changed since it was answered" in merged.stderr
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3 and "9 of 11 rows are done; the input has changed since" in outcome.stderr, outcome
    assert answered_now(here / "out") == 2 * 2
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 3
    assert answers(here / "out") == answers(here / "whole")
    for row in results(here / "out").to_pylist():
        if row["id"] not in ("r07", "new"):
            assert row | {"row": None} == before[row["id"], row["sample_index"]] | {"row": None}, "not computed again"
    assert server.run("merge", "out", cwd=here).code == 0


def test_without_ids_files_may_be_added_and_none_may_change(here: Path, server: WarmServer) -> None:
    rows = list(ASKED.items())
    write_asked(here / "in/b.parquet", dict(rows[:4]), ids=False)
    write_asked(here / "in/d.parquet", dict(rows[5:8]), ids=False)
    job = write_job(here, input={"path": "in"}, sampling=SAMPLING)
    assert server.run("run", job, cwd=here).code == 0
    write_asked(here / "in/c.parquet", dict(rows[8:]), ids=False)  # in the middle: the rows of d move
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 0 and "7 of 11 rows are done; the input has changed since" in outcome.stderr
    assert server.run("run", job, "--set", "output.path=whole", cwd=here).code == 0
    assert answers(here / "out") == answers(here / "whole") and answered_now(here / "out") == 4 * 2

    write_asked(here / "in/b.parquet", dict(rows[:3]), ids=False)
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 2 and "input file b.parquet: was" in outcome.stderr and "input.id_column" in outcome.stderr
