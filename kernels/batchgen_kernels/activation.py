"""Gated activations of the MLP: silu_and_mul([gate, up]) = silu(gate) * up.

x: [num_tokens, 2 * intermediate] (gate first) -> [num_tokens, intermediate], same dtype.
"""

from __future__ import annotations

import torch


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
