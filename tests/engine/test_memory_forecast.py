"""The forecast against what random answers really come to hold."""

import numpy as np
import pytest

from batchgen.engine.memory_forecast import MemoryForecast, wanted

BLOCK = 4


def held_later(ages, private, lengths, limit, step):
    """Blocks more than now, `step` blocks of tokens later, by looking at each answer's true length (in blocks)."""
    alive = lengths > ages + step
    return np.where(alive, np.minimum(step, limit - ages), -private).sum()


def test_without_an_answer_everyone_is_expected_to_reach_the_limit():
    forecast = MemoryForecast(max_tokens=40, block_size=BLOCK)
    mean, variance = forecast.running(np.array([10, 8, 1]), np.array([5, 5, 5]))
    assert variance.max() == 0
    assert wanted(mean, variance) == 8 + 8 - 5  # when the second reaches the limit the oldest has given back its blocks
    assert wanted(*forecast.candidate(10, 5, num_samples=2)) == 2 * 10
    assert wanted(*forecast.candidate(0, 5, num_samples=2)) == 0  # no more than it can take


def test_mean_and_deviation_match_random_answers():
    rng = np.random.default_rng(0)
    limit, rows = 50, 400
    draw = lambda n: np.minimum(rng.geometric(1 / 12, n), limit)  # noqa: E731
    forecast = MemoryForecast(limit * BLOCK, BLOCK)
    for blocks in draw(20_000):
        forecast.end(limit - int(blocks) + 1)
    ages, private = rng.integers(0, 20, rows), rng.integers(0, 15, rows)
    mean, variance = forecast.running(limit - ages, private)
    for h in (0, 3, 8):
        step = int(forecast._later[h, 0])
        samples = []
        for _ in range(300):
            lengths = ages + draw(rows)  # geometric: what is left does not depend on the age
            lengths = np.minimum(lengths, limit)
            samples.append(held_later(ages, private, lengths, limit, step))
        assert mean[h] == pytest.approx(np.mean(samples), abs=4 * np.std(samples) / np.sqrt(300) + 0.02 * private.sum())
        assert np.sqrt(variance[h]) == pytest.approx(np.std(samples), rel=0.2)


def test_the_first_answers_to_end_do_not_speak_for_all():
    """When half of the rows run on, those that ended are short; counting only them would halve the forecast."""
    rng = np.random.default_rng(1)
    limit = 60
    lengths = np.minimum(rng.geometric(1 / 20, 4000), limit)
    forecast = MemoryForecast(limit * BLOCK, BLOCK)
    age = 10
    for blocks in lengths[lengths <= age]:
        forecast.end(limit - int(blocks) + 1)
    runs = int((lengths > age).sum())
    forecast.running(np.full(runs, limit - age), np.zeros(runs, int))
    alive_after_ten = forecast._alive[int(np.searchsorted(forecast._later[:, 0], 10)), 0]
    assert alive_after_ten == pytest.approx((19 / 20) ** 10, rel=0.05)


def test_candidates_add_up_to_running():
    forecast = MemoryForecast(64, BLOCK)
    for left in (15, 14, 14, 9):
        forecast.end(left)
    forecast.running(np.array([16]), np.array([0]))
    mean, variance = forecast.running(np.array([14, 14, 16]), np.array([4, 4, 2]))
    two, one = forecast.candidate(14, 4, 2), forecast.candidate(16, 2, 1)
    assert np.allclose(mean, two[0] + one[0]) and np.allclose(variance, two[1] + one[1])
