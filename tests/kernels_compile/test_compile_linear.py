"""Linear layers in every launch that the launcher can choose, for GPUs that are not here."""

import cross_compile
import pytest
import torch
from batchgen_kernels import linear, linear_launch
from batchgen_kernels.cases.linear import linear_case
from gates import BF16, FP32, LARGE_MMA, TARGETS, assert_copies_in_flight, assert_one_variant, assert_sound

ROWS = [(architecture, {2: BF16, 4: FP32}[size], tokens) for architecture, size, tokens in linear_launch.LINEAR]
KINDS = {"linear_invariant": "plain", "linear_int8": "int8", "linear_fp8": "fp8", "linear_int4": "int4"}


def compile_linear(op, target, dtype, num_tokens, splits=1, num_in=4096, group_size=128):
    """(launch, reports by kernel name)."""
    args = linear_case(op, 1, num_in, 1024, dtype, bias=True, group_size=group_size).make()
    x = torch.empty(num_tokens, num_in, dtype=dtype)
    scale, zero, bias = {2: (None, None), 3: (args[2], None), 4: args[2:4]}[len(args) - 1] + (args[-1],)
    kernels = ["linear_kernel", "sum_splits_kernel"]
    with cross_compile.target(*target), cross_compile.capture(linear, *kernels) as compiled:
        chosen = linear_launch.linear_launch(linear.current_architecture(), dtype, KINDS[op], num_tokens)
        linear._launch(op, KINDS[op], x, args[1], scale, zero, bias, chosen, num_splits=splits)
        return chosen, {kernel.metadata.name: cross_compile.report(kernel) for kernel in compiled}


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize(("architecture", "dtype", "tokens"), ROWS)
def test_linear(architecture, dtype, tokens, op, table):
    if dtype == FP32 and op != "linear_invariant" and tokens != 64:
        pytest.skip("float32 activations with quantised weights: one class is enough")
    chosen, reports = compile_linear(op, TARGETS[architecture], dtype, tokens)
    (r,) = reports.values()
    table(op, f"{architecture} {str(dtype)[6:]} {tokens} tokens {tuple(chosen)}", r)
    assert_sound(r)
    if dtype == BF16:
        assert LARGE_MMA[architecture] in r["mma"], r
    if architecture != "gfx942":
        assert_copies_in_flight(r, chosen)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize(("architecture", "tokens"), [(a, t) for a, dtype, t in ROWS if dtype == BF16])
def test_small_groups(architecture, tokens, group_size, table):
    """A tile of half a group is 1 or 2 KB, so a thread's part of it may be 64 bits."""
    chosen, reports = compile_linear("linear_int4", TARGETS[architecture], BF16, tokens, group_size=group_size)
    (r,) = reports.values()
    table("linear_int4", f"{architecture} bfloat16 {tokens} tokens, groups of {group_size}", r)
    assert_sound(r, wide=False)
    assert LARGE_MMA[architecture] in r["mma"], r
    if architecture != "gfx942":
        assert_copies_in_flight(r, chosen)


@pytest.mark.parametrize("architecture", TARGETS)
def test_split_inputs(architecture, table):
    _, reports = compile_linear("linear_int8", TARGETS[architecture], BF16, 16, splits=4)
    for name, r in reports.items():
        table(name, f"{architecture} bfloat16 parts", r)
        assert_sound(r)


def test_one_variant_a_class_of_tokens():
    _, weight, scale, _ = linear_case("linear_int8", 1, 2048, 4096, BF16).make()
    kernels = ["linear_kernel", "sum_splits_kernel"]
    with (
        cross_compile.target("cuda", 90),
        cross_compile.count_variants() as variants,
        cross_compile.capture(linear, *kernels),
    ):
        for num_tokens in [*range(1, 40), 63, 64, 65, 100, 127, 128, 129, 4096]:
            x = torch.empty(num_tokens + 1, 2048, dtype=BF16)[num_tokens % 2 :][:num_tokens]
            linear.linear_int8_triton(x, weight, scale)
            linear.linear_invariant_triton(x, torch.empty(4096, 2048, dtype=BF16))
    # three classes, and the invariant one, whose weight is another type
    assert_one_variant(variants, linear_kernel=4)
