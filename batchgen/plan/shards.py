"""The plan in units of about equal cost, which are neighbours in prefix order, cut where little is shared. numpy only."""

from __future__ import annotations

import numpy as np

from batchgen.records import Window

UNITS_PER_TASK = 8
MIN_UNIT_ROWS = 16
MAX_UNITS = 100_000
SLACK = 0.1  # of a unit: how far a cut may move to a place where less is shared


def row_costs(window: Window, tokens_per_answer: float) -> np.ndarray:
    """[n] float64, in tokens to compute: of the prompt, less what is shared with the row before, and of the answer."""
    return (window.lengths - window.num_cached()).astype(np.float64) + tokens_per_answer


def cut(window: Window, costs: np.ndarray, num_units: int) -> np.ndarray:
    """[num_units + 1] int64, ascending: unit u is rows [cuts[u], cuts[u + 1]) of `window`. There may be empty ones.

    costs: [n] float64. Each cut lies within SLACK of a unit's cost of where the costs divide evenly, at the row that shares
    least with the one before it: what is shared across a cut is computed twice.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    cuts = np.zeros(num_units + 1, np.int64)
    cuts[-1] = len(window)
    slack = SLACK * total[-1] / num_units
    for u in range(1, num_units):
        target = total[-1] * u / num_units
        begin, end = np.searchsorted(total, [target - slack, target + slack])
        begin, end = max(int(begin), int(cuts[u - 1])), min(int(end) + 1, len(window))
        if begin >= end:
            cuts[u] = max(int(np.searchsorted(total, target)), int(cuts[u - 1]))
            continue
        shared = window.shared_tokens[begin:end]
        least = np.flatnonzero(shared == shared.min())
        nearest = least[np.abs(total[begin + least] - target).argmin()]
        cuts[u] = begin + int(nearest)
    return cuts


def num_units(num_rows: int, num_tasks: int) -> int:
    """Several a task, to share what a slow or dead one leaves; not so small that the batch drains all the time."""
    return min(max(num_tasks, min(UNITS_PER_TASK * num_tasks, num_rows // MIN_UNIT_ROWS)), max(1, num_rows), MAX_UNITS)


def units_of_task(costs: np.ndarray, index: int, count: int) -> range:
    """The units that task `index` of `count` begins with: neighbours, of about even cost. costs: [num_units]."""
    middle = np.cumsum(costs) - costs / 2
    begin, end = np.searchsorted(middle, [costs.sum() * index / count, costs.sum() * (index + 1) / count])
    return range(int(begin), int(end) if index + 1 < count else len(costs))
