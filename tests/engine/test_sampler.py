"""Drawing a token: the random numbers, the distribution, its edge cases, and on what a draw may depend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batchgen_kernels import sampling as kernels
from batchgen_kernels import select_ops
from toy import make_toy_model
from toy_engine import ToyEngine, tree_of_prompts

from batchgen.engine.sampler import SamplingConfig, keep_top, philox, sample, sample_by_inversion, uniforms

NUM_DRAWS = 20_000


def draw(logits: torch.Tensor, config: SamplingConfig, n: int = NUM_DRAWS) -> np.ndarray:
    """n draws from one row of logits, as n rows with keys 0..n-1."""
    zeros = np.zeros(n, np.int32)
    ids, finite = sample_by_inversion(logits.expand(n, -1), config, np.arange(n, dtype=np.uint64), zeros, zeros)
    assert finite.all()
    return ids


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Statistic over the bins; about chi-square with (bins - 1) degrees of freedom if the draws have that distribution."""
    expected = probabilities * len(ids)
    return float(((np.bincount(ids, minlength=len(probabilities)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_equals_the_vectors_of_random123(counter: list[int], key: int, expected: str) -> None:
    got = philox(np.array([counter], np.uint32), key)[0]
    assert " ".join(f"{word:08x}" for word in got) == expected


def test_uniforms_are_uniform_and_lie_in_the_half_open_interval() -> None:
    n = 200_000
    u = uniforms(5, np.arange(n, dtype=np.uint64), np.zeros(n), np.zeros(n))
    assert u.min() >= 0.0 and u.max() < 1.0
    assert chi_square((u * 100).astype(int), np.full(100, 0.01)) < 160  # 99 degrees of freedom: p = 1e-4 at 161


def test_each_of_seed_row_sample_and_position_changes_the_draw() -> None:
    def u(seed: int = 1, key: int = 2, sample_index: int = 3, position: int = 4) -> float:
        return uniforms(seed, np.array([key], np.uint64), np.array([sample_index]), np.array([position]))[0]

    changed = [u(seed=2), u(seed=1 + 2**40), u(key=3), u(key=2 + 2**63), u(sample_index=2), u(position=5)]
    assert len({u(), *changed}) == 7
    assert u() == u(), "and nothing else does"


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", [0, 7])
def test_draws_have_the_distribution_of_the_softmax(temperature: float, seed: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    p = torch.softmax(logits[0] / temperature, -1).numpy()
    assert chi_square(draw(logits, SamplingConfig(temperature=temperature, seed=seed)), p) < 23.5  # 4 df: p = 1e-4


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [0, 1]),
        (0, 0.5, [0, 1]),  # 0.4 does not reach 0.5
        (0, 0.4, [0]),
        (0, 0.7, [0, 1]),  # reached exactly
        (0, 0.71, [0, 1, 2]),
        (3, 0.8, [0, 1, 2]),  # over what top-k left, renormalised: 0.4/0.9 + 0.3/0.9 = 0.778
        (3, 0.77, [0, 1]),
        (5, 1.0, [0, 1, 2, 3]),
        (2**30, 1.0, [0, 1, 2, 3]),
    ],
)
def test_top_k_then_top_p_keep_the_right_tokens_with_renormalised_weights(top_k: int, top_p: float, kept: list[int]) -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = torch.from_numpy(np.log(p)).float()[None]
    ids = draw(logits, SamplingConfig(temperature=1.0, top_k=top_k, top_p=top_p))
    assert sorted(set(ids.tolist())) == kept
    if len(kept) > 1:
        weights = p[kept] / p[kept].sum()
        assert chi_square(ids, weights) < 28  # up to 3 degrees of freedom: far out


def test_a_nucleus_wider_than_the_first_candidates() -> None:
    """Rows whose nucleus is wider than TOP_P_CANDIDATES are sorted whole; both kinds in one batch."""
    flat = torch.zeros(2000)
    peaked = torch.zeros(2000)
    peaked[7] = 30.0
    probabilities = torch.softmax(torch.stack([flat + torch.linspace(0, 1e-3, 2000), peaked]), -1)
    keep_top(probabilities, 0, 0.5)
    assert abs(int((probabilities[0] > 0).sum()) - 1000) <= 1
    assert (probabilities[1] > 0).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.5, [0, 1, 2]),  # reached exactly: 0.2 of 0.4
        (0, 1.0, 0.51, [0, 1]),
        (0, 1.0, 1.0, [0]),
        (0, 0.7, 0.3, [0, 1]),
        (1, 1.0, 0.01, [0]),
        (0, 1.0, 0.0, [0, 1, 2, 3]),
    ],
)
def test_min_p_keeps_what_is_likely_enough_after_the_others(top_k: int, top_p: float, min_p: float, kept: list[int]) -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    keep_top(probabilities, top_k, top_p, min_p)
    assert probabilities[0].nonzero().flatten().tolist() == kept
    assert sorted(3 - i for i in probabilities[1].nonzero().flatten().tolist()) == kept


