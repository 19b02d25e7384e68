"""Planted bugs in what writes the key/value cache and in the other ops on one token; see mutants.py."""

import math

import pytest
import test_cache
import torch
from batchgen_kernels.cases.cache import rope_and_write_kv_case, write_kv_cases
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.registry import load
from mutants import Bug, assert_caught, assert_op_bug_is_caught

BF16 = torch.bfloat16

FUSED = [
    ("sign of the rotation", "x1 * c - x2 * s", "x1 * c + x2 * s"),
    ("not rounded before the weight", "w1 * _rounded(x1 * scale, DTYPE)", "w1 * (x1 * scale)"),
    ("not rounded before the rotation", "_rounded(w2 * _rounded(x2 * scale, DTYPE), DTYPE)", "w2 * x2 * scale"),
    ("statistics without the rest", "tl.sum(x1 * x1 + x2 * x2, 1) + tl.sum(rest * rest, 1)", "tl.sum(x1 * x1 + x2 * x2, 1)"),
    ("statistics over the rotated part", "squares / HEAD_DIM", "squares / (2 * HALF)"),
    ("norm of the query for keys", "row, head_ok[:, None], k_norm_ptr", "row, head_ok[:, None], q_norm_ptr"),
    ("rest of the query stays", "if q_norm_ptr is not None:\n            tl.store", "if False:\n            tl.store"),
    ("rest of the key is left out", "head_ok[:, None] & (rest_column < HEAD_DIM)", "head_ok[:, None] & (rest_column < 0)"),
    ("second tile of heads", "(tile - NUM_Q_TILES) * BLOCK_HEADS + lane", "tile * BLOCK_HEADS + lane"),
    ("position of another token", "tl.load(positions_ptr + token)", "tl.load(positions_ptr)"),
    ("slot -1 is written", "if slot < 0:", "if slot < -1:"),
    ("scale of one half", "tl.maximum(tl.maximum(row_maximum(x1), row_maximum(x2)), row_maximum(rest))", "row_maximum(x1)"),
    ("value at the strides of the key", "token * stride_v_token", "token * stride_k_head"),
    ("scale in another block", "block * stride_scale_block", "block * stride_scale_slot"),
]  # fmt: skip

HELPERS = [
    ("rotary", "pairs the wrong way round", "tl.join(x1, x2)", "tl.join(x2, x1)"),
    ("rotary", "halves that overlap", "tl.store(row + HALF + pair", "tl.store(row + HALF - 1 + pair"),
    ("rotary", "pairs past the end", "row_ok & (column < 2 * HALF))", "row_ok & (column < 2 * PADDED_HALF))"),
    ("float8", "truncated", "clamped + 0x7FFFF + ((clamped >> 20) & 1)", "clamped"),
    ("float8", "sign dropped", "(bits >> 24) & 0x80", "0"),
    ("float8", "scale and inverse swapped", "tl.div_rn(448.0, divisor)", "tl.div_rn(divisor, 448.0)"),
    ("kv_cache", "scale of a head for all", "tl.store(scale_ptr + scale_row", "tl.store(scale_ptr + 0 * scale_row"),
]

ENCODER = [
    ("ties away from zero", "((clamped >> 20) & 1)", "1"),
    ("subnormals as normals", "clamped < 0x3C800000", "clamped < 0"),
    ("normals as subnormals", "clamped < 0x3C800000", "clamped < 0x3D800000"),
    ("NaN saturates", "magnitude > 0x7F800000", "magnitude < 0"),
]

OTHERS = [
    Bug("NaN passed over", "float8", "write_kv", 'tl.where(x == x, tl.abs(x), float("inf"))', "tl.abs(x)"),
    Bug("zeros divide by zero", "float8", "write_kv", "tl.where(tiny, 448.0, largest)", "largest"),
    Bug("saturation", "float8", "write_kv", "tl.minimum(magnitude, 0x43E00000)", "tl.minimum(magnitude, 0x43D00000)"),
    Bug("offset of the scale", "kv_cache", "write_kv", "offset * stride_scale_slot", "offset"),
    Bug("gelu and its approximation swapped", "activation", "gelu_and_mul", '"gelu" if', '"gelu_tanh" if'),
    Bug("erf of twice the variance", "activation", "gelu_and_mul", "tl.erf(gate * 0.7071067811865476)", "tl.erf(gate)"),
    Bug("no cube in the approximation", "activation", "gelu_and_mul", "gate * gate * gate)", "gate)"),
]


