"""Every op, every implementation, every dtype against the reference, on the cases that benches share."""

import pytest
import torch
from batchgen_kernels import kv_cache, merge_states, rms_norm, rotary
from batchgen_kernels._triton import interpreting
from batchgen_kernels.cases import CASES
from batchgen_kernels.cases.cache import write_kv_case
from batchgen_kernels.cases.case import TOLERANCE, relative_error, tolerance
from batchgen_kernels.registry import OPS, load

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"


def test_every_op_has_cases():
    assert CASES.keys() == OPS.keys()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_agrees_with_reference(op, implementation, dtype):
    for case in CASES[op](dtype, DEVICE):
        expected = case.run(load(op, "reference"))
        for out, want in zip(case.run(load(op, implementation)), expected, strict=True):
            assert out.dtype == want.dtype and out.shape == want.shape, case.label
            assert relative_error(out, want) <= tolerance(op, implementation, dtype), case.label


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_write_kv_skips_slot_minus_one(implementation):
    case = write_kv_case([0, -1, 17, -1, 79], 5, 16, 2, 64, torch.bfloat16, DEVICE)
    args = case.make()
    cache, _ = case.call(load("write_kv", implementation), args)
    assert torch.equal(cache.flatten(0, 1)[[0, 17, 79]], args[0][[0, 2, 4]])
    assert int(cache.isfinite().sum()) == 3 * 2 * 64


def test_rotary_leaves_the_rest_of_a_head_as_it_is():
    case = next(c for c in CASES["rotary_embedding"](torch.bfloat16, DEVICE) if "32 rotate" in c.label)
    args = case.make()
    before = args[-1].clone()
    after, *_ = case.call(load("rotary_embedding", "triton"), args)
    assert torch.equal(after[..., 32:], before[..., 32:]) and torch.equal(after[:, 8:], before[:, 8:])
    assert not torch.equal(after[:, :8, :32], before[:, :8, :32])


def test_empty_inputs_launch_nothing():
    empty = torch.empty(0, 64)
    assert rms_norm.rms_norm_triton(empty, torch.ones(64), 1e-5).shape == (0, 64)
    kv_cache.write_kv_triton(*torch.empty(2, 0, 2, 8), *torch.zeros(2, 3, 4, 2, 8), torch.empty(0, dtype=torch.int64))
    heads, lse = torch.empty(0, 2, 8), torch.empty(0, 2)
    out, lse = merge_states.merge_states_triton(heads, lse, heads, lse)
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


X, W = torch.ones(3, 8), torch.ones(8)
HEADS, TABLE, AT = torch.ones(3, 2, 8), torch.ones(9, 4), torch.zeros(3, dtype=torch.int64)
CACHE = torch.zeros(2, 4, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm.rms_norm_triton(X, W[:4], 1e-5), r"rms_norm: weight must be contiguous \[8\], got \(4,\)"),
        (lambda: rms_norm.rms_norm_triton(X.T, W[:3], 1e-5), "rms_norm: x must be dense in its last dimension"),
        (lambda: rms_norm.add_rms_norm_triton(X, X[:2], W, 1e-5), "add_rms_norm: residual must be like x"),
        (lambda: rms_norm.add_rms_norm_triton(X, X.half(), W, 1e-5), "add_rms_norm: residual must be like x"),
        (lambda: rotary.rotary_embedding_triton(HEADS, HEADS[:2], TABLE, TABLE, AT), "must agree"),
        (lambda: rotary.rotary_embedding_triton(HEADS, HEADS, W[None], W[None], AT), "cos rotates 16 elements"),
        (lambda: load("silu_and_mul", "triton")(X[:, :7]), "silu_and_mul: x must be"),
        (lambda: kv_cache.write_kv_triton(HEADS, HEADS, CACHE, CACHE, AT[:2]), "write_kv: key and value"),
        (lambda: kv_cache.write_kv_triton(HEADS, HEADS, CACHE[..., :4], CACHE, AT), "write_kv: caches must be"),
        (lambda: kv_cache.write_kv_triton(HEADS.half(), HEADS, CACHE, CACHE, AT), "must share one dtype"),
        (lambda: kv_cache.copy_blocks_triton(CACHE, AT, AT), "copy_blocks: kv_cache must be"),
        (lambda: kv_cache.copy_blocks_triton(torch.zeros(1, 2, 3, 4, 2, 8), AT, AT[:2]), r"must be \[n\] alike"),
        (lambda: merge_states.merge_states_triton(HEADS, X, HEADS, X), "merge_states: shapes must be"),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
