"""The repairs of the interpreter, and the guard, each shown to do what it says."""

import os
from fractions import Fraction

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("about Triton's interpreter", allow_module_level=True)

import interpreter_guard
from batchgen_kernels import sampling
from batchgen_kernels._triton import tl, triton


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.where(x < y, x * y, x + y))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision=PRECISION))


@triton.jit
def reduce_kernel(x_ptr, out_ptr, bound_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.sum(tl.load(x_ptr + i), 0)
    for _ in range(tl.load(bound_ptr)):  # a bound that is loaded
        total += 1.0
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, tl.max(tl.load(x_ptr + i), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(dtype):
    x = torch.randn(4096)
    out = torch.zeros(4096, dtype=dtype)
    cast_kernel[(1,)](x, out, N=4096)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_bfloat16_arithmetic_is_on_values():
    x, y = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    out = torch.zeros_like(x)
    arithmetic_kernel[(1,)](x, y, out, N=256)
    assert torch.equal(out, torch.where(x < y, x * y, x + y))


def test_bfloat16_reduction_and_loaded_loop_bound():
    x = torch.arange(16).bfloat16()
    out = torch.zeros(2, dtype=torch.bfloat16)
    reduce_kernel[(1,)](x, out, torch.tensor([3], dtype=torch.int32), N=16)
    assert out.tolist() == [123, 15]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_dot_of_16_bit_types_accumulates_in_float32(dtype, limit):
    a, b, out = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype), torch.zeros(32, 32)
    dot_kernel[(1,)](a, b, out, N=32, PRECISION="tf32")
    want = a.double() @ b.double()
    assert float((out - want).norm() / want.norm()) < limit


def test_float32_dot_shows_tf32_unless_told_ieee():
    a, b, out = torch.randn(32, 32), torch.randn(32, 32), torch.zeros(32, 32)
    want = a.double() @ b.double()
    dot_kernel[(1,)](a, b, out, N=32, PRECISION="ieee")
    assert float((out - want).norm() / want.norm()) < 1e-6
    dot_kernel[(1,)](a, b, out, N=32, PRECISION="tf32")
    assert 1e-5 < float((out - want).norm() / want.norm()) < 1e-3


@triton.jit
def shift_kernel(x_ptr, out_ptr, read, write, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i + write, tl.load(x_ptr + i + read))


def test_guard_finds_reads_and_writes_out_of_bounds():
    x, out = torch.zeros(64), torch.zeros(64)
    shift_kernel[(4,)](x, out, 0, 0, N=16)
    with pytest.raises(interpreter_guard.KernelFault, match="load outside the tensors"):
        shift_kernel[(4,)](x, out, 1, 0, N=16)
    with pytest.raises(interpreter_guard.KernelFault, match="store outside the tensors"):
        shift_kernel[(4,)](x, out, 0, -1, N=16)


def test_guard_finds_races():
    x = torch.zeros(80)
    with pytest.raises(interpreter_guard.KernelFault, match="race"):
        shift_kernel[(4,)](x, x, 0, 8, N=16)


@triton.jit
def masked_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guard_poisons_lanes_without_other(dtype):
    x, out = torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    masked_kernel[(1,)](x, out, N=8)
    assert out.isnan().tolist() == [False] * 3 + [True] * 5


@triton.jit
def order_kernel(order_ptr, counter_ptr):
    tl.store(order_ptr + tl.atomic_add(counter_ptr, 1), tl.program_id(0))


def test_guard_shuffles_programs():
    order, counter = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    order_kernel[(64,)](order, counter)
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()


def test_fma_rounds_once():
    """Against fractions, also where the sum in float64 falls halfway between two float32; and torch's of the sampler."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randn(3, 512, generator=generator)
    ulp = 2.0**-23
    x[:4] = torch.tensor([1 + ulp, 1 + ulp, 1 - ulp / 2, 3.0])
    y[:4] = torch.tensor([1 + ulp, 1 - ulp, 1 - ulp / 2, 1 + ulp])
    z[:4] = torch.tensor([2.0**30, -1.0, 2.0**-50, 2.0**-60])
    x[4:132], y[4:132] = 1 + ulp * torch.randint(0, 8, (2, 128), generator=generator)  # x y has few digits past float32
    z[4:132] = (ulp / 2 + 2.0**-60) * torch.tensor([1.0, -1.0]).repeat(64)
    out = torch.empty(512)
    fma_kernel[(1,)](x, y, z, out, N=512)
    assert torch.equal(out, sampling.fma(x, y, z))
    for a, b, c, got in zip(x.tolist(), y.tolist(), z.tolist(), out.tolist()):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        near = np.nextafter(np.float32(got), np.float32([-np.inf, np.inf])).tolist()
        assert all(abs(Fraction(got) - exact) <= abs(Fraction(other) - exact) for other in near)
    inf = float("inf")
    x[:3], y[:3], z[:3] = torch.tensor([inf, 1.0, -inf]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, -inf, inf])
    fma_kernel[(1,)](x, y, z, out, N=512)
    assert out[:2].tolist() == [inf, -inf] and out[2].isnan()
