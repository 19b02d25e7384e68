"""The order by cost is another depth-first walk of the same tree, and both ends of it may be admitted from."""

import fake_device as fake
import numpy as np
import pytest

from batchgen.engine.admission import AdmissionOrder
from batchgen.engine.step import SchedulerConfig
from batchgen.plan import cost_order as module
from batchgen.plan.cost_order import cost_order
from batchgen.plan.window import plan_window
from batchgen.records import Window


def config(**changes) -> SchedulerConfig:
    values = dict(max_num_batched_tokens=64, max_running_requests=8, max_model_len=4096, max_tokens=9)
    return SchedulerConfig(**(values | changes))


def random_prompts(rng: np.random.Generator, num_rows: int, block_size: int) -> list[np.ndarray]:
    """A random prefix tree with prompts that end at its nodes, exact duplicates, and short and long tails."""
    prompts: list[np.ndarray] = []
    for _ in range(num_rows):
        base = np.empty(0, np.int32)
        if prompts and rng.random() < 0.75:
            base = prompts[rng.integers(len(prompts))]
            base = base[: rng.integers(1, len(base) + 1)]
        longest = int(rng.choice([2, 12])) * block_size
        tail = rng.integers(0, fake.VOCAB, rng.integers(0 if len(base) else 1, longest))
        prompts.append(np.concatenate([base, tail]).astype(np.int32)[: 20 * block_size])
    return prompts


