"""Fills a Decoder from safetensors files, one tensor at a time. The only file that knows Hugging Face's tensor names."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from batchgen.environment import prepare_environment
from batchgen.errors import ModelError
from batchgen.models.config import ModelConfig, num_matmul_parameters
from batchgen.models.decoder import Decoder
from batchgen.models.files import ModelFiles, eos_token_ids, fingerprint, resolve_model

__all__ = ["ModelFiles", "eos_token_ids", "fingerprint", "load_config", "load_decoder", "resolve_model"]

# Buffers that old checkpoints store and that are computed from config.json instead
IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.masked_bias|self_attn\.bias)")


def load_config(files: ModelFiles) -> ModelConfig:
    """The model's shape; reads config.json only."""
    return ModelConfig.from_hf(files.read_json("config.json"))


def load_decoder(
    files: ModelFiles,
    device: torch.device | str,
    dtype: torch.dtype,
    ops: Any,
    max_model_len: int | None = None,
    products: Mapping[str, str] | None = None,
    int8: bool = False,
) -> Decoder:
    """The decoder with its weights on `device` as `dtype`.

    On a CPU in float32 the products are chosen and the weights packed for them (cpu_linear.py), or those of `products`,
    which an earlier decoder of this model had; `int8` asks for products of 8 bits, with all else in float32. MKL is asked
    for rows that do not depend on each other (cpu_math.py), which works once a process.
    `max_model_len` (default: all that the model supports) bounds the rotary tables. Peak memory is the model and one tensor.
    ModelError lists missing, unexpected and misshapen tensors.
    """
    if torch.device(device).type == "cpu":
        prepare_environment()
    config = load_config(files)
    _refuse_other_weights(config, files.weights)
    decoder = Decoder(config, ops, torch.device(device), dtype, max_model_len)
    fill(decoder, read_tensors(files.weights))
    if decoder.device.type == "cpu" and dtype == torch.float32 and not ops.batch_invariant:
        decoder.pack_weights(products or {}, int8)
    return decoder.eval()


def _refuse_other_weights(config: ModelConfig, paths: tuple[Path, ...]) -> None:
    """ModelError where config.json speaks of a far larger model than the files hold, before memory is taken for it."""
    described, stored = num_matmul_parameters(config), 0
    for path in paths:
        with _explained(path), safe_open(path, framework="pt") as file:
            stored += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    if described > 10 * (stored + 10**6):
        raise ModelError(
            f"config.json describes a model of more than {described:,} parameters, but its weights are {stored:,}; "
            "they do not belong together"
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path}: not a readable safetensors file: {e}") from e


def read_tensors(paths: tuple[Path, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU), file after file; a tensor lives until the next one is asked for."""
    for path in paths:
        with _explained(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                yield name, file.get_tensor(name)


def fill(decoder: Decoder, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor to where it belongs in the merged weights; ModelError unless each place is filled just once."""
    places = tensor_places(decoder)
    missing, unexpected, wrong_shape = set(places), [], []
    tied_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if name == "lm_head.weight" and decoder.config.tie_word_embeddings:
            tied_head = tensor
        elif name not in missing:
            unexpected += [] if IGNORED.fullmatch(name) else [name]
        elif tensor.shape != places[name].shape:
            wrong_shape.append(f"{name} {list(tensor.shape)} instead of {list(places[name].shape)}")
            missing.discard(name)
        else:
            places[name].copy_(tensor)
            missing.discard(name)
    faults = {"missing": sorted(missing), "unexpected": unexpected, "of the wrong shape": wrong_shape}
    if any(faults.values()):
        told = "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in faults.items() if names)
        raise ModelError(f"the weights do not fit a {decoder.config.model_type} model of this config.json; tensors {told}")
    # Some checkpoints store the tied head a second time. Another head than the embedding would be ignored: which is meant?
    if tied_head is not None and not torch.equal(tied_head.to(decoder.embedding), decoder.embedding):
        raise ModelError("config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight")


def tensor_places(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Hugging Face's tensor name -> the view of the decoder's weights that it fills."""
    config = decoder.config
    places: dict[str, torch.Tensor] = {"model.embed_tokens.weight": decoder.embedding}
    places["model.norm.weight"] = decoder.final_norm
    if not config.tie_word_embeddings:
        assert decoder.lm_head.weight is not None
        places["lm_head.weight"] = decoder.lm_head.weight
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i, layer in enumerate(decoder.layers):
        attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{i}"
        places[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        places[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        if config.qk_norm:
            places[f"{prefix}.self_attn.q_norm.weight"] = attention.q_norm
            places[f"{prefix}.self_attn.k_norm.weight"] = attention.k_norm
        for linear, names, sizes in (
            (attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q_size, kv_size, kv_size)),
            (attention.output, ("self_attn.o_proj",), (config.hidden_size,)),
            (mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (config.intermediate_size, config.intermediate_size)),
            (mlp.down, ("mlp.down_proj",), (config.hidden_size,)),
        ):
            for kind, merged in (("weight", linear.weight), ("bias", linear.bias)):
                if merged is not None:
                    for name, part in zip(names, merged.split(sizes), strict=True):
                        places[f"{prefix}.{name}.{kind}"] = part
    return places


def _first(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
