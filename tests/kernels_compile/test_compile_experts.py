"""Products of a mixture of experts in every launch that the launcher can choose, for GPUs that are not here."""

import cross_compile
import pytest
import torch
from batchgen_kernels import grouped_linear, linear_launch
from batchgen_kernels.cases.experts import combine_experts_case, expert_choices
from gates import BF16, FP32, LARGE_MMA, TARGETS, assert_copies_in_flight, assert_one_variant, assert_sound

ROWS = [(architecture, {2: BF16, 4: FP32}[size], pairs) for architecture, size, pairs in linear_launch.LINEAR]


def launch_grouped(dtype, num_tokens, num_experts=4):
    x = torch.empty(num_tokens, 8192, dtype=dtype)
    weight = torch.empty(num_experts, 1024, 8192, dtype=dtype)
    experts = expert_choices(num_tokens, 2, range(num_experts))
    return grouped_linear.grouped_linear_triton(x, weight, experts, torch.ones(num_tokens, 2))


@pytest.mark.parametrize(("architecture", "dtype", "pairs"), ROWS)
def test_grouped_linear(architecture, dtype, pairs, table):
    num_tokens = (pairs - 1) * 4 // 2  # pairs of each of four experts
    with cross_compile.target(*TARGETS[architecture]), cross_compile.capture(grouped_linear, "grouped_linear_kernel") as c:
        chosen = grouped_linear.grouped_launch(dtype, 2 * num_tokens, 4)
        launch_grouped(dtype, num_tokens)
        (r,) = map(cross_compile.report, c)
    table("grouped_linear_kernel", f"{architecture} {str(dtype)[6:]} {tuple(chosen)}", r)
    assert chosen == linear_launch.LINEAR[architecture, dtype.itemsize, pairs]
    assert_sound(r)
    if dtype == BF16:
        assert LARGE_MMA[architecture] in r["mma"], r
    if architecture != "gfx942":
        assert_copies_in_flight(r, chosen)


@pytest.mark.parametrize("architecture", TARGETS)
def test_combine_experts(architecture, table):
    with cross_compile.target(*TARGETS[architecture]), cross_compile.capture(grouped_linear, "combine_experts_kernel") as c:
        combine_experts_case(3, 8, 4096, BF16).run(grouped_linear.combine_experts_triton)
        (r,) = map(cross_compile.report, c)
    table("combine_experts_kernel", f"{architecture} bfloat16", r)
    assert_sound(r)


def test_one_variant_a_class_of_pairs():
    with (
        cross_compile.target("cuda", 90),
        cross_compile.count_variants() as variants,
        cross_compile.capture(grouped_linear, "grouped_linear_kernel"),
    ):
        for num_tokens in [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 300]:
            launch_grouped(BF16, num_tokens)
    assert_one_variant(variants, grouped_linear_kernel=3)
