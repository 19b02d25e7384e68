"""Gated activations of the MLP: silu_and_mul([gate, up]) = silu(gate) * up, gelu_and_mul([gate, up]) = gelu(gate) * up.

    silu(g) = g / (1 + e^-g)
    gelu(g) = g (1 + erf(g / sqrt 2)) / 2, or with approximate="tanh"
    gelu(g) ~ g (1 + tanh u) / 2 = g / (1 + e^-2u),  u = sqrt(2 / pi) (g + 0.044715 g^3)          (Hendrycks and Gimpel 2016)

x: [num_tokens, 2 * intermediate] (gate first) -> [num_tokens, intermediate], same dtype.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_and_mul_reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """approximate: "none" or "tanh", as in torch.nn.functional.gelu."""
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate.float(), approximate=approximate) * up.float()).to(x.dtype)


def gelu_and_mul_torch(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate).mul_(up)


@triton.jit
def act_and_mul_kernel(x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * stride_x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:  # gelu by tanh; 2 sqrt(2 / pi)
        y = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    tl.store(out_ptr + token * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    return _launch("silu_and_mul", x, "silu")


def gelu_and_mul_triton(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu_and_mul: approximate must be "none" or "tanh", got {approximate!r}')
    return _launch("gelu_and_mul", x, "gelu" if approximate == "none" else "gelu_tanh")


def _launch(op: str, x: torch.Tensor, activation: str) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [num_tokens, 2 * intermediate], got {tuple(x.shape)}")
    if x.stride(1) != 1:
        raise ValueError(f"{op}: x must be dense in its last dimension, got strides {x.stride()}")
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(2048, triton.next_power_of_2(size))
    act_and_mul_kernel[(num_tokens, -(-size // block))](
        x, out, x.stride(0), SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=4
    )
    return out
