"""Attention over the steps that the real scheduler makes on random prefix trees: the CPU backend, which reads shared
prefixes once, against the reference, which ignores groups. Several levels, mixed prefill and decode, gaps in tables."""

from __future__ import annotations

from collections.abc import Sequence

import fake_device as fake
import numpy as np
import pytest
import torch
from batchgen_kernels import Ops
from batchgen_kernels.registry import load

from batchgen.engine.batch_inputs import build_batch_inputs
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.device_state import DeviceState
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import SchedulerConfig


def every_node(first: Sequence[int], *rest: Sequence[int]) -> list[bool]:
    return [True] * len(first)


def tree_prompts(rng: np.random.Generator, depth: int, block_size: int) -> list[np.ndarray]:
    """Two rows on each leaf of a tree with 2 to 3 children a node; some edges are an exact number of blocks."""
    prompts = [np.empty(0, np.int32)]
    for _ in range(depth):
        prompts = [
            np.concatenate([p, rng.integers(0, 40, rng.choice([block_size, 3 * block_size, 5 * block_size + 1]))])
            for p in prompts
            for _ in range(rng.integers(2, 4))
        ]
    tails = [(p, rng.integers(0, 40, rng.integers(1, 6))) for p in prompts for _ in range(2)]
    return [np.concatenate(pair).astype(np.int32) for pair in tails][:24]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (8, 1, 32)], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_shared_prefix_attention_equals_the_reference(depth: int, heads: tuple[int, int, int], block_size: int) -> None:
    num_q_heads, num_kv_heads, head_dim = heads
    rng = np.random.default_rng([depth, block_size, *heads])
    torch.manual_seed(int(rng.integers(1 << 30)))
    window = fake.window_of(tree_prompts(rng, depth, block_size), block_size)
    config = SchedulerConfig(max_num_batched_tokens=60, max_running_requests=16, max_model_len=4096, max_tokens=6)
    pool = BlockPool(1500, block_size)
    scheduler = Scheduler(config, pool, window, every_node)
    cache = torch.randn(2, pool.num_blocks, block_size, num_kv_heads, head_dim)
    cache[:, 0] = 0
    plan_torch, plan_reference = load("plan_attention", "torch"), load("plan_attention", "reference")
    most_levels = 0
    while not scheduler.done:
        step = scheduler.schedule()
        assert step is not None
        metadata = build_batch_inputs(step, scheduler.state, DeviceState(scheduler.state, torch.device("cpu"))).attention
        query = torch.randn(int(metadata.query_start[-1]), num_q_heads, head_dim)
        args = (num_q_heads, num_kv_heads, head_dim)
        got = plan_torch(metadata, *args)(query, *cache, head_dim**-0.5)
        want = plan_reference(metadata, *args)(query, *cache, head_dim**-0.5)
        torch.testing.assert_close(got, want, rtol=0, atol=3e-6)
        covered = np.zeros(len(query), int)
        for a, b in zip(metadata.group_query_start.tolist(), metadata.group_query_end.tolist()):
            covered[a:b] += 1
        most_levels = max(most_levels, covered.max(initial=0))
        num_sampled = len(step.sample_slots)
        scheduler.update(step, rng.integers(0, 40, num_sampled).astype(np.int32), np.ones(num_sampled, bool))
    assert most_levels >= depth, "the tree's levels were not shared: the test tests nothing"


def test_both_backends_share_reads_and_the_gpu_has_a_rule_of_its_own() -> None:
    model = (32, 8, 128, torch.bfloat16, torch.device("cpu"))
    assert Ops("torch", "test").shares_prefix_reads and Ops("triton", "test").shares_prefix_reads
    assert Ops("torch", "test").group_rule(*model) is None and Ops("triton", "test").group_rule(*model) is not None
