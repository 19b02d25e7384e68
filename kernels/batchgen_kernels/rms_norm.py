"""RMSNorm, alone and fused with the residual addition before it.

    rms_norm(x)            y = x / sqrt(mean(x^2) + eps) * weight                  (Zhang and Sennrich 2019)
    add_rms_norm(x, r)     r = x + r, in place;  y = rms_norm(r)

x, residual: [num_tokens, hidden] or any [..., hidden] (QK-norm uses [num_tokens, num_heads, head_dim]); weight: [hidden].
Statistics in float32; y in x's dtype.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton

TILE_ELEMENTS = 2048  # short rows (QK-norm has head_dim of them) share a program up to this many elements


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * h.to(x.dtype).float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds in place: `residual` is overwritten and returned."""
    residual.copy_(x + residual)
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, in_place: bool = False) -> torch.Tensor:
    if x.dtype != torch.float32:
        y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return x.copy_(y) if in_place else y
    # three passes over x where torch's composite takes five
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=x if in_place else None).mul_(weight)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds in place: `residual` is overwritten and returned."""
    residual.add_(x)
    return rms_norm_torch(residual, weight, eps), residual


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # or None: a plain rms_norm
    weight_ptr,
    out_ptr,
    eps,
    num_rows,
    stride_x_outer,
    stride_x_inner,
    stride_residual,
    INNER: tl.constexpr,  # row r is x[r // INNER, r % INNER]
    HIDDEN: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, PADDED_HIDDEN)
    cell_ok = (row < num_rows)[:, None] & (column < HIDDEN)[None, :]
    x_row = x_ptr + (row // INNER) * stride_x_outer + (row % INNER) * stride_x_inner
    x = tl.load(x_row[:, None] + column[None, :], mask=cell_ok, other=0.0)
    if residual_ptr is not None:
        residual_tile = residual_ptr + row[:, None] * stride_residual + column[None, :]
        x = (x.to(tl.float32) + tl.load(residual_tile, mask=cell_ok, other=0.0).to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(residual_tile, x, mask=cell_ok)
    h = x.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 1) / HIDDEN + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    # rounded before the weight as well, as Hugging Face's modules do
    y = weight[None, :] * h.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row[:, None] * HIDDEN + column[None, :], y.to(out_ptr.dtype.element_ty), mask=cell_ok)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x may be a strided view of up to 3 dims (query heads inside a fused qkv tensor); the result is contiguous."""
    return _launch("rms_norm", x, None, weight, eps)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds in place: `residual` is overwritten and returned."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual must be like x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}"
        )
    if not residual.is_contiguous():
        raise ValueError(f"add_rms_norm: residual must be contiguous, got strides {residual.stride()}")
    return _launch("add_rms_norm", x, residual, weight, eps), residual


def _launch(op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    hidden = x.shape[-1]
    if weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"{op}: weight must be contiguous [{hidden}], got {tuple(weight.shape)}")
    if x.stride(-1) != 1:
        raise ValueError(f"{op}: x must be dense in its last dimension, got strides {x.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // hidden
    if num_rows == 0:
        return out
    rows = x if x.dim() == 3 else x.reshape(-1, 1, hidden)
    padded = triton.next_power_of_2(hidden)
    block_rows = max(1, TILE_ELEMENTS // padded)
    rms_norm_kernel[(-(-num_rows // block_rows),)](
        rows, residual, weight, out, eps, num_rows, rows.stride(0), rows.stride(1), hidden,
        INNER=rows.shape[1], HIDDEN=hidden, PADDED_HIDDEN=padded, BLOCK_ROWS=block_rows,
        num_warps=min(16, max(4, padded // 1024)),
    )  # fmt: skip
    return out
