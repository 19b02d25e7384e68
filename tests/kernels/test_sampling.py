"""Drawing tokens: the random numbers, who survives, the distribution, and on what a draw may depend."""

import math

import numpy as np
import pytest
import torch
from batchgen_kernels import gather_logprobs, sampling
from batchgen_kernels._triton import interpreting, tl, triton
from batchgen_kernels.cases.case import TOLERANCE
from batchgen_kernels.cases.sampling import SETTINGS, gather_logprobs_case, sample_tokens_case, survivors
from batchgen_kernels.sampling import sample_tokens_reference, sample_tokens_torch, sample_tokens_triton

from batchgen.engine.sampler import philox as numpy_philox

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
INF, NAN = float("inf"), float("nan")
DTYPES = list(TOLERANCE)


def draw(implementation, logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, keys=None, sample=0, position=0):
    """Token ids of rows that share their parameters; row i has key i."""
    k = len(logits)
    logits = logits.to(DEVICE)

    def each(value, dtype):
        return torch.full((k,), value, dtype=dtype, device=DEVICE)

    keys = torch.arange(k, device=DEVICE) if keys is None else keys
    numbers = each(temperature, torch.float32), each(top_k, torch.int32), each(top_p, torch.float32)
    index = each(sample, torch.int32), each(position, torch.int32)
    ids, finite = implementation(logits, *numbers, each(min_p, torch.float32), keys, *index, seed)
    assert finite.all() and ids.dtype == torch.int32
    return ids.cpu()


# ---- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 0xFEDCBA98_76543210, 2**64 - 1])
def test_philox_equals_that_of_the_engine(seed):
    """Which is held to the vectors of Random123 in tests/engine/test_sampler.py."""
    counter = np.random.default_rng(seed).integers(0, 2**32, (500, 4)).astype(np.uint32)
    counter[:2] = [[0] * 4, [2**32 - 1] * 4]
    words = sampling.philox(list(torch.from_numpy(counter.astype(np.int64)).T), seed)
    assert np.array_equal(torch.stack(words, 1).numpy(), numpy_philox(counter, seed).astype(np.int64))


