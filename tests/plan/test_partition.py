"""Partitions: what they cost against one sort of everything, and that they stay within their limits."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen.plan import partition
from batchgen.plan.partition import Partitioning, choose_partitioning, cut_large, largest_share, merge_small
from batchgen.plan.window import plan_window
from batchgen.records import PackedTokens, Window

BLOCK = 4


def random_tree(rng: np.random.Generator, num_rows: int, common: int) -> list[np.ndarray]:
    """Rows below a common beginning; children of a few tokens, so that prefixes end at any depth."""
    rows = [rng.integers(0, 3, common)]
    while len(rows) < num_rows:
        parent = rows[rng.integers(len(rows))]
        rows.append(
            np.concatenate([parent[: rng.integers(common, len(parent) + 1)], rng.integers(0, 3, rng.integers(1, 9))])
        )
    return [row.astype(np.int32) for row in rows if len(row)]


def window_of(rows: list[np.ndarray]) -> Window:
    packed = PackedTokens.pack(rows)
    return plan_window(packed, np.arange(len(rows)), np.diff(packed.offsets), BLOCK)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_computes_again_only_what_lies_above_its_depth(seed: int) -> None:
    """Exactly: each block of the tree once for each partition that has it; below `depth` tokens that is one."""
    rng = np.random.default_rng(seed)
    rows = random_tree(rng, 60, int(rng.integers(1, 30)))
    partitioning = Partitioning(int(rng.integers(2, 6)), int(rng.integers(1, 25)))
    parts: dict[int, list[np.ndarray]] = {}
    holders: dict[tuple[int, ...], set[int]] = {}  # block, by the tokens up to its end -> partitions
    for row in rows:
        part = partitioning(row)
        parts.setdefault(part, []).append(row)
        for end in range(BLOCK, len(row) + 1, BLOCK):
            holders.setdefault(tuple(row[:end].tolist()), set()).add(part)
    more = sum(window_of(part).num_computed() for part in parts.values()) - window_of(rows).num_computed()
    shallow = [node for node in holders if len(node) < partitioning.depth]
    assert more == BLOCK * sum(len(holders[node]) - 1 for node in shallow)
    assert more <= (len(parts) - 1) * BLOCK * len(shallow)


def test_hashing_goes_as_deep_as_the_rows_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    common = rng.integers(0, 9, 200).astype(np.int32)
    rows = [np.concatenate([common, rng.integers(0, 2**20, 300).astype(np.int32)]) for _ in range(64)]
    sample = window_of(rows)
    assert largest_share(sample, 200) == 1.0 and largest_share(sample, 204) == 1 / 64
    assert choose_partitioning(sample, 64) == Partitioning(1, 64), "a small job is not cut"
    monkeypatch.setattr(partition, "WINDOW_ROWS", 16)
    chosen = choose_partitioning(sample, 64)
    assert chosen == Partitioning(8, 256)
    assert len({chosen(row) for row in rows}) > 4


def test_windows_stay_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "WINDOW_ROWS", 10)
    monkeypatch.setattr(partition, "WINDOW_TOKENS", 100)
    assert merge_small([3, 7, 1, 0, 12, 1, 1], [30, 70, 1, 0, 10, 99, 2]) == [
        range(0, 2), range(2, 4), range(4, 5), range(5, 6), range(6, 7),
    ]  # fmt: skip
    assert merge_small([], []) == []
    assert cut_large(5, np.full(3, 60, np.int32)) == [(5, 8)]
    assert cut_large(5, np.full(7, 60, np.int32)) == [(5, 8), (8, 11), (11, 12)]
    assert cut_large(0, np.full(45, 1, np.int32)) == [(0, 20), (20, 40), (40, 45)]
    assert cut_large(0, np.array([500, 500], np.int32)) == [(0, 1), (1, 2)]
