"""The model families that the native decoder runs. Adding a family that differs by these flags only is adding one row."""

from __future__ import annotations

from typing import NamedTuple

from batchgen.errors import ModelError


class FamilySpec(NamedTuple):
    """How a family differs from Llama. None means: the checkpoint's own `attention_bias` or `mlp_bias` says it."""

    model_type: str  # `model_type` of config.json
    qkv_bias: bool | None = None
    output_bias: bool | None = None  # of the attention's output projection
    mlp_bias: bool | None = None
    qk_norm: bool = False  # RMSNorm over head_dim on each query and key head, before the rotary embedding


FAMILIES: dict[str, FamilySpec] = {
    spec.model_type: spec
    for spec in (
        FamilySpec("llama"),
        FamilySpec("mistral", qkv_bias=False, output_bias=False, mlp_bias=False),
        FamilySpec("qwen2", qkv_bias=True, output_bias=False, mlp_bias=False),
        FamilySpec("qwen3", mlp_bias=False, qk_norm=True),
    )
}


def family_of(model_type: str | None) -> FamilySpec:
    """The row for `model_type`; ModelError that names the supported ones for any other."""
    if model_type not in FAMILIES:
        raise ModelError(f"config.json: model_type {model_type!r} is not supported; there are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
