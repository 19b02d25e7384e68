"""Shared-prefix attention and its merge, in every launch that the plan can choose, for GPUs that are not here."""


import cross_compile
import pytest
import torch
from batchgen_kernels import launch, shared_prefix
from batchgen_kernels.cases.attention import with_options
from batchgen_kernels.cases.shared_prefix import shared_inputs
from gates import BF16, FP32, LARGE_MMA, TARGETS, assert_copies_in_flight, assert_sound


def compile_shared(target, dtype, head_dim, short=False, block_size=16, heads=(8, 2), **options):
    """(launch, report of shared_prefix_kernel, report of merge_shared_kernel)."""
    inputs, given = with_options(shared_inputs(2, *heads, head_dim, block_size, dtype), **options)
    metadata, query, key_cache, value_cache, scale = inputs
    positions = torch.zeros(len(query), dtype=torch.int32)
    with (
        cross_compile.target(*target),
        cross_compile.capture(shared_prefix, "shared_prefix_kernel", "merge_shared_kernel") as compiled,
    ):
        launched = launch.shared_launch(launch.current_architecture(), head_dim, dtype, short)
        plan = shared_prefix.plan_shared(metadata, len(query), *heads, head_dim, dtype, launched)
        parts = shared_prefix.attend_shared(query, key_cache, value_cache, scale, plan, positions, options=given)
        private = torch.empty(query.shape), torch.empty(query.shape[:2])
        shared_prefix.merge_shared(*parts, *private, plan, heads[1], torch.empty(query.shape, dtype=dtype), given.sinks)
        return launched, *map(cross_compile.report, compiled)


ROWS = [(architecture, head_dim, {2: BF16, 4: FP32}[size]) for architecture, head_dim, size in launch.PREFILL]


@pytest.mark.parametrize("short", [False, True], ids=["large", "short"])
@pytest.mark.parametrize(("architecture", "head_dim", "dtype"), ROWS)
def test_shared_prefix(architecture, head_dim, dtype, short, table):
    both = [launch.shared_launch(architecture, head_dim, dtype, s) for s in (False, True)]
    if short and both[0] == both[1]:
        return
    launched, r, merge = compile_shared(TARGETS[architecture], dtype, head_dim, short)
    table("shared_prefix_kernel", f"{architecture} {str(dtype)[6:]} {head_dim} {tuple(launched)}", r)
    table("merge_shared_kernel", f"{architecture} {str(dtype)[6:]} {head_dim}", merge)
    assert_sound(r)
    assert_sound(merge)
    if dtype == BF16:
        assert LARGE_MMA[architecture] in r["mma"], r
        assert launched.block_m in (64, 128)
    if architecture != "gfx942":
        assert_copies_in_flight(r, launched)