def mutant_of(mutate, module, old, new, op):
    entry = {"rope_and_write_kv": "rope_write", "write_kv": "kv_cache"}[op]
    return getattr(mutate(module, old, new, None if entry == module else entry), f"{op}_triton")


def worst_error(op, mutant, dtype, cases):
    """In units of the tolerance."""
    allowed = max(tolerance(op, "triton", dtype), 1e-9)
    return max(
        relative_error(out, want) / allowed
        for case in cases
        for out, want in zip(case.run(mutant), case.run(load(op, "reference")))
    )


def few_cases(dtype):
    """The smallest that hold everything: norm, a rest, both layouts, float8, slot -1, more heads than a tile."""
    case = rope_and_write_kv_case
    yield case([9, -1, 6], 5, 4, 17, 2, 256, 96, dtype, norm=True)
    yield case([9, -1, 6], 5, 4, 3, 2, 24, 20, dtype, norm=True, interleaved=True)
    yield case([9, -1, 6], 5, 4, 3, 2, 40, 16, dtype, float8=True)


@pytest.mark.parametrize(("name", "old", "new"), FUSED, ids=[name for name, *_ in FUSED])
def test_fused_bug_is_caught(mutate, name, old, new):
    mutant = mutant_of(mutate, "rope_write", old, new, "rope_and_write_kv")
    assert_caught(lambda: worst_error("rope_and_write_kv", mutant, BF16, few_cases(BF16)))


@pytest.mark.parametrize(("module", "name", "old", "new"), HELPERS, ids=[name for _, name, *_ in HELPERS])
def test_helper_bug_is_caught(mutate, module, name, old, new):
    mutant = mutant_of(mutate, module, old, new, "rope_and_write_kv")
    assert_caught(lambda: worst_error("rope_and_write_kv", mutant, BF16, few_cases(BF16)))


@pytest.mark.parametrize(("name", "old", "new"), ENCODER, ids=[name for name, *_ in ENCODER])
def test_encoder_bug_is_caught(mutate, monkeypatch, name, old, new):
    monkeypatch.setattr(test_cache, "float8", mutate("float8", old, new))
    with pytest.raises(AssertionError):
        test_cache.test_encoder_equals_torch()


@pytest.mark.parametrize("bug", OTHERS, ids=lambda bug: f"{bug.name} ({bug.run})")
def test_op_bug_is_caught(mutate, bug):
    if bug.module == "activation":
        assert_op_bug_is_caught(mutate, bug)
        return
    mutant = mutant_of(mutate, bug.module, bug.old, bug.new, bug.run)
    assert_caught(lambda: worst_error(bug.run, mutant, BF16, write_kv_cases(BF16, "cpu")))


@pytest.mark.parametrize(
    ("old", "new", "strides"),
    [
        ("tl.load(slot_ptr + token).to(tl.int64)", "tl.load(slot_ptr + token).to(tl.int32)", (2**31 // 3 + 5, 32, 8, 1)),
        ("BLOCK_HEADS + lane).to(tl.int64)", "BLOCK_HEADS + lane)", (32, 8, 2**31 // 3 + 5, 1)),
    ],
    ids=["of blocks", "of heads"],
)  # fmt: skip
def test_32_bit_offset_is_caught(mutate, old, new, strides):
    torch.utils.deterministic.fill_uninitialized_memory = False
    mutant = mutate("rope_write", old, new).rope_and_write_kv_triton
    cache = torch.empty(1 + 4 * strides[0] + 3 * sum(strides[1:3]) + 7, dtype=BF16).as_strided((5, 4, 4, 8), strides)
    heads, table, at = torch.ones(1, 4, 8, dtype=BF16), torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)

    def run():
        mutant(heads, heads, heads, cache, cache, torch.tensor([19]), table, 0 * table, at)
        return 0 if torch.equal(cache[-1, -1], heads[0]) else math.inf

    assert_caught(run)


def test_the_mutants_begin_from_sound_code():
    for dtype in (BF16, torch.float32):
        op = "rope_and_write_kv"
        assert worst_error(op, load(op, "triton"), dtype, few_cases(dtype)) <= 1
