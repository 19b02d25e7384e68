"""Order and counts of the plan against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen.plan.order import CHUNK, common_prefix_lengths, prefix_order
from batchgen.plan.window import next_smaller, plan_window
from batchgen.records import PackedTokens


def random_rows(seed: int) -> list[np.ndarray]:
    """Rows that share long stretches, around the sort's chunk size, with duplicates and one-token rows."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 3, 3 * CHUNK)
    rows = []
    for _ in range(80):
        cut = rng.integers(0, len(base) + 1)
        rows.append(np.concatenate([base[:cut], rng.integers(0, 2**31 - 1, rng.integers(0, 5)), [7]]).astype(np.int32))
    return rows + rows[:5]


@pytest.mark.parametrize("seed", range(10))
def test_prefix_order_is_the_sort_of_the_token_lists(seed: int) -> None:
    rows = random_rows(seed)
    order = prefix_order(PackedTokens.pack(rows))
    assert order.tolist() == sorted(range(len(rows)), key=lambda i: rows[i].tolist())


@pytest.mark.parametrize("seed", range(10))
def test_shared_tokens(seed: int) -> None:
    rows = random_rows(seed)
    window = plan_window(lambda i: rows[i], np.arange(len(rows)), np.array([len(r) for r in rows], np.int32), 4)
    prompts = [window.prompt(i).tolist() for i in range(len(window))]
    assert sorted(map(tuple, prompts)) == sorted(tuple(r.tolist()) for r in rows)
    for i, prompt in enumerate(prompts):
        if i:
            shared = next((k for k, (a, b) in enumerate(zip(prompt, prompts[i - 1])) if a != b), None)
            assert window.shared_tokens[i] == (shared if shared is not None else min(len(prompt), len(prompts[i - 1])))


def test_next_smaller() -> None:
    assert next_smaller(np.array([0, 3, 3, 1, 4, 0])).tolist() == [6, 3, 3, 5, 5, 6]


def test_no_rows() -> None:
    window = plan_window(lambda i: np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32), 16)
    assert len(window) == 0 and window.num_computed() == 0
    assert len(common_prefix_lengths(PackedTokens.pack([]), np.empty(0, np.int64))) == 0
