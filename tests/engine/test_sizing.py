"""How large the KV pool is made: no larger than what the windows to come can use, where that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchgen.engine.sizing import choose_size
from batchgen.plan.window import plan_window


@pytest.mark.parametrize(
    ("more_follow", "largest", "num_blocks"),
    [
        (False, None, 3 + 2 * 3 + 1),  # the blocks of both prompts, which share one; two answers of 8 tokens; the null block
        (True, None, 1000),  # nothing is known of what follows: all there is
        (True, 50, 50 + 10 * 3 + 1),  # any portion has at most 50 blocks of prompts, and 10 requests may run
        (True, 5000, 1000),
    ],
)
def test_the_pool_is_as_large_as_is_of_use(more_follow: bool, largest: int | None, num_blocks: int) -> None:
    prompts = [np.array([1, 2, 3, 4, *rest], np.int32) for rest in ([5], [6])]
    window = plan_window(lambda i: prompts[i], np.arange(2), np.array([5, 5], np.int32), 4)
    size = choose_size(torch.device("cpu"), window, 16, 1000 * 4 * 16, "auto", 10, 8, 1, more_follow, largest)
    assert size.num_blocks == num_blocks