def test_min_p_through_the_sampler() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    ids = draw(torch.from_numpy(np.log(p)).float()[None], SamplingConfig(temperature=1.0, min_p=0.6))
    assert set(ids.tolist()) == {0, 1} and chi_square(ids, np.array([4, 3]) / 7) < 15  # 1 degree of freedom: p = 1e-4


def test_on_the_triton_backend_rows_are_drawn_by_the_kernels() -> None:
    """The op gets what the configuration says, in the types it wants; and where nothing is filtered it is told so."""
    logits = 3 * torch.randn(9, 300, generator=torch.Generator().manual_seed(2))
    logits[4] = float("nan")
    keys, index = np.arange(9, dtype=np.uint64) * np.uint64(2**61 + 5), np.arange(9, dtype=np.int64)
    ops = select_ops("triton")
    configs = (SamplingConfig(), SamplingConfig(0.9), SamplingConfig(0.8, 2**40, 0.9, 7, 0.1), SamplingConfig(0, 5))
    for config in configs:
        ids, finite = sample(logits, config, keys, index % 3, index, ops)
        assert (ids.dtype, finite.tolist()) == (torch.int32, [i != 4 for i in range(9)])
        columns = zip(
            (config.temperature, min(config.top_k, 2**31 - 1), config.top_p, config.min_p), (float, int, float, float)
        )
        values = [torch.full((9,), v, dtype=torch.int32 if t is int else torch.float32) for v, t in columns]
        rows = torch.from_numpy(keys.view(np.int64)), torch.from_numpy(index % 3).int(), torch.from_numpy(index).int()
        want, _ = kernels.sample_tokens_reference(logits, *values, *rows, config.seed)
        assert ids.tolist() == want.tolist(), config
        on_host, _ = sample_by_inversion(logits, config, keys, index % 3, index)
        if config.temperature == 0:
            assert np.array_equal(ids[finite], on_host[finite]), "greedy is the same everywhere"
        assert np.array_equal(sample(logits, config, keys, index % 3, index, select_ops("torch"))[0], on_host)


