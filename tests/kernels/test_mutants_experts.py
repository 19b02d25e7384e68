"""Planted bugs in the products of a mixture of experts; see mutants.py."""

import pytest
from mutants import Bug, assert_op_bug_is_caught

STORE = "acc.to(out_ptr.dtype.element_ty), mask=there)"
BUGS = [
    ("place without a pair is stored", "grouped_linear", "(pair >= 0)[None, :]", "(pair >= -1)[None, :]"),
    ("row of another token", "grouped_linear", "tl.maximum(pair, 0) // CHOICES", "tl.maximum(pair, 0)"),
    ("empty tiles are not left out", "grouped_linear", "if expert < 0:", "if expert < -1:"),
    ("tiles past the end", "grouped_linear", "torch.where(tile < tile_end[-1], tile_experts, -1)", "tile_experts"),
    ("weights of the first expert", "grouped_linear", "expert.to(tl.int64) * stride_expert", "0 * stride_expert"),
    ("scale of another pair", "grouped_linear", "pair_scale_ptr + pair", "pair_scale_ptr + pair // CHOICES"),
    ("inputs past the end", "grouped_linear", "mask=(k < NUM_IN)[:, None]", "mask=(k >= 0)[:, None]"),
    ("a tile too few", "grouped_linear", "(counts[:-1] + block_t - 1) // block_t", "(counts[:-1] + block_t - 2) // block_t"),
    ("last choice left out", "combine_experts", "tl.static_range(CHOICES)", "tl.static_range(CHOICES - 1)"),
    ("channels past the end", "combine_experts", STORE, "acc.to(out_ptr.dtype.element_ty))"),
]


@pytest.mark.parametrize(("name", "op", "old", "new"), BUGS, ids=lambda value: value if " " in value else "")
def test_bug_is_caught(mutate, name, op, old, new):
    assert_op_bug_is_caught(mutate, Bug(name, "grouped_linear", op, old, new))
