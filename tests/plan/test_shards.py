"""Units of the plan: all rows once, about equal cost, cut where little is shared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchgen.plan.shards import SLACK, cut, num_units, row_costs, units_of_task
from batchgen.plan.window import plan_window
from batchgen.records import Window


def grouped(num_groups: int, seed: int) -> Window:
    """Groups of 1 to 40 rows that share a prefix of 10 to 60 tokens."""
    rng = np.random.default_rng(seed)
    prompts = []
    for g in range(num_groups):
        prefix = np.concatenate([[g], rng.integers(0, 9, rng.integers(10, 60))])
        prompts += [np.concatenate([prefix, rng.integers(0, 9, rng.integers(1, 20))]) for _ in range(rng.integers(1, 40))]
    ids = [p.astype(np.int32) for p in prompts]
    return plan_window(lambda i: ids[i], np.arange(len(ids)), np.array([len(p) for p in ids], np.int32), 4)


@pytest.mark.parametrize("num_units", [1, 2, 7, 16])
@pytest.mark.parametrize("seed", range(5))
def test_units_are_even_and_cut_between_groups(seed: int, num_units: int) -> None:
    window = grouped(60, seed)
    costs = row_costs(window, 5.0)
    cuts = cut(window, costs, num_units)
    assert cuts[0] == 0 and cuts[-1] == len(window) and (np.diff(cuts) >= 0).all()
    sums = [costs[a:b].sum() for a, b in itertools.pairwise(cuts)]
    even = costs.sum() / num_units
    assert max(sums) <= (1 + 2 * SLACK) * even + costs.max() and min(sums) >= (1 - 2 * SLACK) * even - costs.max()
    # a cut at the middle by rows shares more than one that looks for a boundary
    assert window.shared_tokens[cuts[1:-1]].sum() <= window.shared_tokens[np.searchsorted(
        np.cumsum(costs), [even * u for u in range(1, num_units)])].sum()  # fmt: skip


def test_more_units_than_rows() -> None:
    window = grouped(1, 0)
    cuts = cut(window, row_costs(window, 1.0), 3 * len(window))
    assert (np.diff(cuts) >= 0).all() and cuts[-1] == len(window)


def test_costs_are_tokens_to_compute() -> None:
    window = grouped(5, 1)
    assert row_costs(window, 0.0).sum() == window.num_computed()


def test_every_unit_has_one_first_owner() -> None:
    for costs, count in [(np.ones(8), 3), (np.ones(2), 5), (np.empty(0), 2), (np.ones(7), 7), (np.zeros(3), 2)]:
        owned = [u for i in range(count) for u in units_of_task(costs, i, count)]
        assert owned == list(range(len(costs)))
    assert [len(units_of_task(np.array([4.0, 1, 1, 1, 1]), i, 2)) for i in range(2)] == [1, 4]


def test_several_units_a_task_but_no_tiny_ones() -> None:
    assert num_units(10_000, 4) == 32 and num_units(100, 4) == 6 and num_units(30, 4) == 4
    assert num_units(2, 4) == 2 and num_units(0, 4) == 1
