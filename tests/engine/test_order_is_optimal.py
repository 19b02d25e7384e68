"""Prefix order against every order there is, on pools too small for the tree, one request at a time."""

from __future__ import annotations

import itertools

import numpy as np

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import SchedulerConfig
from batchgen.plan.window import plan_window
from batchgen.records import PackedTokens, Window


def random_pool(rng: np.random.Generator) -> tuple[list[np.ndarray], int, int]:
    """(rows of a small tree, block size, blocks): the pool holds the longest request and a few blocks more."""
    block_size = int(rng.integers(2, 5))
    rows = [rng.integers(0, 9, rng.integers(1, 4 * block_size))]
    while len(rows) < 5:
        parent = rows[rng.integers(len(rows))]
        kept = parent[: rng.integers(0, len(parent) + 1)]
        rows.append(np.concatenate([kept, rng.integers(0, 9, rng.integers(1, 2 * block_size))]))
    longest = max(map(len, rows)) + 1
    return [row.astype(np.int32) for row in rows], block_size, 1 + -(-longest // block_size) + int(rng.integers(0, 4))


def computed(window: Window, config: SchedulerConfig, num_blocks: int) -> int:
    """Prompt tokens that the real scheduler and pool compute, whatever the answers are."""
    scheduler = Scheduler(config, BlockPool(num_blocks, window.block_size), window)
    while not scheduler.done:
        step = scheduler.schedule()
        assert step is not None and not scheduler.take_rejected()
        scheduler.update(step, np.zeros(len(step.sample_slots), np.int32), np.ones(len(step.sample_slots), bool))
    return scheduler.stats.num_prefill


def in_order(rows: list[np.ndarray], order: tuple[int, ...], block_size: int) -> Window:
    given = [rows[i] for i in order]
    lengths = np.array([len(row) for row in given], np.int32)
    return plan_window(PackedTokens.pack(given), np.arange(len(given)), lengths, block_size, sort=False)


def test_prefix_order_is_within_two_percent_of_the_best_order() -> None:
    rng = np.random.default_rng(0)
    ours = best = worst = 0
    config = SchedulerConfig(max_num_batched_tokens=64, max_running_requests=1, max_model_len=64, max_tokens=1)
    for _ in range(6):
        rows, block_size, num_blocks = random_pool(rng)
        packed = PackedTokens.pack(rows)
        ours += computed(plan_window(packed, np.arange(len(rows)), np.diff(packed.offsets), block_size), config, num_blocks)
        all_orders = [
            computed(
                in_order(rows, order, block_size),
                config,
                num_blocks,
            )
            for order in itertools.permutations(range(len(rows)))
        ]
        best += min(all_orders)
        worst += max(all_orders)
    assert ours <= 1.02 * best and worst > 1.1 * best
