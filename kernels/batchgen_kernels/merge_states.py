"""Merging two attentions of the same queries over disjoint sets of keys.

With lse = ln Z and Z = sum_j exp(s_j):   out = (Z_a out_a + Z_b out_b) / (Z_a + Z_b);   lse = ln (Z_a + Z_b)

out_a, out_b: [T, num_heads, head_dim]; lse_a, lse_b: [T, num_heads] float32, natural logarithm. -> (out of out_a's dtype,
lse float32). The greater lse is taken out of both, so nothing overflows; -inf is an empty set of keys, whose out may be
anything finite. Both empty: out 0, lse -inf.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton


def merge_states_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    weight_a, weight_b = (lse_a.double() - base).exp(), (lse_b.double() - base).exp()
    out = weight_a[..., None] * out_a.double() + weight_b[..., None] * out_b.double()
    return out.to(out_a.dtype), lse.float()


def merge_states_torch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_b = (lse_b - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
    weight_a = (lse_a - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
    out = out_a.float() * weight_a[..., None]
    out.addcmul_(out_b.float(), weight_b[..., None])
    return out.to(out_a.dtype), lse


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    row_ok = row < num_rows
    lse_a = tl.load(lse_a_ptr + row, mask=row_ok, other=0.0)
    lse_b = tl.load(lse_b_ptr + row, mask=row_ok, other=0.0)
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(lse_a - base)
    weight_b = tl.exp(lse_b - base)
    total = weight_a + weight_b
    safe = tl.where(total == 0.0, 1.0, total)
    cell = row[:, None] * HEAD_DIM + dim[None, :]
    cell_ok = row_ok[:, None] & (dim < HEAD_DIM)[None, :]
    out_a = tl.load(out_a_ptr + cell, mask=cell_ok, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + cell, mask=cell_ok, other=0.0).to(tl.float32)
    out = (out_a * weight_a[:, None] + out_b * weight_b[:, None]) / safe[:, None]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=cell_ok)
    tl.store(lse_ptr + row, top + tl.log(safe), mask=row_ok)


def merge_states_triton(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs must be contiguous; out_a and out_b may differ in dtype (float32 partials)."""
    if out_a.shape != out_b.shape or lse_a.shape != out_a.shape[:-1] or lse_b.shape != lse_a.shape:
        raise ValueError(
            f"merge_states: shapes must be out [T, H, D] twice and lse [T, H] twice, got {tuple(out_a.shape)}, "
            f"{tuple(lse_a.shape)}, {tuple(out_b.shape)}, {tuple(lse_b.shape)}"
        )
    if lse_a.dtype != torch.float32 or lse_b.dtype != torch.float32:
        raise ValueError(f"merge_states: lse must be float32, got {lse_a.dtype} and {lse_b.dtype}")
    if not all(t.is_contiguous() for t in (out_a, lse_a, out_b, lse_b)):
        raise ValueError("merge_states: inputs must be contiguous")
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty_like(lse_a)
    num_rows, head_dim = lse_a.numel(), out_a.shape[-1]
    if num_rows == 0:
        return out, lse
    padded_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, 2048 // padded_dim)
    merge_states_kernel[(-(-num_rows // block_rows),)](
        out_a, lse_a, out_b, lse_b, out, lse, num_rows,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_ROWS=block_rows, num_warps=4,
    )  # fmt: skip
    return out, lse
