"""The host side of the engine against a device that remembers tokens (fake_device), on random prefix trees."""

from __future__ import annotations

import itertools

import fake_device as fake
import numpy as np
import pytest

from batchgen.engine.step import SchedulerConfig
from batchgen.records import FinishReason


def random_prompts(rng: np.random.Generator, num_rows: int, block_size: int) -> list[np.ndarray]:
    """A random prefix tree of depth up to 4: rows extend earlier rows, cut at random places; some are exact duplicates."""
    prompts: list[np.ndarray] = []
    for _ in range(num_rows):
        if prompts and rng.random() < 0.75:
            base = prompts[rng.integers(len(prompts))]
            base = base[: rng.integers(1, len(base) + 1)]
        else:
            base = np.empty(0, np.int32)
        tail = rng.integers(0, fake.VOCAB, rng.integers(0 if len(base) else 1, 3 * block_size + 2))
        prompts.append(np.concatenate([base, tail]).astype(np.int32)[: 12 * block_size + 3])
    return prompts


def config(**changes) -> SchedulerConfig:
    values = dict(max_num_batched_tokens=64, max_running_requests=8, max_model_len=4096, max_tokens=9)
    return SchedulerConfig(**(values | changes))


def assert_right(prompts, results, cfg) -> None:
    assert set(results) == {(i, s) for i in range(len(prompts)) for s in range(cfg.num_samples)}
    for (i, sample), f in results.items():
        assert f.fault is None, f.fault
        assert f.token_ids.tolist() == fake.expected_output(prompts[i], sample, cfg)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_random_trees(seed: int, ahead: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 4, 16]))
    prompts = random_prompts(rng, 30, block_size)
    cfg = config(
        max_num_batched_tokens=int(rng.choice([1, 3, 17, 64, 1000])),
        max_running_requests=int(rng.choice([1, 3, 32])),
        num_samples=int(rng.choice([1, 1, 3])),
        eos_token_ids=frozenset(rng.integers(0, fake.VOCAB, 3).tolist()),
        prefix_cache=bool(rng.random() < 0.8),
        output_reserve=float(rng.choice([0.0, 0.3, 1.0])),
    )
    longest = max(map(len, prompts)) + cfg.max_tokens
    least = -(-longest // block_size) + 1  # the null block, and the longest request alone
    num_blocks = least + int(rng.choice([0, 3, 20, 1000]))
    window = fake.window_of(prompts, block_size, sort=bool(rng.random() < 0.7))
    results, scheduler = fake.run(window, cfg, num_blocks, ahead=ahead)
    assert_right(prompts, results, cfg)
    assert ahead or scheduler.stats.num_late == 0
    if num_blocks > 1000 and cfg.output_reserve == 1.0:
        assert scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("seed", range(20))
def test_what_an_earlier_run_had_generated_is_gone_on_with(seed: int) -> None:
    """Any samples of any rows come back with any number of their tokens: the answers are the same, and only the rest of
    them is decoded."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 4]))
    prompts = random_prompts(rng, 20, block_size)
    cfg = config(
        max_num_batched_tokens=int(rng.choice([3, 64])),
        max_running_requests=int(rng.choice([1, 3, 32])),
        num_samples=int(rng.choice([1, 4])),
        prefix_cache=bool(rng.random() < 0.8),
        output_reserve=float(rng.choice([0.0, 1.0])),
    )
    window = fake.window_of(prompts, block_size)
    resumed = {}
    for position, sample in itertools.product(range(len(prompts)), range(cfg.num_samples)):
        if rng.random() < 0.4:
            whole = fake.expected_output(window.prompt(position), sample, cfg)
            resumed[position, sample] = np.array(whole[: rng.integers(1, len(whole))], np.int32)
    least = -(-(max(map(len, prompts)) + cfg.max_tokens) // block_size) + 1
    results, scheduler = fake.run(window, cfg, least + int(rng.choice([0, 20, 1000])), resumed=resumed)
    assert_right(prompts, results, cfg)
    assert scheduler.stats.num_resumed == sum(map(len, resumed.values())) > 0
    assert not scheduler.unfinished()


def test_small_pools_do_preempt_and_change_nothing() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, fake.VOCAB, 10).astype(np.int32) for _ in range(12)]
    cfg = config(max_tokens=30, output_reserve=0.0, max_running_requests=12)
    results, scheduler = fake.run(fake.window_of(prompts, 4), cfg, 25)
    assert_right(prompts, results, cfg)
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.num_recomputed > 0
    assert max(f.num_preemptions for f in results.values()) > 0


def test_preemption_while_prefix_is_shared() -> None:
    rng = np.random.default_rng(2)
    shared = rng.integers(0, fake.VOCAB, 24).astype(np.int32)
    prompts = [np.concatenate([shared, rng.integers(0, fake.VOCAB, 5).astype(np.int32)]) for _ in range(10)]
    cfg = config(max_tokens=40, output_reserve=0.0, max_running_requests=10, num_samples=2)
    results, scheduler = fake.run(fake.window_of(prompts, 4), cfg, 40)
    assert_right(prompts, results, cfg)
    assert scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_computed_prefill_tokens_are_the_trie_edges(seed: int, block_size: int) -> None:
    """Exactly, whatever the budget and the cap, as long as the pool holds the path and the running set."""
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 40, block_size)
    window = fake.window_of(prompts, block_size)
    cfg = config(max_num_batched_tokens=int(rng.choice([5, 64, 4096])), max_running_requests=int(rng.choice([1, 4, 40])))
    results, scheduler = fake.run(window, cfg, 5000)
    assert_right(prompts, results, cfg)
    edges = fake.trie_edge_tokens(prompts, block_size)
    assert window.num_computed() == edges
    assert scheduler.stats.num_prefill == edges
    assert scheduler.stats.num_cached == sum(map(len, prompts)) - edges
    cached = {int(window.index[p]): c for p, c in enumerate(window.num_cached().tolist())}
    assert all(f.num_cached_tokens == cached[i] for (i, _), f in results.items())


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 15, 16, 17])
def test_wholly_cached_prompts_recompute_their_last_token(num_prompt: int) -> None:
    prompt = np.arange(num_prompt, dtype=np.int32)
    for cfg in (config(), config(max_tokens=1), config(num_samples=2)):
        results, _ = fake.run(fake.window_of([prompt] * 3, 4), cfg, 100)
        assert_right([prompt] * 3, results, cfg)
        assert all(f.num_cached_tokens < num_prompt for (_, s), f in results.items() if s == 0)


def test_forks_never_prefill_again() -> None:
    prompts = [np.arange(10, dtype=np.int32), np.arange(3, 14, dtype=np.int32)]
    results, scheduler = fake.run(fake.window_of(prompts, 4), config(num_samples=4), 200)
    assert_right(prompts, results, config(num_samples=4))
    assert scheduler.stats.num_prefill == 10 + 11
    assert scheduler.stats.num_decode == 8 * 8  # 9 tokens each, the first from the shared logits


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_more_samples_than_slots_come_in_waves(cap: int) -> None:
    prompts = [np.arange(9, dtype=np.int32), np.arange(5, 30, dtype=np.int32)]
    cfg = config(num_samples=5, max_running_requests=cap)
    results, _ = fake.run(fake.window_of(prompts, 4), cfg, 200)
    assert_right(prompts, results, cfg)


def test_a_request_that_can_never_fit_is_rejected_at_once_and_others_go_on() -> None:
    prompts = [np.arange(n, dtype=np.int32) for n in (40, 20, 3, 6)]
    cfg = config(max_tokens=9, max_model_len=64)
    results, _ = fake.run(fake.window_of(prompts, 4), cfg, 9)  # 8 usable blocks of 4
    assert results[0, 0].fault.code == "kv_memory_too_small"
    assert "13 blocks of 4" in results[0, 0].fault.message and "32" in results[0, 0].fault.message
    for i in (1, 2, 3):
        assert results[i, 0].token_ids.tolist() == fake.expected_output(prompts[i], 0, cfg)


def test_the_model_length_cuts_the_answer() -> None:
    prompts = [np.arange(n, dtype=np.int32) for n in (14, 15, 16)]
    results, _ = fake.run(fake.window_of(prompts, 4), config(max_model_len=16), 100)
    assert [len(results[i, 0].token_ids) for i in range(3)] == [2, 1, 0]
    assert results[1, 0].finish_reason == FinishReason.LENGTH
    assert results[2, 0].fault.code == "prompt_too_long"


def test_shared_reads_are_counted_once() -> None:
    shared = np.arange(64, dtype=np.int32)
    prompts = [np.concatenate([shared, [70 + i]]).astype(np.int32) for i in range(4)]
    cfg = config(max_tokens=2, max_num_batched_tokens=4096)
    _, scheduler = fake.run(fake.window_of(prompts, 16), cfg, 100)
    # step 1: the leader reads its own 65 tokens, the siblings' 64 count once; step 2: one group of all four
    assert scheduler.stats.num_steps == 2
    assert scheduler.stats.num_kv_visible == 4 * 65 + 4 * 66
    assert scheduler.stats.num_kv_read == (65 + 64 + 3 * 1) + (64 + 4 * 2)
