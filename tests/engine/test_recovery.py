"""Steps that run out of memory or raise: what the others answer does not change, and who raises is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toy import make_toy_model
from toy_engine import Outcome, ToyEngine

from batchgen.engine.recovery import fit_kv_cache
from batchgen.engine.sampler import SamplingConfig
from batchgen.errors import EngineError
from batchgen.models.inputs import BatchInputs

POISON = 77  # a token id
SAMPLED = SamplingConfig(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyEngine:
    return ToyEngine(make_toy_model(tmp_path_factory.mktemp("toy"), layers=1))


@pytest.fixture
def raising(toy: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[BatchInputs], None]], None]:
    """Put a check before each forward pass."""
    forward = toy.decoder.forward

    def install(check: Callable[[BatchInputs], None]) -> None:
        def watched(inputs: BatchInputs, *rest: Any) -> torch.Tensor:
            check(inputs)
            return forward(inputs, *rest)

        monkeypatch.setattr(toy.decoder, "forward", watched)

    return install


def poison(inputs: BatchInputs) -> None:
    if (inputs.token_ids == POISON).any():
        raise ValueError("cannot multiply\nby 77")


def prompts(with_poison: tuple[int, ...] = (), num: int = 14) -> list[list[int]]:
    rng = np.random.default_rng(0)
    trunk = rng.integers(100, 200, 9).tolist()
    rows = [trunk[: i % 10] + rng.integers(100, 200, 3 + i % 4).tolist() for i in range(num)]
    for i in with_poison:
        rows[i][-2] = POISON
    return rows


def split(outcome: Outcome) -> tuple[dict[tuple[int, int], list[int]], set[tuple[int, int]]]:
    faults = {key: f.fault for key, f in outcome.by_request.items() if f.fault is not None}
    for fault in faults.values():
        assert fault.code == "engine_error" and "ValueError: cannot multiply" in fault.message
        assert "\n" not in fault.message
    return {key: ids for key, ids in outcome.tokens().items() if key not in faults}, set(faults)


# ---- out of memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize(("num_samples", "ahead"), [(1, 0), (3, 0), (3, 1)])
def test_a_step_that_does_not_fit_is_made_smaller(
    toy: ToyEngine, raising: Any, error: Exception, num_samples: int, ahead: int
) -> None:
    args: dict[str, Any] = dict(budget=64, sampling=SAMPLED, num_samples=num_samples, max_tokens=10, ahead=ahead)
    expected = toy.run(prompts(), **args)
    sizes = []

    def limit(inputs: BatchInputs) -> None:
        sizes.append(len(inputs.token_ids))
        if len(inputs.token_ids) > 9:
            raise error

    raising(limit)
    outcome = toy.run(prompts(), **args)
    assert outcome.tokens() == expected.tokens()
    assert outcome.stats.num_out_of_memory == sum(size > 9 for size in sizes) <= 4, "64, 32, 16: then it fits"
    assert max(sizes[-20:]) <= 9


def test_no_memory_for_one_token_ends_the_job(toy: ToyEngine, raising: Any) -> None:
    def never(inputs: BatchInputs) -> None:
        raise MemoryError

    raising(never)
    with pytest.raises(EngineError, match="out of memory in a step of one token"):
        toy.run(prompts())


def test_the_cache_takes_what_memory_there_is() -> None:
    told: list[str] = []

    def make(num_blocks: int) -> int:
        if num_blocks > 300:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return num_blocks

    assert fit_kv_cache(make, 1000, told.append) == 250
    assert len(told) == 2 and "250 blocks" in told[1]
    with pytest.raises(EngineError, match="no memory for a KV cache of 3 blocks"):
        fit_kv_cache(lambda n: make(n + 300), 1000, told.append)
    with pytest.raises(RuntimeError, match="something else"):
        fit_kv_cache(lambda n: (_ for _ in ()).throw(RuntimeError("something else")), 1000, told.append)


# ---- a request that raises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprits", [(5,), (0, 13), (2, 3, 4, 9)])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"budget": 7, "cap": 5},
        {"num_samples": 3, "cap": 6},
        {"num_blocks": 12},
        {"ahead": 1},
        {"ahead": 1, "num_samples": 3},
    ],
)
def test_who_raises_is_found_and_the_others_answer_as_without(
    toy: ToyEngine, raising: Any, culprits: tuple[int, ...], config: dict[str, Any]
) -> None:
    """Prompts with a token that the model cannot compute: prefills in chunks, forks, and a pool that preempts."""
    args: dict[str, Any] = dict(sampling=SAMPLED, max_tokens=8) | config
    expected = toy.run(prompts(), **args).tokens()
    raising(poison)
    outcome = toy.run(prompts(culprits), **args)
    answers, faults = split(outcome)
    samples = range(config.get("num_samples", 1))
    # what is sampled may be the poisonous token, too
    poisonous = {key for key, ids in expected.items() if POISON in ids[:-1]}
    assert faults == {(i, s) for i in culprits for s in samples} | poisonous
    assert answers == {key: ids for key, ids in expected.items() if key not in faults}


def test_a_token_that_is_sampled_raises(toy: ToyEngine, raising: Any) -> None:
    args: dict[str, Any] = dict(sampling=SAMPLED, max_tokens=40, num_samples=2)
    expected = toy.run(prompts(), **args).tokens()
    culprits = {key for key, ids in expected.items() if POISON in ids[:-1]}
    assert 1 <= len(culprits) < len(expected) / 2, "choose another seed"
    raising(poison)
    answers, faults = split(toy.run(prompts(), **args))
    assert faults == culprits
    assert answers == {key: ids for key, ids in expected.items() if key not in faults}


@pytest.mark.parametrize("num_rows", [1, 3, 14])
def test_an_error_of_every_step_is_no_fault_of_the_rows(toy: ToyEngine, raising: Any, num_rows: int) -> None:
    def always(inputs: BatchInputs) -> None:
        raise ValueError("broken")

    raising(always)
    with pytest.raises(EngineError, match=r"fails whatever it computes.*ValueError: broken"):
        toy.run(prompts(num=num_rows))


def test_what_only_many_requests_raise_ends_the_job(toy: ToyEngine, raising: Any) -> None:
    def crowded(inputs: BatchInputs) -> None:
        if len(inputs.attention.seq_lens) > 8:
            raise ValueError("too many")

    raising(crowded)
    with pytest.raises(EngineError, match="each of their requests can be computed alone"):
        toy.run(prompts())


def test_an_error_that_comes_once_changes_nothing(toy: ToyEngine, raising: Any) -> None:
    expected, steps = toy.run(prompts()).tokens(), 0

    def once(inputs: BatchInputs) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise ValueError("a ray from space")

    raising(once)
    outcome = toy.run(prompts())
    assert outcome.tokens() == expected and outcome.stats.num_failed_steps == 1


def test_a_device_that_has_failed_ends_the_job(toy: ToyEngine, raising: Any) -> None:
    def dead(inputs: BatchInputs) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    raising(dead)
    with pytest.raises(EngineError, match="the device has failed: RuntimeError: CUDA error"):
        toy.run(prompts())
