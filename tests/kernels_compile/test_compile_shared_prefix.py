"""Shared-prefix attention and its merge, in every launch that the plan can choose, for GPUs that are not here."""

import itertools

import cross_compile
import pytest
import torch
from batchgen_kernels import launch, shared_prefix
from batchgen_kernels.cases.attention import with_options
from batchgen_kernels.cases.shared_prefix import shared_inputs
from gates import BF16, ELSEWHERE, FP16, FP32, LARGE_MMA, TARGETS, assert_copies_in_flight, assert_sound


def compile_shared(target, dtype, head_dim, short=False, block_size=16, heads=(8, 2), **options):
    """(launch, report of shared_prefix_kernel, report of merge_shared_kernel)."""
    inputs, given = with_options(shared_inputs(2, *heads, head_dim, block_size, dtype), **options)
    metadata, query, key_cache, value_cache, scale = inputs
    positions = torch.zeros(len(query), dtype=torch.int32)
    with (
        cross_compile.target(*target),
        cross_compile.capture(shared_prefix, "shared_prefix_kernel", "merge_shared_kernel") as compiled,
    ):
        launched = launch.shared_launch(launch.current_architecture(), head_dim, dtype, short, options.get("fp8", False))
        plan = shared_prefix.plan_shared(metadata, len(query), *heads, head_dim, dtype, launch=launched)
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


@pytest.mark.parametrize("row", [*launch.SHARED, *launch.SHARED_SHORT], ids=str)
def test_rows_of_their_own_are_for_targets_of_prefill(row):
    assert row in launch.PREFILL


@pytest.mark.parametrize("short", [False, True], ids=["large", "short"])
@pytest.mark.parametrize(("head_dim", "heads", "block_size"), [(80, (4, 4), 64), (96, (14, 2), 16), (128, (71, 1), 64)])
def test_odd_heads_on_hopper(head_dim, heads, block_size, short, table):
    """Head dims that are no power of two, groups that no tile holds, and blocks as large as a tile of keys."""
    launched, r, merge = compile_shared(TARGETS["sm_90"], FP16, head_dim, short, block_size, heads)
    table("shared_prefix_kernel", f"sm_90 float16 {head_dim}, {heads[0]}/{heads[1]} heads {launched.block_m}", r)
    assert_sound(r)
    assert_sound(merge)
    assert_copies_in_flight(r, launched)
    assert "HGMMA" in r["mma"], r


OPTIONS = [{"window": 100}, {"soft_cap": 30.0, "sinks": True}, {"fp8": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_options(architecture, options, table):
    for head_dim in (64, 128):
        _, r, _ = compile_shared(TARGETS[architecture], BF16, head_dim, block_size=64, **options)
        table("shared_prefix_kernel", f"{architecture} bfloat16 {head_dim} {' '.join(options)}", r)
        assert_sound(r)
        assert LARGE_MMA[architecture] in r["mma"], r


def test_an_architecture_without_rows(table):
    _, r, _ = compile_shared(ELSEWHERE, BF16, 128)
    table("shared_prefix_kernel", "sm_86 bfloat16 128", r)
    assert_sound(r)
    assert "HMMA" in r["mma"]


def test_one_variant_serves_every_tree():
    """Numbers of groups, tokens, blocks and programs, and wherever the parts of the index begin."""
    with (
        cross_compile.target("cuda", 90),
        cross_compile.count_variants() as variants,
        cross_compile.capture(shared_prefix, "shared_prefix_kernel", "merge_shared_kernel"),
    ):
        launched = launch.shared_launch("sm_90", 64, BF16)
        for seed, num_programs in itertools.product(range(12), (1, 16, 132, 264)):
            metadata, query, key_cache, value_cache, scale = shared_inputs(1 + seed % 4, 8, 2, 64, 16, BF16, seed=seed)
            plan = shared_prefix.plan_shared(
                metadata, len(query), 8, 2, 64, BF16, launch=launched, num_programs=num_programs
            )
            parts = shared_prefix.attend_shared(query, key_cache, value_cache, scale, plan)
            private = torch.empty(query.shape), torch.empty(query.shape[:2])
            shared_prefix.merge_shared(*parts, *private, plan, 2, torch.empty(query.shape, dtype=BF16))
    assert {name: len(keys) for name, keys in variants.items()} == {"shared_prefix_kernel": 1, "merge_shared_kernel": 1}
