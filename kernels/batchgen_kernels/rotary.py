"""Rotary position embedding (Su et al. 2021), the half-split layout of GPT-NeoX and Llama.

For each head, with R = 2 * cos.shape[1] <= head_dim and x1, x2 the halves of the first R elements:
    x1' = x1 * cos - x2 * sin;   x2' = x2 * cos + x1 * sin;   elements from R on are left as they are.
"""

from __future__ import annotations

import torch


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat([(x1 * c - x2 * s).to(x.dtype), (x2 * c + x1 * s).to(x.dtype), rest], dim=-1)


def rotary_embedding_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """In place. query [T, num_q_heads, D], key [T, num_kv_heads, D] (may be strided views), cos/sin [max_positions, R/2]
    float32, positions [T] int64."""
    query.copy_(_rotate(query, cos[positions], sin[positions]))
    key.copy_(_rotate(key, cos[positions], sin[positions]))


rotary_embedding_torch = rotary_embedding_reference
