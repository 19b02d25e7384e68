"""The engine with a KV cache of float8: close to float32, the same on every backend, the same however it is scheduled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from batchgen_kernels import select_ops
from model_driver import PagedDriver
from toy import make_toy_model
from toy_engine import CLEAR_GAP, ORDERS, ToyEngine, tree_of_prompts

from batchgen.engine.kv_cache import KVCache
from batchgen.engine.sizing import choose_kv_dtype
from batchgen.models.config import kv_bytes_per_token, kv_cache_shape
from batchgen.models.decoder import Decoder
from batchgen.models.files import resolve_model
from batchgen.models.loader import load_decoder

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
PROMPTS = tree_of_prompts()
MAX_TOKENS = 8


def load(folder: Path, backend: str = "torch") -> Decoder:
    return load_decoder(resolve_model(folder), "cpu", torch.float32, select_ops(backend))


def chunked_logits(decoder: Decoder, tokens: list[int], kv_dtype: torch.dtype) -> torch.Tensor:
    """[len(tokens), vocab]: chunks of 6 and 5, then token by token."""
    driver = PagedDriver(decoder, kv_dtype=kv_dtype)
    pieces = [tokens[:6], tokens[6:11], *([t] for t in tokens[11:])]
    return torch.cat([driver.step({0: piece})[0] for piece in pieces])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_close_to_float32_and_equal_on_every_backend(family: str, tmp_path: Path) -> None:
    """Two layers round keys and values once each, an element by at most 2^-4 and in the mean by half of that or less; errors
    of many elements add as squares do. So the logits move by a few percent, and by less than twice 2^-4 of their norm."""
    folder = make_toy_model(tmp_path, family, check_sensitivity=False)
    tokens = torch.randint(0, 272, (16,), generator=torch.Generator().manual_seed(3)).tolist()
    exact = chunked_logits(load(folder), tokens, torch.float32)
    rounded = {backend: chunked_logits(load(folder, backend), tokens, E4M3) for backend in ("reference", "torch", "triton")}
    error = float((rounded["torch"] - exact).norm() / exact.norm())
    assert 1e-3 < error < 2 * 2.0**-4
    for backend in ("torch", "triton"):
        torch.testing.assert_close(rounded[backend], rounded["reference"], atol=1e-4, rtol=0)


class Solo:
    """Greedy answers of the decoder over a float8 cache of its own, one prompt at a time, and how clear each choice was."""

    def __init__(self, folder: Path) -> None:
        self.engine = ToyEngine(folder, kv_dtype=E4M3)
        self.expected: dict[int, list[int]] = {}
        self.clear: set[int] = set()
        for i, prompt in enumerate(PROMPTS):
            driver = PagedDriver(self.engine.decoder, kv_dtype=E4M3)
            tokens, answer, gap = list(prompt), [], 1.0
            for _ in range(MAX_TOKENS):
                logits = driver.step({0: tokens})[0][-1]
                top = logits.topk(2)
                gap = min(gap, float(top.values[0] - top.values[1]))
                tokens = [int(top.indices[0])]
                answer += tokens
            self.expected[i] = answer
            if gap > CLEAR_GAP:
                self.clear.add(i)


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    return Solo(make_toy_model(tmp_path_factory.mktemp("fp8"), "qwen3"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("block_size", "cap", "num_samples", "tight"), [(1, 32, 1, False), (4, 3, 1, True), (4, 32, 3, False), (16, 32, 2, True)]
)
def test_scheduling_changes_no_token(
    block_size: int, cap: int, num_samples: int, tight: bool, order: str, solo: Solo
) -> None:
    """A token's codes depend on it alone: prefix sharing, forks that copy a partial block with its scales, preemption and
    poisoned blocks leave the answers as they are."""
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    outcome = solo.engine.run(
        PROMPTS, block_size=block_size, cap=cap, order=order, num_samples=num_samples, max_tokens=MAX_TOKENS, budget=40,
        num_blocks=-(-longest // block_size) + 6 if tight else None, output_reserve=0.0 if tight else 1.0,
    )  # fmt: skip
    assert len(solo.clear) > len(PROMPTS) / 2
    for (i, sample), tokens in outcome.tokens().items():
        if i in solo.clear:
            assert tokens == solo.expected[i], (i, sample)
    assert outcome.stats.num_cached > 0
    if tight:
        assert outcome.stats.num_preemptions > 0


def test_the_triton_backend_gives_the_same_tokens(tmp_path: Path) -> None:
    """Under the interpreter: chunked prefill, a small pool, forks."""
    folder = make_toy_model(tmp_path, layers=1, hidden=32, heads=2, kv_heads=1, check_sensitivity=False)
    trunk = PROMPTS[0][:9]
    prompts = [trunk + [1, 2], trunk + [3], trunk[:3], [7]]
    outcomes = [
        ToyEngine(folder, backend, E4M3).run(
            prompts, max_tokens=3, num_samples=2, block_size=4, budget=6, cap=3, num_blocks=9, output_reserve=0.0
        )
        for backend in ("torch", "triton")
    ]
    assert outcomes[0].tokens() == outcomes[1].tokens()


def test_a_block_is_copied_with_its_scales() -> None:
    cache = KVCache((2, 2, 5, 4, 3, 8), E4M3, CPU, select_ops("torch"))
    assert cache.scale is not None and cache.scale.shape == (2, 2, 5, 4, 3)
    cache.tensor[:, :, 2], cache.scale[:, :, 2] = torch.tensor(1.5).to(E4M3), 0.25
    cache.copy_blocks(np.array([[2, 4]], np.int32))
    assert (cache.tensor[:, :, 4].float() == 1.5).all() and (cache.scale[:, :, 4] == 0.25).all()
    assert (cache.tensor[:, :, 3].float() == 0).all() and (cache.scale[:, :, 3] == 0).all()


def test_sizes(tmp_path: Path) -> None:
    config = load(make_toy_model(tmp_path, head_dim=32, check_sensitivity=False)).config
    assert choose_kv_dtype("auto", torch.bfloat16) == torch.bfloat16 and choose_kv_dtype("fp8", torch.bfloat16) == E4M3
    cache = KVCache(kv_cache_shape(config, 3, 4), E4M3, CPU, select_ops("torch"), fill=float("nan"))
    assert cache.scale is not None
    assert cache.tensor[:, :, 1:].float().isnan().all() and cache.scale[:, :, 1:].isnan().all()
    assert (cache.tensor[:, :, 0].float() == 0).all() and (cache.scale[:, :, 0] == 0).all()
    num_bytes = cache.tensor.nbytes + cache.scale.nbytes
    assert kv_bytes_per_token(config, E4M3) * 3 * 4 == num_bytes
