"""Gated activations of the MLP: silu_and_mul([gate, up]) = silu(gate) * up.

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


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * stride_x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_and_mul: x must be [num_tokens, 2 * intermediate], got {tuple(x.shape)}")
    if x.stride(1) != 1:
        raise ValueError(f"silu_and_mul: x must be dense in its last dimension, got strides {x.stride()}")
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(2048, triton.next_power_of_2(size))
    silu_and_mul_kernel[(num_tokens, -(-size // block))](x, out, x.stride(0), SIZE=size, BLOCK=block, num_warps=4)
    return out
