"""What is read from config.json, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.errors import ModelError
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import Decoder
from batchgen.models.families import FAMILIES


def hf(model_type: str = "llama", **fields: Any) -> dict[str, Any]:
    shape = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return dict(shape, model_type=model_type, num_key_value_heads=2, max_position_embeddings=1000) | fields


@pytest.mark.parametrize("model_type", FAMILIES)
def test_shape(model_type: str) -> None:
    source = hf(model_type, head_dim=32, rms_norm_eps=1e-5)
    before = repr(source)
    config = ModelConfig.from_hf(source)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (2, 4, 2, 300)
    assert config.rms_norm_eps == 1e-5 and config.head_dim == 32 and len(config.rope_inv_freq) == 16
    assert hash(config) == hash(ModelConfig.from_hf(source)) and repr(source) == before
    assert (config.qkv_bias, config.qk_norm) == (model_type == "qwen2", model_type == "qwen3")


def test_absent_fields_mean_what_they_mean_in_transformers() -> None:
    assert ModelConfig.from_hf(hf()).head_dim == 16
    assert ModelConfig.from_hf(hf("qwen3")).head_dim == 128
    config = hf()
    del config["num_key_value_heads"]
    assert ModelConfig.from_hf(config).num_kv_heads == 4
    assert not ModelConfig.from_hf(hf()).tie_word_embeddings


def test_bias_flags() -> None:
    for family, expected in {"llama": (True, True, True), "mistral": (False,) * 3, "qwen3": (True, True, False)}.items():
        config = ModelConfig.from_hf(hf(family, attention_bias=True, mlp_bias=True))
        assert (config.qkv_bias, config.output_bias, config.mlp_bias) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(model_type="gpt2"), r"'gpt2' is not supported; there are llama, mistral, qwen2, qwen3"),
        (dict(model_type=None), r"None is not supported"),
        (dict(num_key_value_heads=3), r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "'spiral' is not supported; there are default"),
        (dict(rope_scaling={"type": "longrope", "factor": 2.0}), "'longrope' is not supported"),
        (dict(rope_scaling={"rope_type": "linear"}), "factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (dict(quantization_config={"quant_method": "awq"}), "awq weights"),
        (dict(hidden_size="64"), "hidden_size"),
        (dict(hidden_size=66), "hidden size"),
        (dict(vocab_size=-1), "vocab_size must be a whole number from 1"),
        (dict(num_key_value_heads=0), "num_key_value_heads must be"),
        (dict(num_hidden_layers=10**30), "num_hidden_layers must be"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelConfig.from_hf(hf(**fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "length", "reason"),
    [
        (hf(), 1000, "max_position_embeddings"),
        (hf("mistral", sliding_window=100), 100, "sliding-window"),
        (hf("mistral", sliding_window=None), 1000, "max_position_embeddings"),
        (hf("mistral", sliding_window=4096), 1000, "max_position_embeddings"),
        (hf("qwen2", sliding_window=100, use_sliding_window=False), 1000, "max_position_embeddings"),
        (hf("qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=2), 1000, "max_position_embeddings"),
        (hf("qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=1), 100, "sliding-window"),
        (hf(rope_scaling={"type": "dynamic", "factor": 4.0}), 1000, "dynamic"),
        (hf(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}), 4000, "yarn"),
    ],
)
def test_the_longest_supported_sequence(config: dict[str, Any], length: int, reason: str) -> None:
    parsed = ModelConfig.from_hf(config)
    assert parsed.max_supported_len == length and reason in parsed.max_supported_reason
    parsed.check_model_len(length)
    with pytest.raises(ModelError, match=rf"at most {length}"):
        parsed.check_model_len(length + 1)
    with pytest.raises(ModelError, match=reason):
        Decoder(parsed, None, torch.device("meta"), torch.float32, max_model_len=length + 1)
