"""Planted bugs in the linear layers; see mutants.py."""

import pytest
import torch
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.cases.linear import linear_case
from batchgen_kernels.linear_launch import LinearLaunch
from batchgen_kernels.registry import load
from mutants import Bug, assert_caught, assert_op_bug_is_caught

BF16 = torch.bfloat16

OPS = [
    ("inputs past the end of x", "int8", "mask=(k < NUM_IN)[:, None]", "mask=(k >= 0)[:, None]"),
    ("inputs past the end of the weight", "invariant", "mask=(k < NUM_IN)[None, :]", "mask=(k >= 0)[None, :]"),
    ("tokens past the end", "int8", "tl.minimum(token, num_tokens - 1)", "token"),
    ("channels past the end are stored", "int8", "(channel < NUM_OUT)[:, None] &", "(channel >= 0)[:, None] &"),
    ("scale forgotten", "fp8", "if scale_ptr is not None:\n        acc *=", "if False:\n        acc *="),
    ("scale for bias", "int8", "acc += tl.load(bias_ptr + channel", "acc += tl.load(scale_ptr + channel"),
    ("bytes taken for integers", "fp8", 'if KIND == "fp8":', 'if KIND == "none":'),
    ("halves of a group swapped", "int4", "(codes & 15)", "(codes >> 4)"),
    ("zero of the first group", "int4", "zero_ptr + group_row + block", "zero_ptr + group_row"),
    ("scale of the first group", "int4", "scale_ptr + group_row + block", "scale_ptr + group_row"),
    ("first half of x twice", "int4", "tl.load(x_tile + HALF)", "tl.load(x_tile)"),
    ("groups do not add up", "int4", "acc += part * scale[:, None]", "acc = part * scale[:, None]"),
]


@pytest.mark.parametrize(("name", "op", "old", "new"), OPS)
def test_bug_is_caught(mutate, name, op, old, new):
    assert_op_bug_is_caught(mutate, Bug(name, "linear", f"linear_{op}", old, new))


SPLITS = [
    ("parts overlap", "tl.minimum(first + PART, BLOCKS)", "BLOCKS"),
    ("parts write one place", "split.to(tl.int64) * num_tokens * NUM_OUT", "0"),
    ("last part lost", "for split in range(SPLITS):", "for split in range(SPLITS - 1):"),
    ("bias in every part", "part_ptr, None, None, channel", "part_ptr, None, bias_ptr, channel"),
    ("scale in every part", "part_ptr, None, None, channel", "part_ptr, scale_ptr, None, channel"),
]


@pytest.mark.parametrize(("name", "old", "new"), SPLITS)
def test_bug_of_split_inputs_is_caught(mutate, name, old, new):
    mutant = mutate("linear", old, new)
    case = linear_case("linear_int8", 3, 320, 40, BF16, bias=True)
    x, weight, scale, bias = case.make()

    def run():
        launch = LinearLaunch(32, 16, 64, 4, 1)
        out = mutant._launch("linear_int8", "int8", x, weight, scale, None, bias, launch, num_splits=3)
        return relative_error(out, case.run(load("linear_int8", "reference"))[0]) / tolerance("linear_int8", "triton", BF16)

    assert_caught(run)


def test_an_order_of_sums_that_depends_on_the_batch_is_caught(mutate):
    """What linear_invariant is for: a kernel that splits the inputs when tokens are few gives other last bits."""
    linear = mutate("linear", 'rows = None if op == "linear_invariant" else num_tokens', "rows = num_tokens")
    linear.choose_splits = lambda *args: 4
    x, weight, _ = linear_case("linear_invariant", 40, 300, 40, torch.float32).make()
    assert not torch.equal(linear.linear_invariant_triton(x[:9], weight), linear.linear_invariant_triton(x, weight)[:9])
