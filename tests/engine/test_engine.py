"""The Engine against transformers' generate, token for token, whatever its block size, budget, pool, cap and row order.

The pool is filled with NaN before every run (a stale or foreign slot that is read would show) and its invariants are checked
after every step. The toy model's output depends on early prompt tokens (asserted where it is made), so a wrong block shows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_device import trie_edge_tokens
from toy import make_toy_model
from toy_engine import ORDERS, Oracle, ToyEngine, tree_of_prompts

from batchgen.engine.sampler import SamplingConfig, sample_by_inversion
from batchgen.records import FinishReason

MAX_TOKENS = 12
BLOCK_SIZES, BUDGETS, CAPS = (1, 4, 16), (3, 24, 2000), (1, 3, 32)
FAMILIES = ("llama", "qwen3")
PROMPTS = tree_of_prompts()


class Case:
    """One family: its engine, and what transformers answers to PROMPTS. Half of the answers end at an end token."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = make_toy_model(folder, family)
        self.engine, self.oracle = ToyEngine(self.folder), Oracle(self.folder)
        self.unended = {i: self.oracle.greedy(p, MAX_TOKENS) for i, p in enumerate(PROMPTS)}
        inner = Counter(t for answer in self.unended.values() for t in set(answer[1:-1]))
        self.eos = frozenset(t for t, _ in inner.most_common(4)) | {265, 266}
        self.expected = {i: self.oracle.greedy(p, MAX_TOKENS, self.eos) for i, p in enumerate(PROMPTS)}
        lengths = {len(answer) for answer in self.expected.values()}
        assert MAX_TOKENS in lengths and len(lengths) > 3, "answers of many lengths are wanted"

    def assert_right(self, outcome, num_samples: int = 1) -> None:
        expected = {(i, s): answer for i, answer in self.expected.items() for s in range(num_samples)}
        assert outcome.tokens() == expected
        for (i, _), f in outcome.by_request.items():
            assert f.fault is None
            assert (f.finish_reason is FinishReason.STOP) == (self.expected[i][-1] in self.eos)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {family: Case(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


# The whole cross of block size, budget and cap; the rest runs through it so that every pair of values meets.
CROSS = [
    (block_size, budget, cap, ORDERS[(i + i // 3) % 3], (i + i // 9) % 4 != 0, i % 5 == 1)
    for i, (block_size, budget, cap) in enumerate(itertools.product(BLOCK_SIZES, BUDGETS, CAPS))
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "budget", "cap", "order", "cache", "tight"), CROSS)
def test_greedy_tokens_equal_generate(
    family: str, block_size: int, budget: int, cap: int, order: str, cache: bool, tight: bool, cases: dict[str, Case]
) -> None:
    """Whatever is computed together with what. `tight` has room for little more than the longest request."""
    case = cases[family]
    if family == "qwen3":  # the other half of what runs through the cross
        cache, order, tight = not cache or tight, ORDERS[ORDERS.index(order) - 1], not tight
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    outcome = case.engine.run(
        PROMPTS, block_size=block_size, budget=budget, cap=cap, order=order, prefix_cache=cache,
        num_blocks=-(-longest // block_size) + 4 if tight else None, output_reserve=0.0 if tight else 1.0,
        eos_token_ids=case.eos, ahead=(budget + cap) % 2,
    )  # fmt: skip
    case.assert_right(outcome)
    assert outcome.stats.max_running <= cap
    if not cache:
        assert outcome.stats.num_cached == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("cache", [True, False])
def test_preempted_requests_give_the_same_tokens(family: str, block_size: int, cache: bool, cases: dict[str, Case]) -> None:
    """Admission that reserves nothing into a pool for two: requests lose their blocks in the middle and start over."""
    case = cases[family]
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    outcome = case.engine.run(
        PROMPTS, block_size=block_size, num_blocks=-(-longest // block_size) + 6, order="given", output_reserve=0.0,
        prefix_cache=cache,
    )  # fmt: skip
    assert outcome.tokens() == {(i, 0): answer for i, answer in case.unended.items()}
    assert outcome.stats.num_preemptions > 0 and outcome.stats.num_recomputed > 0
    assert max(f.num_preemptions for f in outcome.by_request.values()) > 0


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("ahead", [1, 2])
def test_the_host_may_be_ahead_of_the_device(ahead: int, num_samples: int, cases: dict[str, Case]) -> None:
    """The same answers; each that an end token ended was in a step or two more than it needed."""
    case = cases["llama"]
    outcome = case.engine.run(PROMPTS, eos_token_ids=case.eos, ahead=ahead, num_samples=num_samples)
    case.assert_right(outcome, num_samples)
    late = [ahead if len(a) < MAX_TOKENS else 0 for a in case.expected.values() if a[-1] in case.eos]
    near_the_limit = [max(0, len(a) + ahead - MAX_TOKENS) for a in case.expected.values() if len(a) < MAX_TOKENS]
    assert outcome.stats.num_late == num_samples * (sum(late) - sum(near_the_limit))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kv_fill", [0.0, float("nan"), float("inf")])
def test_what_an_unused_pool_holds_changes_nothing(block_size: int, kv_fill: float, cases: dict[str, Case]) -> None:
    case = cases["llama"]
    case.assert_right(case.engine.run(PROMPTS, block_size=block_size, budget=40, kv_fill=kv_fill, eos_token_ids=case.eos))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("block_size", "cap", "tight"), [(1, 64, False), (4, 64, False), (4, 2, False), (4, 32, True), (16, 32, True)]
)
def test_greedy_samples_of_one_row_are_all_right(
    family: str, block_size: int, cap: int, tight: bool, cases: dict[str, Case]
) -> None:
    """n=3 by fork: shared full blocks, a copied partial one, in one wave or several, with and without preemption."""
    case = cases[family]
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    outcome = case.engine.run(
        PROMPTS, block_size=block_size, cap=cap, num_samples=3, eos_token_ids=case.eos,
        num_blocks=-(-longest // block_size) + 6 if tight else None, output_reserve=0.0 if tight else 1.0,
    )  # fmt: skip
    case.assert_right(outcome, num_samples=3)
    if tight:
        assert outcome.stats.num_preemptions > 0
    elif cap > 2:
        assert outcome.stats.num_prefill == outcome.num_planned, "a fork never computes its prompt again"


@pytest.mark.parametrize("num_samples", [1, 3])
def test_sampled_tokens_equal_draws_from_the_logits_of_transformers(num_samples: int, cases: dict[str, Case]) -> None:
    """Each sample of a forked row is what its own solo run would draw: seed, row key, sample and position decide."""
    case, sampling = cases["llama"], SamplingConfig(temperature=0.7, top_k=40, top_p=0.95, seed=11)
    prompts, max_tokens = PROMPTS[:8], 6
    keys = np.arange(8, dtype=np.uint64) + np.uint64(100)
    outcome = case.engine.run(
        prompts, sampling=sampling, row_keys=keys, num_samples=num_samples, max_tokens=max_tokens, block_size=4
    )
    for (i, s), tokens in outcome.tokens().items():
        sequence = list(prompts[i])
        for position in range(max_tokens):
            with torch.inference_mode():
                logits = case.oracle.model(torch.tensor([sequence])).logits[:, -1]
            drawn, _ = sample_by_inversion(logits, sampling, keys[i : i + 1], np.array([s]), np.array([position]))
            sequence.append(int(drawn[0]))
        assert tokens == sequence[len(prompts[i]) :], (i, s)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("budget", "cap"), [(7, 3), (2000, 32)])
def test_prefill_computes_the_edges_of_the_trie_as_planned(
    block_size: int, budget: int, cap: int, cases: dict[str, Case]
) -> None:
    case = cases["llama"]
    outcome = case.engine.run(PROMPTS, block_size=block_size, budget=budget, cap=cap, eos_token_ids=case.eos)
    edges = trie_edge_tokens([np.array(p) for p in PROMPTS], block_size)
    assert outcome.stats.num_prefill == edges == outcome.num_planned
    assert outcome.stats.num_cached == sum(map(len, PROMPTS)) - edges > 0
    assert outcome.stats.num_output == sum(map(len, case.expected.values()))
    assert outcome.stats.num_decode == outcome.stats.num_output - len(PROMPTS)  # a prefill gives the first token


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_shared_prefix_groups_are_used_and_change_nothing(block_size: int, cases: dict[str, Case]) -> None:
    case = cases["llama"]
    shared, alone = (
        case.engine.run(PROMPTS, block_size=block_size, prefix_groups=groups, eos_token_ids=case.eos)
        for groups in (True, False)
    )
    case.assert_right(shared)
    case.assert_right(alone)
    assert shared.groups_seen > 0 and alone.groups_seen == 0
    assert shared.stats.num_kv_read < shared.stats.num_kv_visible == alone.stats.num_kv_visible == alone.stats.num_kv_read


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_row_without_finite_logits_is_an_error_and_its_neighbours_are_right(
    temperature: float, num_samples: int, tmp_path: Path
) -> None:
    """One token's embedding is infinite. Rows that hold it run in the same steps as healthy ones, and the pool is small, so
    the blocks they poison are handed to healthy rows later."""
    engine = ToyEngine(make_toy_model(tmp_path, check_sensitivity=False))
    sampling = SamplingConfig(temperature=temperature, seed=3)
    keys = np.arange(len(PROMPTS) + 4, dtype=np.uint64)
    settings = dict(sampling=sampling, num_samples=num_samples, max_tokens=5, num_blocks=80)
    alone = engine.run(PROMPTS, row_keys=keys[: len(PROMPTS)], **settings).tokens()
    bad = next(t for t in range(256) if not any(t in ids for ids in [*PROMPTS, *alone.values()]))
    engine.decoder.embedding[bad] = float("inf")
    sick = [[7, 8, 9, bad, *tail] for tail in ([], [5, 6, 7], [5, 6, 8])] + [[bad]]
    mixed = engine.run(PROMPTS + sick, row_keys=keys, **settings)
    for (i, s), f in mixed.by_request.items():
        if i < len(PROMPTS):
            assert f.fault is None and f.token_ids.tolist() == alone[i, s]
        else:
            assert f.fault is not None and f.fault.code == "non_finite_logits"
            assert (f.finish_reason, len(f.token_ids)) == (FinishReason.ERROR, 0), "argmax over NaN is no answer"


def test_a_row_without_finite_logits_does_not_poison_the_prefix_that_it_shares(tmp_path: Path) -> None:
    """The sick row computes the prefix, so keys and values of tokens before the bad one must not depend on it."""
    engine = ToyEngine(make_toy_model(tmp_path, check_sensitivity=False))
    trunk = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.decoder.embedding[100] = float("inf")
    healthy = engine.run([[*trunk, 101, 9]], max_tokens=1).tokens()[0, 0]
    mixed = engine.run([[*trunk, 100, 9], [*trunk, 101, 9]], max_tokens=1).by_request
    assert mixed[0, 0].fault is not None
    assert mixed[1, 0].fault is None and mixed[1, 0].token_ids.tolist() == healthy


def test_rows_that_can_never_fit_are_errors_and_others_are_answered(cases: dict[str, Case]) -> None:
    """A pool for 40 tokens: no hang, no lost row, and the message says what is needed and what is there."""
    case = cases["llama"]
    outcome = case.engine.run(PROMPTS, num_blocks=11, block_size=4, eos_token_ids=case.eos)
    for (i, _), f in outcome.by_request.items():
        if len(PROMPTS[i]) + MAX_TOKENS > 40:
            assert f.fault is not None and f.fault.code == "kv_memory_too_small" and "40" in f.fault.message
        else:
            assert f.token_ids.tolist() == case.expected[i]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 15, 16, 17])
def test_wholly_cached_prompts(num_tokens: int, cases: dict[str, Case]) -> None:
    """Copies whose every block is in the cache: the last token is computed again, for its logits."""
    case = cases["llama"]
    prompt = PROMPTS[max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))][:num_tokens]
    expected = case.oracle.greedy(prompt, 4)
    for cap, num_samples in ((1, 1), (8, 1), (8, 2)):
        outcome = case.engine.run([prompt] * 3, cap=cap, num_samples=num_samples, max_tokens=4)
        assert list(outcome.tokens().values()) == [expected] * 3 * num_samples
        assert all(f.num_cached_tokens < num_tokens for (_, s), f in outcome.by_request.items() if s == 0)


def test_the_triton_backend_gives_the_same_tokens(tmp_path: Path) -> None:
    """Under the interpreter: a tiny model, chunked prefill, mixed steps, a small pool, forks."""
    if not torch.cuda.is_available():
        import os

        assert os.environ.get("TRITON_INTERPRET") == "1"
    folder = make_toy_model(tmp_path, layers=1, hidden=32, heads=2, kv_heads=1, check_sensitivity=False)
    trunk = PROMPTS[0][:9]
    prompts = [trunk + [1, 2], trunk + [3], trunk[:3], [7]]
    oracle = Oracle(folder)
    expected = {(i, s): oracle.greedy(p, 3) for i, p in enumerate(prompts) for s in range(2)}
    for settings in ({"budget": 6, "cap": 3}, {"num_blocks": 9, "output_reserve": 0.0}):
        for backend in ("torch", "triton"):
            outcome = ToyEngine(folder, backend).run(prompts, max_tokens=3, num_samples=2, block_size=4, **settings)
            assert outcome.tokens() == expected, backend
