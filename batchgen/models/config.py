"""What the decoder must know about a model, read from Hugging Face's config.json. No other file reads those fields.

Defaults of absent fields, old and new spellings of the rotary parameters and the rotary frequencies themselves are
transformers' own, so that both agree on what a config.json means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchgen.errors import ModelError
from batchgen.models.families import FamilySpec, family_of

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only model. Hashable, and free of tensors."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_type: str
    rope_inv_freq: tuple[float, ...]  # [head_dim / 2], exact float32 values
    rope_attention_factor: float  # multiplies cos and sin (yarn)
    max_position_embeddings: int
    max_supported_len: int  # the longest sequence, prompt and answer, whose result is right
    max_supported_reason: str  # why it is that one

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a parsed config.json. ModelError for what the decoder does not compute as transformers would."""
        family = family_of(config.get("model_type"))
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ModelError(f"config.json: quantization_config: {method} weights are not supported; use the original model")
        hf = _parse(family.model_type, config)
        if hf.hidden_act not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act {hf.hidden_act!r} is not supported; there is silu")
        _refuse_impossible_sizes(hf)
        num_heads, num_kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
            )
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
        rope_type, inv_freq, attention_factor = _rope(hf, head_dim)
        max_len, reason = _max_supported_len(hf, rope_type)
        return cls(
            model_type=family.model_type,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(hf.rms_norm_eps),
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            **_biases(family, hf),
            qk_norm=family.qk_norm,
            rope_type=rope_type,
            rope_inv_freq=inv_freq,
            rope_attention_factor=attention_factor,
            max_position_embeddings=hf.max_position_embeddings,
            max_supported_len=max_len,
            max_supported_reason=reason,
        )

    def check_model_len(self, max_model_len: int) -> None:
        """ModelError where sequences of `max_model_len` tokens would silently get wrong results."""
        if max_model_len > self.max_supported_len:
            raise ModelError(
                f"max_model_len {max_model_len} is more than this model supports here, {self.max_supported_len} tokens: "
                f"{self.max_supported_reason}; set max_model_len to at most {self.max_supported_len}"
            )


def kv_cache_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int, int]:
    """[num_layers, 2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]"""
    return (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in a key/value cache of `dtype`, over all layers; float8 has a float32 scale per head."""
    scale_bytes = 4 if dtype == torch.float8_e4m3fn else 0
    return 2 * config.num_layers * config.num_kv_heads * (config.head_dim * dtype.itemsize + scale_bytes)


def num_matmul_parameters(config: ModelConfig, *, lm_head: bool = True) -> int:
    """Weights that a token is multiplied with: 2 FLOPs each. The head only runs on sampled tokens, hence the switch."""
    qkv = config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    output = config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (qkv + output + mlp) + lm_head * config.vocab_size * config.hidden_size


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_MAX_SIZE = 2**31 - 1


def _refuse_impossible_sizes(hf: Any) -> None:
    for name in _SIZES:
        size = getattr(hf, name, None)
        if size is None and name == "head_dim":
            continue
        if not isinstance(size, int) or not 1 <= size <= _MAX_SIZE:
            raise ModelError(f"config.json: {name} must be a whole number from 1 to {_MAX_SIZE:,}, not {size!r}")


def _parse(model_type: str, config: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; there are {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; only whole heads are rotated")
    try:
        # a copy, since transformers moves the rotary fields about inside the dictionary that it is given
        return CONFIG_MAPPING[model_type].from_dict({k: dict(v) if isinstance(v, dict) else v for k, v in config.items()})
    except Exception as e:  # strict dataclasses of several libraries: each has its own exception
        raise ModelError(f"config.json: {' '.join(str(e).split())}") from e


def _rope(hf: Any, head_dim: int) -> tuple[str, tuple[float, ...], float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return kind, tuple((1.0 / hf.rope_parameters["rope_theta"] ** exponent).tolist()), 1.0
    hf.head_dim = head_dim  # qwen2 has no such field, and transformers' functions disagree on what its absence means
    try:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf, device=torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as e:
        raise ModelError(f"config.json: rope parameters of type {kind!r} are incomplete or wrong: {e}") from e
    return kind, tuple(inv_freq.tolist()), float(attention_factor)


def _max_supported_len(hf: Any, rope_type: str) -> tuple[int, str]:
    length, reason = hf.max_position_embeddings, "max_position_embeddings of its config.json"
    if rope_type == "yarn":
        rope = hf.rope_parameters
        length = max(length, int(rope["factor"] * rope["original_max_position_embeddings"]))
        reason = "the length that its yarn rope parameters extend it to"
    elif rope_type == "dynamic":
        # Past this length every key would have to be rotated anew whenever its sequence grows, which no shared cache can do
        reason = "dynamic rope scaling beyond max_position_embeddings is not supported"
    window = getattr(hf, "sliding_window", None)
    layer_types = getattr(hf, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if window and slides and window < length:
        # Up to `window` tokens a sliding window hides nothing
        length, reason = window, "sliding-window attention is not supported, and up to its window it makes no difference"
    return length, reason


def _biases(family: FamilySpec, hf: Any) -> dict[str, bool]:
    attention, mlp = bool(getattr(hf, "attention_bias", False)), bool(getattr(hf, "mlp_bias", False))
    return {
        "qkv_bias": attention if family.qkv_bias is None else family.qkv_bias,
        "output_bias": attention if family.output_bias is None else family.output_bias,
        "mlp_bias": mlp if family.mlp_bias is None else family.mlp_bias,
    }