EDGES = [
    SamplingConfig(temperature=t, top_k=k, top_p=p)
    for t in (0.0, 1e-8, 1e-4, 0.01, 1.0)
    for k in (0, 1, 50, 51, 2**30)
    for p in (1e-9, 0.8, 1.0)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_settings_give_ids_of_the_vocabulary(dtype: torch.dtype) -> None:
    """Tiny temperatures overflow in half precision, a huge top_k reaches past the vocabulary, top_p can drop all."""
    logits = (torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    keys, zeros = np.arange(64, dtype=np.uint64), np.zeros(64, np.int32)
    best = logits.float().argmax(-1).numpy()
    unique_best = (logits == logits.max(-1, keepdim=True).values).sum(-1).numpy() == 1
    for config in EDGES:
        ids, finite = sample_by_inversion(logits, config, keys, zeros, zeros)
        assert finite.all() and ids.dtype == torch.int32
        assert ((ids >= 0) & (ids < 50)).all(), config
        if config.temperature <= 1e-4 or config.top_k == 1 or config.top_p <= 1e-9:
            assert (ids == best)[unique_best].all(), f"{config} must be greedy"


def test_masked_and_infinite_logits() -> None:
    """-inf is a token that cannot come; +inf or NaN anywhere makes the row an error, and only that row."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, -inf, 0.0], [0.0, inf, 1.0], [nan, 0.0, 1.0], [1.0, 2.0, 3.0], [-inf, -inf, -inf]])
    for config in (SamplingConfig(), SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.0, top_k=2, top_p=0.9)):
        ids, finite = sample_by_inversion(logits, config, np.arange(5, dtype=np.uint64), np.zeros(5), np.zeros(5))
        assert finite.tolist() == [True, False, False, True, False]
        assert ((ids >= 0) & (ids < 3)).all() and ids[0] != 1


def test_a_draw_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    """Nor on its place among them, also when one of them needs the whole sort for its nucleus."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 700, generator=generator) * torch.linspace(0.01, 5, 40)[:, None]
    keys, position = np.arange(40, dtype=np.uint64), np.arange(40)
    config = SamplingConfig(temperature=0.9, top_k=500, top_p=0.95, seed=4)
    together, _ = sample_by_inversion(logits, config, keys, position, position)
    rows = [slice(i, i + 1) for i in range(40)]
    alone = [int(sample_by_inversion(logits[r], config, keys[r], position[r], position[r])[0][0]) for r in rows]
    assert together.tolist() == alone
    flipped, _ = sample_by_inversion(logits.flip(0), config, keys[::-1], position[::-1], position[::-1])
    assert flipped.flip(0).tolist() == alone


# ---- through the engine ---------------------------------------------------------------------------------------------

PROMPTS = tree_of_prompts(seed=5)
SETTINGS = [
    {"cap": 1},
    {"cap": 8, "order": "reversed"},
    {"cap": 32, "order": "given", "budget": 5},
    {"cap": 8, "budget": 2000, "block_size": 16},
    {"cap": 32, "num_blocks": 26, "output_reserve": 0.0},
    {"cap": 8, "prefix_cache": False, "block_size": 1},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ToyEngine:
    return ToyEngine(make_toy_model(tmp_path_factory.mktemp("toy"), "qwen3"))


def test_seeded_answers_are_the_same_at_any_cap_order_budget_and_pool(engine: ToyEngine) -> None:
    sampling = SamplingConfig(temperature=1.0, top_p=0.95, seed=42)
    outcomes = [engine.run(PROMPTS, sampling=sampling, **settings) for settings in SETTINGS]
    assert outcomes[4].stats.num_preemptions > 0
    first = outcomes[0].tokens()
    assert all(outcome.tokens() == first for outcome in outcomes[1:])
    assert engine.run(PROMPTS, sampling=sampling._replace(seed=43)).tokens() != first


def test_a_row_has_the_same_answer_alone_and_among_others(engine: ToyEngine) -> None:
    sampling = SamplingConfig(temperature=1.0, seed=42)
    among = engine.run(PROMPTS, sampling=sampling).tokens()
    for i in (0, 7, 18):
        key = np.array([i], np.uint64) * np.uint64(7919)  # as ToyEngine numbers rows
        assert engine.run([PROMPTS[i]], sampling=sampling, row_keys=key).tokens()[0, 0] == among[i, 0]


def test_samples_of_a_row_differ_from_each_other_but_not_between_runs(engine: ToyEngine) -> None:
    """The seed of a row is not copied to all its samples, and equal prompts in other rows draw for themselves."""
    prompts = [PROMPTS[0]] * 3 + PROMPTS[1:5]
    sampling = SamplingConfig(temperature=1.0, seed=7)
    runs = [engine.run(prompts, sampling=sampling, num_samples=4, cap=cap).tokens() for cap in (28, 3, 1)]
    assert runs[0] == runs[1] == runs[2]
    for i in range(len(prompts)):
        assert len({tuple(runs[0][i, s]) for s in range(4)}) == 4
    assert len({tuple(runs[0][i, 0]) for i in range(3)}) == 3
