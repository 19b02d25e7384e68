"""Every kernel in every launch that its launcher can choose, through that launcher, for GPUs that are not here.

What is asserted is what the compiler can be held to: nothing spills, shared memory fits, tensor cores are used, loads are
128 bits wide, copies stay in flight while a tile computes, and one variant serves every batch. It says nothing about time.
"""

import cross_compile
import pytest
import torch
from batchgen_kernels import launch, paged_decode, paged_prefill
from batchgen_kernels.cases.attention import paged_inputs
from gates import BF16, ELSEWHERE, FP16, FP32, LARGE_MMA, SMALL_MMA, TARGETS, assert_copies_in_flight, assert_sound


def compile_attention(kind, target, dtype, head_dim, block_size, num_splits=1, heads=(8, 2)):
    """[(kernel name, report)] of what the launcher would run on this target."""
    module = {"decode": paged_decode, "prefill": paged_prefill}[kind]
    num_tokens = 1 if kind == "decode" else 70
    inputs = paged_inputs([num_tokens] * 2, [300] * 2, *heads, head_dim, block_size, dtype, poison=False)
    metadata, query, key_cache, value_cache, scale = inputs
    out, lse = torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2])
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
    names = ["paged_decode_kernel", "merge_splits_kernel"] if kind == "decode" else ["paged_prefill_kernel"]
    with cross_compile.target(*target), cross_compile.capture(module, *names) as compiled:
        if kind == "decode":
            args = (*index, metadata.decode_requests, 300, scale, out, lse)
            module.paged_decode(query, key_cache, value_cache, *args, num_splits=num_splits)
        else:
            module.paged_prefill(query, key_cache, value_cache, *index, metadata.prefill_requests, 70, scale, out, lse)
        return [(kernel.metadata.name, cross_compile.report(kernel)) for kernel in compiled]


ROWS = [(architecture, head_dim, {2: BF16, 4: FP32}[size]) for architecture, head_dim, size in launch.PREFILL]


def test_both_tables_cover_the_same_targets():
    assert launch.PREFILL.keys() == launch.DECODE.keys()
    assert {architecture for architecture, *_ in launch.PREFILL} == set(TARGETS)


@pytest.mark.parametrize(("architecture", "head_dim", "dtype"), ROWS)
def test_prefill(architecture, head_dim, dtype, table):
    launched = launch.prefill_launch(architecture, head_dim, dtype)
    ((name, r),) = compile_attention("prefill", TARGETS[architecture], dtype, head_dim, 16)
    table(name, f"{architecture} {str(dtype)[6:]} {head_dim} {tuple(launched)}", r)
    assert_sound(r)
    if dtype == BF16:
        assert LARGE_MMA[architecture] in r["mma"], r
        assert launched.block_m >= 64
    if architecture != "gfx942":
        assert_copies_in_flight(r, launched)


@pytest.mark.parametrize(("architecture", "head_dim", "dtype"), ROWS)
def test_decode(architecture, head_dim, dtype, table):
    launched = launch.decode_launch(architecture, head_dim, dtype)
    ((name, r),) = compile_attention("decode", TARGETS[architecture], dtype, head_dim, 64)
    table(name, f"{architecture} {str(dtype)[6:]} {head_dim} {tuple(launched)}", r)
    # float32 with 256 dims holds more of a tile in registers than there are; the whole rest must not spill at all
    assert_sound(r, spills=128 if (dtype, head_dim) == (FP32, 256) else 0)
    if dtype == BF16:
        assert SMALL_MMA[architecture] in r["mma"], r
    if architecture != "gfx942":
        assert_copies_in_flight(r, launched)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("architecture", TARGETS)
def test_decode_in_parts_with_blocks_smaller_than_a_tile(architecture, head_dim, table):
    """A block id per key, partial results in float32, and the kernel that merges them."""
    parts, merge = compile_attention("decode", TARGETS[architecture], BF16, head_dim, 16, num_splits=8)
    for name, r in (parts, merge):
        table(name, f"{architecture} bfloat16 {head_dim} parts, blocks of 16", r)
        assert_sound(r)
    assert SMALL_MMA[architecture] in parts[1]["mma"]
    if architecture != "gfx942":
        assert_copies_in_flight(parts[1], launch.decode_launch(architecture, head_dim, BF16))


@pytest.mark.parametrize(("head_dim", "heads"), [(80, (4, 4)), (96, (14, 2)), (128, (71, 1))])
def test_odd_heads_on_hopper(head_dim, heads, table):
    """Head dims that are no power of two, and groups that no tile holds."""
    for kind in ("decode", "prefill"):
        ((name, r),) = compile_attention(kind, TARGETS["sm_90"], FP16, head_dim, 16, heads=heads)
        table(name, f"sm_90 float16 {head_dim}, {heads[0]}/{heads[1]} heads", r)
        assert_sound(r)
        assert_copies_in_flight(r, launch.Launch(0, 0, 0, 3))
        assert ("HGMMA" if kind == "prefill" else "HMMA") in r["mma"], r


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_architecture_without_rows(kind, table):
    ((name, r),) = compile_attention(kind, ELSEWHERE, BF16, 128, 16)
    table(name, "sm_86 bfloat16 128", r)
    assert_sound(r)
    assert "HMMA" in r["mma"]
