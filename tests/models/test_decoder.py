"""The decoder's logits against transformers in float32: families, shapes, rotary kinds, steps of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batchgen_kernels import select_ops
from model_driver import PagedDriver, run_whole
from toy import make_toy_model
from transformers import AutoModelForCausalLM

from batchgen.models.config import kv_bytes_per_token, kv_cache_shape, num_matmul_parameters
from batchgen.models.decoder import Decoder
from batchgen.models.files import resolve_model
from batchgen.models.loader import load_decoder

TOLERANCE = 1e-4
VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"kv_heads": 1}),
    "mistral": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def load(folder: Path, backend: str = "torch") -> Decoder:
    return load_decoder(resolve_model(folder), "cpu", torch.float32, select_ops(backend))


def oracle(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def random_tokens(n: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 272, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    folder = make_toy_model(tmp_path, family, **fields)
    tokens = random_tokens(45)
    expected = oracle(folder, tokens)
    decoder = load(folder)
    torch.testing.assert_close(run_whole(decoder, tokens), expected, atol=TOLERANCE, rtol=0)
    driver = PagedDriver(decoder)  # chunks of 7, then token by token
    pieces = [driver.step({0: tokens[i : i + 7]})[0] for i in range(0, 28, 7)]
    pieces += [driver.step({0: [token]})[0] for token in tokens[28:]]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_mixed_steps_of_several_sequences(backend: str, tmp_path: Path) -> None:
    folder = make_toy_model(tmp_path, "qwen3", check_sensitivity=False)
    sequences = {i: random_tokens(n, seed=i) for i, n in enumerate((5, 23, 40))}
    driver = PagedDriver(load(folder, backend), block_size=3)
    got: dict[int, list[torch.Tensor]] = {i: [] for i in sequences}
    at = dict.fromkeys(sequences, 0)
    for sizes in ((5, 3, 1), (0, 19, 0), (0, 1, 38), (0, 0, 1)):
        work = {i: sequences[i][at[i] : at[i] + n] for i, n in enumerate(sizes) if n}
        for i, logits in driver.step(work).items():
            got[i].append(logits)
            at[i] += len(work[i])
    for i, tokens in sequences.items():
        assert at[i] == len(tokens)
        torch.testing.assert_close(torch.cat(got[i]), oracle(folder, tokens), atol=TOLERANCE, rtol=0)


ROPES = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "linear-old-spelling": {"type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn-old-spelling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
    "both-keys": {"type": "yarn", "rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
}  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_kinds_equal_transformers(kind: str, spelling: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    folder = make_toy_model(tmp_path, check_sensitivity=False, rope_parameters=rope)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    if spelling == "rope_scaling":
        config |= {"rope_scaling": ROPES[kind], "rope_theta": 5000.0}
    else:
        config |= {"rope_parameters": ROPES[kind] | {"rope_theta": 5000.0}}
    plain = oracle(folder, tokens := random_tokens(200))
    path.write_text(json.dumps(config))
    expected = oracle(folder, tokens)
    if kind != "dynamic":  # which changes nothing up to max_position_embeddings, and is refused beyond it
        assert (expected[150] - plain[150]).abs().max() > 100 * TOLERANCE, "the scaling must matter here"
    torch.testing.assert_close(run_whole(load(folder), tokens), expected, atol=TOLERANCE, rtol=0)


def test_a_token_has_the_same_logits_in_any_step(tmp_path: Path) -> None:
    """Bitwise, alone or among neighbours: what order and resume may not change."""
    decoder = load(make_toy_model(tmp_path, hidden=96, check_sensitivity=False))
    prompt, others = random_tokens(30), {i: random_tokens(1 + i % 5, seed=i) for i in range(1, 40)}
    alone, crowded = PagedDriver(decoder), PagedDriver(decoder, num_blocks=256, seed=9)
    first_alone, first_crowded = alone.step({0: prompt})[0], crowded.step({**others, 0: prompt})[0]
    assert torch.equal(first_alone, first_crowded)
    for token in random_tokens(4):
        a = alone.step({0: [token]})[0]
        b = crowded.step({0: [token], **{i: [token] for i in others}})[0]
        assert torch.equal(a, b)


ROWS_SCRIPT = """
import sys, torch
from batchgen_kernels import select_ops
from batchgen.models.loader import load_decoder, resolve_model
decoder = load_decoder(resolve_model(sys.argv[1]), "cpu", torch.float32, select_ops("torch"))
torch.set_num_threads(2)
weight, x = torch.randn(576, 1536), torch.randn(300, 1536)
whole = torch.nn.functional.linear(x, weight)
print(decoder.min_rows, [n for n in range(1, 300) if not torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n])])
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="another BLAS than MKL: only the padding helps")
def test_loading_makes_rows_independent_at_any_size_and_on_two_threads(tmp_path: Path) -> None:
    folder = make_toy_model(tmp_path, check_sensitivity=False)
    env = {k: v for k, v in os.environ.items() if k not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", ROWS_SCRIPT, str(folder)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1 []"


def test_no_sampled_rows(tmp_path: Path) -> None:
    decoder = load(make_toy_model(tmp_path, check_sensitivity=False))
    assert decoder.logits(torch.zeros(0, 64)).shape == (0, 272)


def test_sizes(tmp_path: Path) -> None:
    config = load(make_toy_model(tmp_path, head_dim=32, check_sensitivity=False)).config
    assert kv_cache_shape(config, 10, 4) == (2, 2, 10, 4, 2, 32)
    assert kv_bytes_per_token(config, torch.bfloat16) == 2 * 2 * 2 * 32 * 2
    body = 2 * (64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 128)
    assert num_matmul_parameters(config, lm_head=False) == body
    assert num_matmul_parameters(config) == body + 272 * 64
