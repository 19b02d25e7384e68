"""The attention kernels with a window, a soft cap, sinks and a float8 cache, and with tiles for short chunks, compiled for
GPUs that are not here. What has no option in use is in test_compile_attention.py."""

import cross_compile
import pytest
import torch
from batchgen_kernels import attention_triton, launch, paged_decode, paged_prefill
from batchgen_kernels.attention_options import NO_OPTIONS
from batchgen_kernels.cases.attention import paged_inputs, with_options
from gates import BF16, FP32, LARGE_MMA, PINNED, SMALL_MMA, TARGETS, assert_copies_in_flight, assert_sound

OPTIONS = {"window": 50, "soft_cap": 30.0, "sinks": True}
ROWS = [(architecture, head_dim) for architecture, head_dim, size in launch.PREFILL if size == 2]


def compile_options(kind, architecture, launched, head_dim, dtype=BF16, num_splits=1, **what):
    """[report] of the kernels that the launcher would run on this architecture with `launched`."""
    module = {"decode": paged_decode, "prefill": paged_prefill}[kind]
    num_tokens = 1 if kind == "decode" else 70
    inputs, options = with_options(paged_inputs([num_tokens], [300], 8, 2, head_dim, 16, dtype, poison=False), **what)
    metadata, query, key_cache, value_cache, scale = inputs
    shared = (
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.query_start,
        metadata.seq_lens,
        metadata.kv_start,
    )
    names = ["paged_decode_kernel", "merge_splits_kernel"] if kind == "decode" else ["paged_prefill_kernel"]
    rest = {"out": torch.empty(query.shape, dtype=dtype), "launch": launched, "options": options}
    with cross_compile.target(*TARGETS[architecture]), cross_compile.capture(module, *names) as compiled:
        if kind == "decode":
            paged_decode.paged_decode(*shared, metadata.decode_requests, 300, scale, num_splits=num_splits, **rest)
        else:
            paged_prefill.paged_prefill(*shared, metadata.prefill_requests, 70, scale, **rest)
        return [cross_compile.report(kernel) for kernel in compiled]


# With a window, a cap and sinks at once the newest triton runs out of registers before and after the inner loop.
OUTSIDE_LOOP = 0 if PINNED else 48


def assert_attention(r, architecture, launched):
    assert_sound(r, outside_loop=OUTSIDE_LOOP)
    mma = LARGE_MMA if launched.block_m >= 64 else SMALL_MMA
    assert mma[architecture] in r["mma"], r
    if architecture != "gfx942":
        assert_copies_in_flight(r, launched)


@pytest.mark.parametrize(("architecture", "head_dim"), ROWS)
def test_prefill_with_a_float8_cache(architecture, head_dim, table):
    """Everything at once, which takes the most registers."""
    launched = launch.prefill_launch(architecture, head_dim, BF16, fp8=True)
    (r,) = compile_options("prefill", architecture, launched, head_dim, fp8=True, **OPTIONS)
    table("paged_prefill_kernel", f"{architecture} all options, float8 {head_dim} {tuple(launched)}", r)
    assert_attention(r, architecture, launched)


@pytest.mark.parametrize(("architecture", "head_dim"), ROWS)
def test_decode_with_a_float8_cache(architecture, head_dim, table):
    launched = launch.decode_launch(architecture, head_dim, BF16, fp8=True)
    (r,) = compile_options("decode", architecture, launched, head_dim, fp8=True, **OPTIONS)
    table("paged_decode_kernel", f"{architecture} all options, float8 {head_dim} {tuple(launched)}", r)
    assert_attention(r, architecture, launched)


@pytest.mark.parametrize(("architecture", "head_dim"), ROWS)
def test_prefill_with_options(architecture, head_dim, table):
    """Tiles of 128 rows, or what there is instead."""
    launched = launch.prefill_launch(architecture, head_dim, BF16)
    (r,) = compile_options("prefill", architecture, launched, head_dim, **OPTIONS)
    table("paged_prefill_kernel", f"{architecture} options {head_dim} {tuple(launched)}", r)
    assert_attention(r, architecture, launched)


@pytest.mark.parametrize(("architecture", "head_dim"), [key[:2] for key in launch.PREFILL_SHORT])
def test_prefill_of_short_chunks(architecture, head_dim, table):
    launched = launch.prefill_launch(architecture, head_dim, BF16, short=True)
    assert launched.block_m == 64 and launched != launch.prefill_launch(architecture, head_dim, BF16)
    (r,) = compile_options("prefill", architecture, launched, head_dim, **OPTIONS)
    table("paged_prefill_kernel", f"{architecture} options {head_dim} {tuple(launched)}", r)
    assert_attention(r, architecture, launched)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_float32_with_everything(architecture, kind, table):
    """Queries in float32 on a float8 cache; decode also in parts, whose merging has the sinks."""
    launched = getattr(launch, f"{kind}_launch")(architecture, 128, FP32, fp8=True)
    for r in compile_options(kind, architecture, launched, 128, FP32, num_splits=4, fp8=True, **OPTIONS):
        table(f"paged_{kind}", f"{architecture} float32, all options, float8 128 {tuple(launched)}", r)
        assert_sound(r, outside_loop=OUTSIDE_LOOP)


def test_variants_are_few(monkeypatch):
    """Windows, batches and lengths of chunks do not multiply the variants: one for each set of options, and decode one more
    for parts; prefill has one more for short chunks."""
    kernels = [(paged_decode, "paged_decode_kernel"), (paged_decode, "merge_splits_kernel")]
    kernels += [(paged_prefill, "paged_prefill_kernel")]
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: 132)
    monkeypatch.setattr(paged_prefill, "num_processors", lambda device: 8)
    with cross_compile.target("cuda", 90), cross_compile.count_variants() as variants:
        captured = [cross_compile.capture(module, name) for module, name in kernels]
        for c in captured:
            c.__enter__()
        for lens, window in [([1] * 3 + [5], 17), ([1] * 32 + [900], 4096), ([1] * 140 + [64] * 3, 16), ([7], 1)]:
            inputs = paged_inputs(lens, [1000 + n for n in lens], 8, 2, 64, 16, BF16, poison=False)
            inputs = inputs._replace(metadata=inputs.metadata._replace(max_seq_len=100_000))
            plan = attention_triton.plan_attention_triton(inputs.metadata, 8, 2, 64)
            for size in (window, 2 * window):
                plan(*inputs[1:], *with_options(inputs, window=size)[1])
            plan(*inputs[1:], *NO_OPTIONS)
        for c in reversed(captured):
            c.__exit__(None, None, None)
    counts = {name: len(keys) for name, keys in variants.items()}
    assert counts["paged_decode_kernel"] <= 4 and counts["paged_prefill_kernel"] <= 4, counts
    assert counts["merge_splits_kernel"] == 1
