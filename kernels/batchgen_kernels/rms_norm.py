"""RMSNorm, alone and fused with the residual addition before it.

    rms_norm(x)            y = x / sqrt(mean(x^2) + eps) * weight                  (Zhang and Sennrich 2019)
    add_rms_norm(x, r)     r' = x + r;  y = rms_norm(r')

x, residual: [num_tokens, hidden] or any [..., hidden] (QK-norm uses [num_tokens, num_heads, head_dim]); weight: [hidden].
Statistics in float32; y in x's dtype.
"""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * h.to(x.dtype).float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds in place: `residual` is overwritten and returned."""
    residual.add_(x)
    return rms_norm_torch(residual, weight, eps), residual