def test_no_two_draws_share_a_counter():
    """The words can be taken apart again, at the ends of every range."""
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 1 << 32, (1 << 32) - 1]
    samples, positions, blocks = ([0, 1, 5, n // 2, n - 1] for n in (1 << 20, 1 << 24, sampling.MAX_VOCAB // 4))
    grid = torch.cartesian_prod(*map(torch.tensor, (keys, samples, positions, blocks)))
    c0, c1, c2, c3 = sampling.noise_counter(*grid.T)
    assert all(int(c.min()) >= 0 and int(c.max()) < 2**32 for c in (c0, c1, c2, c3))
    back = (c1 << 32 | c0, c3 & (1 << 20) - 1, c2 & (1 << 24) - 1, c2 >> 24 | c3 >> 20 << 8)
    assert torch.equal(torch.stack(back, 1), grid)


def test_noise_is_that_of_its_word():
    """Within 1e-6 of float64, at the edges of the words and of the two forms of the logarithm; never infinite.

    -ln(u) is right to 2e-7 (the polynomial) and four roundings of 2^-24: 5e-7 relative, so 5e-7 absolute in its logarithm,
    which adds as much again (relative, but the noise is less than 1 where that counts), and a rounding of |g| <= 23.
    """
    edges = [at + d for at in (0, 1 << 24, 1 << 30, 1 << 31, (1 << 32) - 64) for d in range(-64, 64)]
    word = torch.tensor([w for w in edges if 0 <= w < 1 << 32] + list(range(0, 1 << 32, 77_777_777)))
    u = (word.double() + 0.5) / 2**32
    exact = -(-torch.log1p(-u)).log()
    g = sampling.gumbel(word)
    assert g.dtype == torch.float32 and g.isfinite().all()
    assert ((g.double() - exact).abs() <= 1e-6 + exact.abs() * 3e-7).all()
    assert -3.2 < g.min() < -3.1 and 22.8 < g.max() < 22.9


def test_logarithm_and_exponential_are_right():
    y = torch.logspace(-37, 37, 4001)
    assert ((sampling.ln(y).double() - y.double().log()).abs() <= 4e-7 + y.double().log().abs() * 2e-7).all()
    assert sampling.ln(torch.ones(1)) == 0 and sampling.exp2_series(torch.zeros(1), sampling.fma) == 1
    f = torch.linspace(0, 1, 4001)[:-1]
    assert ((sampling.exp2_series(f, sampling.fma).double() / f.double().exp2() - 1).abs() < 4e-7).all()
    weights = sampling.fixed_point_weights(-torch.arange(100.0)[None], torch.ones(1))
    exact = torch.exp(-torch.arange(100.0).double()) * 2**40
    assert ((weights[0] - exact).abs() <= exact * 4e-6 + 1).all() and weights[0, 0] == 2**40


@triton.jit
def noise_kernel(key_ptr, out_ptr, sample, position, start, seed_low, seed_high, CHUNK: tl.constexpr):
    noise = sampling.gumbel_kernel(tl.load(key_ptr), sample, position, start, seed_low, seed_high, CHUNK)
    tl.store(out_ptr + tl.arange(0, CHUNK), noise)


@pytest.mark.parametrize("chunk", [4, 64, 4096])
def test_noise_of_the_kernel_is_bitwise_that_of_torch(chunk):
    key, sample, position, seed = -0x1234567_89ABCDEF, 9_999, 9_999_999, 0x8000_0001_FFFF_FFFE
    start = 8 * chunk
    keys, one = torch.tensor([key], device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    out = torch.empty(chunk, device=DEVICE)
    words = seed & 0xFFFFFFFF, seed >> 32
    noise_kernel[(1,)](keys, out, sample, position, start, *map(sampling._as_int32, words), CHUNK=chunk)
    want = sampling.gumbel_noise(keys, one * sample, one * position, start + chunk, seed)[0, start:]
    assert torch.equal(out, want)


# ---- survivors ------------------------------------------------------------------------------------------------------


def survivors_by_sorting(row, temperature, top_k, top_p, min_p):
    """What the words mean, in float64 with Python's sort; also how near top-p came to deciding otherwise."""
    ranked = sorted((x for x in row if x > -INF), reverse=True)
    kept = [x for x in ranked if not 0 < top_k < len(row) or top_k > len(ranked) or x >= ranked[top_k - 1]]
    weights = [math.exp((x - kept[0]) / temperature) for x in kept]
    margin = INF
    if top_p < 1:
        shares = np.cumsum(weights) / sum(weights)
        margin = float(np.abs(shares - top_p).min())
        last = kept[min(int((shares < top_p).sum()), len(kept) - 1)]
        kept = [x for x in kept if x >= last]
    if min_p > 0:
        kept = [x for x in kept if math.exp((x - kept[0]) / temperature) >= min_p]
    return {i for i, x in enumerate(row) if x in set(kept)}, margin


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000])
@pytest.mark.parametrize("levels", [0, 7])
def test_survivors_are_those_of_sorting(vocab, levels):
    """Random parameters over random and tied logits: the search, the reference and float64 agree on the exact set."""
    rng = np.random.default_rng(vocab + levels)
    num_rows, compared = 24, 0
    x = rng.normal(size=(num_rows, vocab)) * rng.choice([0.01, 1, 5, 30], (num_rows, 1)) + rng.choice(
        [-50, 0, 9], (num_rows, 1)
    )
    x = np.round(x / 3 * levels) * 3 / levels if levels else x
    x[rng.random((num_rows, vocab)) < 0.1] = -INF
    x[:, 0] = 0.25
    logits = torch.tensor(x, dtype=torch.float32, device=DEVICE)
    temperature = torch.tensor(rng.choice([0.3, 0.8, 1.0, 2.0], num_rows), dtype=torch.float32, device=DEVICE)
    top_k = torch.tensor(rng.choice([0, 2, 3, 10, vocab, 2**31 - 1], num_rows), dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor(rng.choice([0.1, 0.5, 0.9, 0.999, 1.0], num_rows), dtype=torch.float32, device=DEVICE)
    min_p = torch.tensor(rng.choice([0.0, 0.0, 0.001, 0.3], num_rows), dtype=torch.float32, device=DEVICE)
    found = survivors(sampling.find_thresholds, logits, temperature, top_k, top_p, min_p).cpu()
    for i, row in enumerate(logits):
        parameters = temperature[i], int(top_k[i]), top_p[i], min_p[i]
        assert torch.equal(sampling._survivors_reference(row, *parameters).cpu(), found[i]), parameters
        want, margin = survivors_by_sorting(
            row.tolist(), *map(float, parameters[:1]), parameters[1], *map(float, parameters[2:])
        )
        if margin > 1e-5:  # nearer than that, rounding may decide
            assert set(found[i].nonzero()[:, 0].tolist()) == want, parameters
            compared += 1
    assert compared > num_rows // 2


@pytest.mark.parametrize(
    ("x", "top_k", "top_p", "min_p", "kept"),
    [
        ([0.0, -0.0, -1.0], 2, 1.0, 0.0, {0, 1}),  # the two zeros are equal
        ([-0.0, 0.0, 0.0, 5.0], 2, 1.0, 0.0, {0, 1, 2, 3}),  # all ties of the second
        ([3e38, -3e38, 0.0, 3e38], 3, 1.0, 0.0, {0, 2, 3}),
        ([1e-45, -1e-45, 0.0, -INF], 2, 1.0, 0.0, {0, 2}),
        ([1.0] * 5, 0, 0.01, 0.0, {0, 1, 2, 3, 4}),
        ([1.0] * 5, 3, 0.5, 1.0, {0, 1, 2, 3, 4}),
        ([2.0, 1.0, -INF], 0, 1.0, 1.0, {0}),
        ([2.0, 1.0, 0.0, 0.0], 0, 0.9999, 0.0, {0, 1, 2, 3}),
        ([9.0, 5.0, 4.0], 2, 0.9999999, 1e-9, {0, 1}),
    ],
)
def test_survivors_at_the_edges(x, top_k, top_p, min_p, kept):
    logits = torch.tensor([x], device=DEVICE)
    values = ((1.0, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    parameters = [torch.tensor([value], dtype=dtype, device=DEVICE) for value, dtype in values]
    assert set(survivors(sampling.find_thresholds, logits, *parameters)[0].nonzero()[:, 0].tolist()) == kept


# ---- the distribution -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (2.0, 6, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 0, 1.0, 0.1),
        (1.0, 9, 0.9, 0.08),
    ],
)
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_draws_have_the_distribution_of_the_survivors(temperature, top_k, top_p, min_p, seed):
    """Chi-square over 20,000 draws. With 11 degrees of freedom or fewer it exceeds 41 with a probability of 2.4e-5; the
    seeds are fixed, so it either always does or never. (The Triton op gives the same tokens, bit for bit.)"""
    n = 20_000
    x = torch.tensor([2.0, 1.7, 1.0, 0.9, 0.5, 0.3, 0.0, -0.2, -0.5, -1.0, -1.1, -2.0])
    ids = draw(sample_tokens_torch, x.expand(n, -1), temperature, top_k, top_p, min_p, seed)
    kept, _ = survivors_by_sorting(x.tolist(), temperature, top_k, top_p, min_p)
    p = torch.zeros(12, dtype=torch.float64)
    p[list(kept)] = torch.softmax(x[list(kept)].double() / temperature, 0)
    count = torch.bincount(ids, minlength=12)
    assert set(count.nonzero()[:, 0].tolist()) == kept
    expected = p[list(kept)] * n
    assert float(((count[list(kept)] - expected) ** 2 / expected).sum()) < 41


def test_a_flat_vocabulary_is_drawn_evenly():
    """Probabilities of 2^-14 lie where a coarse uniform number would have lost the tail of the noise."""
    n, vocab = 100, 1 << 14
    ids = draw(sample_tokens_torch, torch.zeros(1, 1).expand(n, vocab), seed=3)
    for count in ((ids < vocab // 2).sum(), (ids % 2 == 0).sum(), (ids % 4 < 2).sum()):
        assert abs(int(count) - n / 2) < 4.5 * math.sqrt(n) / 2
    assert len(ids.unique()) > n - 4  # as birthdays have it: 0.3 pairs are expected


# ---- what a draw depends on -----------------------------------------------------------------------------------------


def test_each_of_seed_row_sample_and_position_changes_the_draw():
    x = torch.zeros(1, 3001)
    base = {"seed": 1, "keys": torch.tensor([2], device=DEVICE), "sample": 3, "position": 4}
    changes = [
        {},
        {"seed": 2},
        {"seed": 1 + 2**40},
        {"sample": 2},
        {"sample": 1 << 19},
        {"position": 5},
        {"position": 1 << 23},
    ]
    changes += [{"keys": torch.tensor([k], device=DEVICE)} for k in (3, 2 + 2**40, 2 - 2**63)]
    ids = [int(draw(sample_tokens_triton, x, **(base | change))[0]) for change in changes]
    assert len(set(ids)) == len(changes), ids


@pytest.mark.parametrize("config", [(128, 64, 2), (256, 256, 8), (2048, 512, 16)])
def test_tiles_do_not_change_a_token(config, monkeypatch):
    """Chunks of a row (programs), tiles and pivots of the search: bitwise the same tokens, for every kind of row."""
    case = sample_tokens_case(len(SETTINGS), 500, torch.bfloat16, DEVICE)
    want, usable = case.run(sample_tokens_reference)
    for name, value in zip(("CHUNK", "BLOCK", "PIVOTS"), config):
        monkeypatch.setattr(sampling, name, value)
    ids, finite = case.run(sample_tokens_triton)
    assert torch.equal(ids, want) and torch.equal(finite, usable)


@pytest.mark.parametrize("implementation", [sample_tokens_torch, sample_tokens_triton])
def test_neighbours_do_not_change_a_token(implementation):
    case = sample_tokens_case(len(SETTINGS), 300, torch.float32, DEVICE)
    logits, *rows, seed, filtered = case.make()
    together = implementation(logits, *rows, seed, filtered)[0].tolist()
    order = list(range(len(logits)))[::-1]
    turned = implementation(logits[order], *(r[order] for r in rows), seed, filtered)[0].tolist()
    assert turned[::-1] == together
    for i in (0, 4, 8):
        one = slice(i, i + 1)
        assert implementation(logits[one], *(r[one] for r in rows), seed, filtered)[0].tolist() == together[one]


def test_filters_that_are_off_give_the_same_tokens_as_no_filters():
    case = sample_tokens_case(5, 700, torch.float32, DEVICE, settings=((1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)))
    *args, _ = case.make()
    assert torch.equal(sample_tokens_triton(*args, True)[0], sample_tokens_triton(*args, False)[0])


@pytest.mark.parametrize("implementation", [sample_tokens_reference, sample_tokens_torch, sample_tokens_triton])
def test_greedy_takes_the_lowest_of_equals_and_unusable_rows_are_told(implementation):
    x = torch.full((8, 5000), -1.0)
    x[0, [4999, 4100, 77]] = 2.0
    x[1, 3], x[1, 4097] = -0.0, 0.0
    x[2] = -INF
    x[3, 4999] = NAN
    x[4, 0] = INF
    x[5, :4999] = -INF
    x[6, 9], x[6, 8] = INF, NAN
    x[7] = 1.0
    numbers = [torch.zeros(8), torch.zeros(8, dtype=torch.int32), torch.ones(8), torch.zeros(8)]
    index = torch.zeros(8, dtype=torch.int32)
    for temperature in (0.0, 1e-4, 0.002):
        numbers[0] = torch.full((8,), temperature)
        arguments = [t.to(DEVICE) for t in (x, *numbers, torch.arange(8), index, index)]
        for filtered in (False, True):
            ids, finite = implementation(*arguments, 0, filtered)
            assert finite.tolist() == [True, True, False, False, False, True, False, True]
            assert ids[~finite].tolist() == [0] * 4
            if temperature < 1e-3:
                assert ids[finite].tolist() == [77, 3, 4999, 0]


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [49152 + 7, 128_256])
def test_large_vocabularies(vocab):
    """Rows of a view; many chunks, the last one ragged, and a nucleus of thousands."""
    settings = ((1.5, 0, 0.9, 0.0), (1.0, 50, 0.95, 0.01))
    case = sample_tokens_case(1 if vocab > 100_000 else 2, vocab, torch.bfloat16, DEVICE, settings=settings)
    (ids, finite), (want, _) = case.run(sample_tokens_triton), case.run(sample_tokens_reference)
    assert torch.equal(ids, want) and finite.all()
    assert torch.equal(case.run(sample_tokens_torch)[0], want)


def test_no_rows():
    case = sample_tokens_case(0, 10, torch.float32, DEVICE)
    for implementation in (sample_tokens_reference, sample_tokens_torch, sample_tokens_triton):
        ids, finite = case.run(implementation)
        assert (ids.shape, ids.dtype, finite.shape, finite.dtype) == ((0,), torch.int32, (0,), torch.bool)
    logprob, lse = gather_logprobs_case(0, 10, 3, torch.float32, DEVICE).run(gather_logprobs.gather_logprobs_triton)
    assert (logprob.shape, lse.shape) == ((0, 3), (0,))


GOOD = sample_tokens_case(3, 10, torch.float32).make()


def wrong(position, value):
    return lambda: sample_tokens_triton(*GOOD[:position], value, *GOOD[position + 1 :])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (wrong(0, GOOD[0].double()), "sample_tokens: logits must be float32, bfloat16 or float16, got torch.float64"),
        (wrong(0, GOOD[0].T), "sample_tokens: logits must be dense in their last dimension"),
        (wrong(0, GOOD[0][0]), r"sample_tokens: logits must be \[K, vocab\] with 1 to 4194304 tokens, got \(10,\)"),
        (wrong(0, GOOD[0][:, :0]), r"got \(3, 0\)"),
        (
            wrong(1, GOOD[1].double()),
            r"sample_tokens: temperature must be contiguous \[3\] torch.float32, got \(3,\) torch.float64",
        ),
        (wrong(2, GOOD[2].long()), r"sample_tokens: top_k must be contiguous \[3\] torch.int32"),
        (wrong(3, GOOD[3][:2]), r"sample_tokens: top_p must be .*got \(2,\)"),
        (wrong(4, GOOD[4][:1].expand(3)), r"sample_tokens: min_p must be contiguous .*strides \(0,\)"),
        (wrong(5, GOOD[5].int()), "sample_tokens: row_keys must be"),
        (wrong(6, GOOD[6].long()), "sample_tokens: sample_index must be"),
        (wrong(7, GOOD[7][:0]), "sample_tokens: positions must be"),
        (wrong(8, -1), "sample_tokens: seed must be of 64 bits, 0 to 2\\^64 - 1, got -1"),
        (wrong(8, 1 << 64), "sample_tokens: seed must be of 64 bits"),
        (
            lambda: gather_logprobs.gather_logprobs_triton(GOOD[0], GOOD[5]),
            r"gather_logprobs: ids must be \[3, n\] int64 or int32",
        ),
        (lambda: gather_logprobs.gather_logprobs_triton(GOOD[0], GOOD[1][:, None]), r"got \(3, 1\) torch.float32"),
        (lambda: gather_logprobs.gather_logprobs_triton(GOOD[0].T, GOOD[5]), "gather_logprobs: logits must be dense"),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize(("scale", "vocab"), [(1.0, 5003), (12.0, 5003), (0.0, 49159)])
def test_logprobs_are_within_their_bound(scale, vocab, implementation, dtype):
    """Against log_softmax in float64, of the same rounded logits. In units of 2^-24: logit - max and the last difference
    round once each, |logit - max| + |logprob|; the logarithm of the sum has the sum's relative error, of up to 12 + 5 levels
    of addition, an exponential of 4 (exp2 of a GPU) and one of |x - max| <= 16 where terms count: 48 with room to spare."""
    generator = torch.Generator().manual_seed(int(scale))
    logits = (
        (torch.randn(3, vocab, generator=generator) * scale + torch.tensor([[0.0], [500.0], [-80.0]])).to(dtype).to(DEVICE)
    )
    ids = torch.randint(0, vocab, (3, 9), generator=generator).to(DEVICE)
    want = torch.log_softmax(logits.double(), -1).gather(1, ids)
    got, lse = getattr(gather_logprobs, f"gather_logprobs_{implementation}")(logits, ids)
    below = (logits.double().gather(1, ids) - logits.double().amax(-1, keepdim=True)).abs()
    assert ((got - want).abs() <= (below + want.abs() + 48) * 2.0**-24).all()
    assert ((lse - logits.double().logsumexp(-1)).abs() <= (lse.abs() + 48) * 2.0**-24).all()


def test_logprobs_of_a_row_do_not_depend_on_its_neighbours():
    logits, ids = gather_logprobs_case(5, 9001, 4, torch.float32, DEVICE).make()
    together, lse = gather_logprobs.gather_logprobs_triton(logits, ids)
    alone, lse_alone = gather_logprobs.gather_logprobs_triton(logits[3:4], ids[3:4])
    assert torch.equal(alone, together[3:4]) and torch.equal(lse_alone, lse[3:4])


def test_logprobs_of_masked_and_infinite_logits():
    logits = torch.tensor([[0.0, -INF, 0.0], [INF, 0.0, 0.0], [NAN, 0.0, 0.0], [-INF] * 3], device=DEVICE)
    ids = torch.tensor([[0, 1]] * 4, device=DEVICE)
    for implementation in (gather_logprobs.gather_logprobs_torch, gather_logprobs.gather_logprobs_triton):
        logprob, lse = implementation(logits, ids)
        assert logprob[0, 1] == -INF and abs(float(logprob[0, 0]) + math.log(2)) < 1e-6
        assert lse[1:3].isnan().all() and logprob[1:3].isnan().all() and lse[3] == -INF
