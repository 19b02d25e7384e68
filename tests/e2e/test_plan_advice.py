"""`batchgen plan --reorder-fields`: what another order of the template would save, counted, and nothing changed."""

from __future__ import annotations

import re
from pathlib import Path

from commands import WarmServer, write_job, write_rows


def test_the_order_that_is_advised_saves_what_it_says(here: Path, server: WarmServer) -> None:
    write_rows(
        here / "rows.parquet", {"q": [f"what is {i}" for i in range(12)], "d": [f"{i // 6} of " * 30 for i in range(12)]}
    )
    job = write_job(here, prompt={"user": "{{ q }}\n\n{{ d }}\n\nBe brief."})
    before = job.read_bytes()
    told = server.run("plan", job, "--reorder-fields", cwd=here)
    assert told.code == 0 and told.stdout.endswith("  | Be brief.\n  | \n  | {{ d }}\n  | \n  | {{ q }}\n"), told
    assert re.search(r"^tokenizing  [\d,]+ tokens/s read, rendered and encoded; [\d,]+ a core$", told.stdout, re.MULTILINE)
    match = re.search(r"would leave ([\d,]+) tokens to compute instead of ([\d,]+) for the first 12 rows", told.stdout)
    assert match is not None and job.read_bytes() == before
    then, now = (int(number.replace(",", "")) for number in match.groups())
    assert 3 * then < now and f"({now:,} to compute)" in told.stdout

    better = write_job(here, prompt={"user": "Be brief.\n\n{{ d }}\n\n{{ q }}"})
    told = server.run("plan", better, "--reorder-fields", cwd=here)
    assert f"({then:,} to compute)" in told.stdout and told.stdout.endswith("nothing to move\n")
    taken = write_job(here, prompt={"user": "{% if q %}{{ q }}{% endif %}"})
    assert "cannot be taken apart: it has statements" in server.run("plan", taken, "--reorder-fields", cwd=here).stdout
