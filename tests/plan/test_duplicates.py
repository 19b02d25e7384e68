"""Equal prompts run once, and every row still gets its answer."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen.plan.duplicates import without_duplicates
from batchgen.plan.window import plan_window


@pytest.mark.parametrize("seed", range(20))
def test_against_brute_force(seed: int) -> None:
    """Random prompts, among them many copies and prefixes of each other."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32) for _ in range(60)]
    lengths = np.array([len(p) for p in prompts], np.int32)
    distinct = without_duplicates(plan_window(lambda i: prompts[i], np.arange(60), lengths, 2))
    window = distinct.window
    assert sorted(distinct.entries.tolist()) == list(range(60)) and distinct.start[0] == 0 and distinct.end[-1] == 60
    kept = {tuple(window.prompt(i).tolist()) for i in range(len(window))}
    assert len(kept) == len(window) == len({tuple(p.tolist()) for p in prompts})
    for i in range(len(window)):
        rows = distinct.rows(i)
        assert rows[0] == window.index[i]
        same = [r for r, p in enumerate(prompts) if p.tolist() == window.prompt(i).tolist()]
        assert sorted(rows.tolist()) == same
    mixed = plan_window(lambda i: prompts[i], rng.permutation(window.index), window.lengths, 2, sort=False)
    for i in range(len(window)):
        other = int(np.flatnonzero(mixed.index == window.index[i])[0])
        assert distinct.in_order_of(mixed).rows(other).tolist() == distinct.rows(i).tolist()
    # and the window is what planning its rows alone gives
    again = plan_window(lambda i: prompts[i], window.index, window.lengths, 2, sort=False)
    for name in ("lengths", "shared_tokens", "shared_blocks", "next_smaller"):
        assert np.array_equal(getattr(window, name), getattr(again, name)), name


def test_no_rows() -> None:
    window = plan_window(lambda i: np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), 16)
    assert len(without_duplicates(window).window) == 0
