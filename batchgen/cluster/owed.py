"""Which units have rows without an answer, in truth: the marks in leases/ save work, the commit logs decide."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from batchgen.cluster.again import command_to_rerun
from batchgen.cluster.leases import Leases
from batchgen.cluster.units import Units
from batchgen.data.ledger import Ledger
from batchgen.errors import CorruptRunError
from batchgen.plan.shards import units_of_task
from batchgen.text.token_store import TokenStore


def owed_units(folder: Path, units: Units, store: TokenStore, ledger: Ledger) -> list[int]:
    """Units with rows that nobody has answered. If one of them is marked as done (a part was damaged since, or an answer has
    fallen back) the mark is removed, so that workers claim it again."""
    answered = ledger.is_answered[ledger.rows.index(store.rows)]  # in the order of entries
    owed = [u for u in range(len(units)) if not answered[units[u]].all()]
    for unit in owed:
        (folder / "leases" / f"{unit:06d}.done").unlink(missing_ok=True)
    return owed


def missing_rows(folder: Path, units: Units, owed: list[int], ledger: Ledger) -> CorruptRunError:
    """The error that says how many rows are missing, whose they are, and how to get them."""
    num_missing = int(np.count_nonzero(~ledger.is_answered))
    holders = Leases.holders(folder)
    first_owner = {u: i for i in range(units.num_tasks) for u in units_of_task(units.costs, i, units.num_tasks)}
    tasks = sorted({int(holders[u].partition(".")[0]) if u in holders else first_owner[u] for u in owed})
    again = command_to_rerun(folder, units.job, units.num_tasks, tasks)
    return CorruptRunError(
        f"{folder}: {num_missing} of {len(ledger.rows)} rows have no answer yet, in units {_ranges(owed)} of tasks "
        f"{_ranges(tasks)}; what is answered is safe. Run them again: {again}, "
        f"then: batchgen merge {shlex.quote(str(folder))}"
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
