"""What attention does beyond softmax(q . K * scale) V for some models and caches, layer by layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn


class AttentionOptions(NamedTuple):
    """Off by default, each on its own.

    window      a token at position p sees positions (p - window, p]; 0: all up to p
    soft_cap    scaled scores become soft_cap * tanh(score / soft_cap); 0: as they are
    sinks       [num_q_heads] float32, contiguous: one more score a head, to which no value belongs: it joins the
                denominator (and so lse) once
    key_scale, value_scale
                [num_blocks, block_size, num_kv_heads] float32, alike in strides, and then the caches are float8_e4m3fn: a
                key is its bytes' value times its scale, one a token and key/value head
    """

    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def used(self) -> tuple[bool, ...]:
        """Which of them are on."""
        return self.window > 0, self.soft_cap > 0, *(t is not None for t in self[2:])


NO_OPTIONS = AttentionOptions()


def check_options(op: str, query: torch.Tensor, key_cache: torch.Tensor, options: AttentionOptions) -> None:
    """ValueError names what is wrong. query [T, num_q_heads, D]; key_cache [num_blocks, block_size, num_kv_heads, D]."""
    window, soft_cap, sinks, key_scale, value_scale = options
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"{op}: window must be a whole number of tokens, or 0 for none, got {window!r}")
    if not (soft_cap >= 0 and math.isfinite(soft_cap)):
        raise ValueError(f"{op}: soft_cap must be positive, or 0 for none, got {soft_cap!r}")
    if sinks is not None and (sinks.shape != query.shape[1:2] or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(f"{op}: sinks must be contiguous float32 [{query.shape[1]}], got {list(sinks.shape)} {sinks.dtype}")
    if (key_scale is None) != (value_scale is None):
        raise ValueError(f"{op}: key_scale and value_scale must be given both or not at all")
    if (key_cache.dtype == FP8) != (key_scale is not None):
        raise ValueError(f"{op}: a cache of {key_cache.dtype} {'needs' if key_scale is None else 'has no'} scales")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and (scale.shape != key_cache.shape[:3] or scale.dtype != torch.float32):
            raise ValueError(
                f"{op}: {name} must be float32 {list(key_cache.shape[:3])}, got {scale.dtype} {list(scale.shape)}"
            )
    if key_scale is not None and value_scale is not None and key_scale.stride() != value_scale.stride():
        raise ValueError(f"{op}: key_scale and value_scale must have the same strides")


def read_tokens(
    cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, num_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first num_tokens tokens of a list of blocks [n] int64, without their scales: [num_tokens, num_kv_heads, D]."""
    if scale is None:
        return cache[blocks].flatten(0, 1)[:num_tokens].to(dtype)
    values = cache.view(torch.uint8)[blocks].view(cache.dtype).flatten(0, 1)[:num_tokens].to(dtype)
    return values * scale[blocks].flatten(0, 1)[:num_tokens, :, None].to(dtype)