def ordered(prompts: list[np.ndarray], block_size: int) -> tuple[Window, Window]:
    window = fake.window_of(prompts, block_size)
    return window, cost_order(window)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Small windows, even ones too, are ordered and cut into many units."""
    monkeypatch.setattr(module, "UNEVEN", 0.0)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_depth_first_walk_of_the_same_tree(seed: int, block_size: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 50, block_size)
    before, after = ordered(prompts, block_size)
    assert sorted(after.index) == sorted(before.index) and after.num_computed() == before.num_computed()
    again = plan_window(lambda i: prompts[i], after.index, after.lengths, block_size, sort=False)
    for name in ("shared_tokens", "shared_blocks", "next_smaller", "lengths"):
        assert np.array_equal(getattr(after, name), getattr(again, name)), name


@pytest.mark.parametrize("seed", range(40))
def test_computed_prefill_tokens_are_the_trie_edges_from_both_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 4]))
    prompts = random_prompts(rng, 50, block_size)
    window = ordered(prompts, block_size)[1]
    cfg = config(
        max_num_batched_tokens=int(rng.choice([5, 64, 4096])),
        max_running_requests=int(rng.choice([1, 4, 40])),
        num_samples=int(rng.choice([1, 3])),
    )
    results, scheduler = fake.run(window, cfg, 5000)
    for (i, sample), f in results.items():
        assert f.token_ids.tolist() == fake.expected_output(prompts[i], sample, cfg)
    assert len(results) == len(prompts) * cfg.num_samples
    if cfg.num_samples == 1:
        assert scheduler.stats.num_prefill == fake.trie_edge_tokens(prompts, block_size)
    assert scheduler.pool.num_kept == 0, "blocks are kept for uses that never come"


@pytest.mark.parametrize("seed", range(20))
def test_small_pools_change_no_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 40, 4)
    cfg = config(output_reserve=float(rng.choice([0.0, 1.0])), max_tokens=20)
    num_blocks = -(-(max(map(len, prompts)) + 20) // 4) + 1 + int(rng.choice([0, 5, 30]))
    results, _ = fake.run(ordered(prompts, 4)[1], cfg, num_blocks)
    for (i, sample), f in results.items():
        assert f.token_ids.tolist() == fake.expected_output(prompts[i], sample, cfg)


@pytest.mark.parametrize("seed", range(20))
def test_uses_are_counted_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 30, 2)
    window = ordered(prompts, 2)[1]
    order = AdmissionOrder(window)
    full = [[tuple(window.prompt(i)[: 2 * d]) for d in range(1, len(window.prompt(i)) // 2 + 1)] for i in range(30)]
    taken: set[int] = set()
    while (row := order.next_row) is not None:
        for i in range(30):
            uses, counted = order.uses(i)
            sharers = [[j for j in range(30) if block in full[j]] for block in full[i]]
            assert uses.tolist() == [sum(j not in taken for j in s) for s in sharers]
            assert counted == sum(any(j in taken for j in s) for s in sharers)
        order.take()
        taken.add(row)
        order.observe(num_running=int(rng.integers(0, 5)), room=float(rng.integers(0, 100)), num_blocks=100)
    assert len(taken) == 30


def mixed_prompts() -> list[np.ndarray]:
    """Ten long prompts with one head, ten short ones with another."""
    rng = np.random.default_rng(0)
    kinds = [(1, 200), (0, 20)] * 10
    return [np.concatenate([[head] * 4, rng.integers(2, 50, n)]).astype(np.int32) for head, n in kinds]


def test_the_costly_rows_stand_in_front_and_the_back_comes_in_while_there_is_room() -> None:
    window = ordered(mixed_prompts(), 4)[1]
    assert (window.lengths[:10] == 204).all() and (window.lengths[10:] == 24).all()
    order = AdmissionOrder(window)
    taken = []
    for room in [1000] * 3 + [0] * 17:
        order.observe(num_running=0, room=room, num_blocks=1000)
        taken.append(int(window.lengths[order.next_row]))
        order.take()
    assert taken[:6] == [24] * 3 + [204] * 3 and order.next_row is None
    tokens, rows = np.cumsum(taken) / sum(taken), np.arange(1, 21) / 20
    assert (np.abs(tokens - rows)[5:] < 204 / sum(taken)).all()  # from then on, within one row of each other


def test_even_windows_stay_as_they_are(monkeypatch) -> None:
    monkeypatch.undo()
    window = fake.window_of([np.arange(i, i + 20, dtype=np.int32) for i in range(30)], 4)
    assert cost_order(window) is window and AdmissionOrder(window).pace(0, *NONE) > 1 << 20
    assert cost_order(fake.window_of(mixed_prompts(), 4)).unit_starts is not None


NONE = (np.empty(0, np.int64), np.empty(0, np.int32))  # nothing decodes


def test_prefill_is_spread_over_the_steps_once_there_is_no_room() -> None:
    window = ordered(mixed_prompts(), 4)[1]
    order = AdmissionOrder(window)
    for _ in range(4):
        order.take()
    for _ in range(100):
        order.next_step()
        order.observe(num_running=2, room=0, num_blocks=1000)
    # two of twenty rows took 100 steps, so 900 are left
    assert order.pace(90_000, *NONE) == (order.tokens_left + 90_000) // 900
    order.observe(num_running=2, room=1000, num_blocks=1000)
    assert order.pace(90_000, *NONE) > 1 << 20


def test_with_room_prefill_hides_behind_the_decodes_of_light_rows() -> None:
    window = ordered(mixed_prompts(), 4)[1]
    order = AdmissionOrder(window, hidden_tokens=200)
    order.observe(num_running=0, room=10_000, num_blocks=10_000)
    light, heavy = np.arange(10, 20), np.arange(10)
    assert order.pace(0, *NONE) > 1 << 20, "the light rows are to come in"
    while order.next_row is not None and order.next_row >= 10:
        order.take()
    left = np.full(10, 1000, np.int32)
    assert order.pace(500, light, left) == 190, "what hides, less the decodes themselves"
    assert order.pace(500_000, light, left) == (order.tokens_left + 500_000) // 1000, "so that they hide all of it"
    assert order.pace(500, heavy, left) > 1 << 20, "nothing to hide behind"
    assert order.pace(500, np.tile(light, 20), np.tile(left, 20)) > 1 << 20, "enough decodes to use all FLOPs"


def test_a_group_of_three_pools_computes_its_prefix_once() -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, fake.VOCAB, 40)
    prompts = [np.concatenate([prefix, rng.integers(0, fake.VOCAB, 8)]).astype(np.int32) for _ in range(60)]
    cfg = config(max_tokens=8, max_running_requests=60)
    num_blocks = 10 + 60 * 4 // 3  # the prefix, and a third of the rows' own blocks
    results, scheduler = fake.run(fake.window_of(prompts, 4), cfg, num_blocks + 1)
    assert len(results) == 60 and scheduler.stats.num_prefill == 40 + 60 * 8
    assert scheduler.stats.max_running < 30  # rows left and came, and the prefix stayed
