"""The simulator: cost by hand, limit by brute force, the peers' pool against its contract, and the claims it is for."""

import itertools
import json

import numpy as np
import pytest
from fake_device import expected_output, run, window_of

from batchgen.bench.lru_pool import LruBlockPool
from batchgen.bench.simulate import POLICIES, Group, SimulatedJob, main, simulate
from batchgen.bench.simulate_device import DEVICES, MODELS, DeviceRates, hidden_tokens, least_work, limits, step_seconds
from batchgen.engine.step import SchedulerConfig
from batchgen.plan.work import ModelShape, Work

TINY = ModelShape(
    layer_parameters=1000,
    head_parameters=100,
    num_layers=2,
    num_heads=4,
    head_dim=8,
    weight_bytes=2,
    kv_bytes=2 * 2 * 2 * 8 * 2,
)


def config_of(max_tokens, running=8, budget=64):
    return SchedulerConfig(budget, running, 4096, max_tokens, eos_token_ids=frozenset([1]))


def test_cost_by_hand():
    work = Work(steps=1, query_tokens=10, sampled=4, context=50, kv_read=70)
    assert MODELS["8b"].kv_bytes == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    linear, weights = 2 * 1000 * 10 + 2 * 100 * 4, 1100 * 2
    attention, kv = 4 * 2 * 4 * 8 * 50, 128 * (70 + 10)
    for flops, bandwidth in ((100.0, 10.0), (1e5, 10.0), (100.0, 1e5)):  # mixed, bound by memory, by compute
        rates = DeviceRates(flops, bandwidth, compute_share=0.5, memory_share=0.25, launch=1.0)
        f, b = flops / 2, bandwidth / 4
        assert step_seconds(work, TINY, rates) == pytest.approx(max(linear / f, weights / b) + attention / f + kv / b + 1)
        compute, memory = (linear + attention) / f, (weights + kv) / b
        assert limits(work, TINY, rates) == pytest.approx((compute + memory, max(compute, memory)))
        assert limits(work, TINY, rates)[1] <= step_seconds(work, TINY, rates) - 1 <= limits(work, TINY, rates)[0]


def brute_force_held(prompts, outputs, block_size):
    """Token-steps that must lie in memory: each distinct full block as long as the longest answer below it."""
    longest: dict[tuple[int, ...], int] = {}
    held = 0
    for prompt, out in zip(prompts, outputs):
        for end in range(block_size, len(prompt) + 1, block_size):
            key = tuple(prompt[:end].tolist())
            longest[key] = max(longest.get(key, 0), out)
        held += len(prompt) % block_size * out + out * (out - 1) // 2
    return held + block_size * sum(longest.values())


@pytest.mark.parametrize("seed", range(20))
def test_least_work_on_random_trees(seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32) for _ in range(rng.integers(1, 30))]
    window = window_of(prompts, block_size=2)
    outputs = rng.integers(1, 9, len(prompts))
    work = least_work(window, outputs, kv_tokens=50, config=config_of(8))
    ordered = [prompts[i] for i in window.index]
    assert work.kv_read == brute_force_held(ordered, outputs.tolist(), 2)
    assert work.query_tokens == window.num_computed() + int((outputs - 1).sum())
    context = 0
    for prompt, cached, out in zip(ordered, window.num_cached().tolist(), outputs.tolist()):
        context += sum(range(cached + 1, len(prompt) + 1)) + sum(range(len(prompt) + 1, len(prompt) + out))
    assert work.context == context
    assert work.steps >= max(outputs.max(), -(-int(outputs.sum()) // 8), -(-work.kv_read // 50))


@pytest.mark.parametrize(("seed", "sort"), list(itertools.product(range(6), [True, False])))
def test_lru_pool_keeps_the_contract(seed, sort):
    """Answers are right whatever is evicted, and no block leaks."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 24)).astype(np.int32) for _ in range(25)]
    config = SchedulerConfig(16, 4, 64, 6, eos_token_ids=frozenset([1]), prefix_groups=False, output_reserve=0.0)
    results, scheduler = run(window_of(prompts, 4, sort), config, num_blocks=20, pool_class=LruBlockPool)
    for row, prompt in enumerate(prompts):
        assert results[row, 0].token_ids.tolist() == expected_output(prompt, 0, config)
    assert scheduler.stats.num_cached > 0


def test_lru_forgets_the_least_recent():
    pool = LruBlockPool(4, 2)
    a, b, c = (np.array(t, np.int32) for t in ([5, 5], [6, 6], [7, 7]))
    for prompt in (a, b, c):
        block = pool.allocate(1)
        pool.insert(block, 0, prompt, np.zeros(1, np.int32))
        pool.release(block)
    assert pool.num_free == 3 and len(pool.match(a)) and len(pool.match(b)) and len(pool.match(c))
    again = pool.match(a)
    pool.acquire(again)
    pool.release(np.array(again))  # used once more: b is the oldest now
    pool.allocate(1)
    assert len(pool.match(a)) and not len(pool.match(b)) and len(pool.match(c))


def test_the_plan_pays_on_a_small_job():
    """A sixteenth of the worked example, with a pool as small: all the claims, none of the minutes."""
    job = SimulatedJob(num_rows=1500, rows_per_group=25, kinds=(Group(2000, 200, 60.0),), max_tokens=240)
    config = SchedulerConfig(4096, 256, 4096, 240, eos_token_ids=frozenset([1]))
    runs = {
        name: simulate(job, policy, MODELS["8b"], DEVICES["h100"], 40_000, config)[0] for name, policy in POLICIES.items()
    }
    ours = runs["batchgen"]
    assert ours.prefill_computed == 1500 * 200 + 60 * 2000 and ours.recomputed == ours.preemptions == 0
    assert ours.work.kv_read < ours.kv_visible / 2 and runs["sorted"].work.kv_read == runs["sorted"].kv_visible
    assert all(run.work.sampled == ours.work.sampled for run in runs.values())
    assert runs["sorted"].prefill_computed == ours.prefill_computed < runs["arrival"].prefill_computed / 3
    assert ours.seconds < runs["sorted"].seconds < runs["arrival"].seconds


def test_last_line_is_json(capsys):
    assert main(["--rows", "200", "--rows-per-group", "20", "--groups", "64/16/8", "32/32/16", "--kv-tokens", "4000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["speedup_vs_arrival"] > 0 and 0 < result["share_of_overlapped_limit"] <= 1
    assert result["recomputed_tokens"] == 0 and set(result["policies"]) == {"batchgen", "sorted", "arrival"}


def test_documents_are_computed_behind_long_answers():
    """A mixed job: half of the rows are heavy to prefill, half to decode."""
    job = SimulatedJob(80, 10, (Group(300, 4000, 20.0), Group(60, 60, 400.0)), 600, template=16)
    model, device = MODELS["8b"], DEVICES["h100"]
    config = SchedulerConfig(8192, 1024, 8192, 600, eos_token_ids=frozenset([1]), hidden_tokens=hidden_tokens(device, model))
    mixed, plain = (simulate(job, POLICIES[p], model, device, 200_000, config)[0] for p in ("batchgen", "depth-first"))
    assert mixed.prefill_computed == plain.prefill_computed and mixed.preemptions == 0
    assert plain.seconds >= 1.2 * mixed.seconds
