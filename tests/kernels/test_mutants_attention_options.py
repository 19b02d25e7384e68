"""Planted bugs in windows, soft caps, sinks, float8 caches, the guard of what is not finite, and the list of tiles."""

import math

import pytest
import torch
from batchgen_kernels import paged_decode, paged_prefill
from batchgen_kernels.cases.attention import paged_inputs, with_options
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.launch import Launch
from mutants import Bug, assert_caught

BF16 = torch.bfloat16
PACKAGE = {"decode": paged_decode, "prefill": paged_prefill}  # imported before anything is planted


def attention(module, kind, num_splits=1, spoil=False, **what):
    """Relative error of one launcher, of `out` and of `lse`, against itself in the package; spoil: one value is NaN."""
    lens = ([1, 1], [52, 100]) if kind == "decode" else ([20, 3], [67, 70])
    inputs = paged_inputs(*lens, 6, 2, 32, 16, BF16, padding=-1)
    if spoil:
        inputs.value_cache[inputs.metadata.block_table[0, 3].long(), 10] = math.nan
    inputs, options = with_options(inputs, **what)
    metadata, query, key_cache, value_cache, scale = inputs
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
    results = []
    for m in (PACKAGE[kind], module):
        out, lse = torch.full(query.shape, math.nan, dtype=BF16), torch.full(query.shape[:2], math.nan)
        rest = {"lse": lse, "launch": Launch(16, 16, 4, 1), "options": options}
        if kind == "decode":
            requests = metadata.decode_requests
            m.paged_decode(query, key_cache, value_cache, *index, requests, 100, scale, out, num_splits=num_splits, **rest)
        else:
            m.paged_prefill(query, key_cache, value_cache, *index, metadata.prefill_requests, 20, scale, out, **rest)
        results.append((out, lse))
    (want, want_lse), (out, lse) = results
    return max(relative_error(out, want) / TOLERANCE[BF16], relative_error(lse, want_lse) / 1e-5)


WINDOW, CAP, SINKS, FP8 = {"window": 21}, {"soft_cap": 2.0}, {"sinks": True}, {"fp8": True}
SUM = "    row_sum = row_sum * rescale + tl.sum(p, 1)\n"
SCALE_VALUES = "    if scales is not None:\n        p *= value_scale[None, :]\n"
SCALES = "(key_scale_ptr + scale_at, value_scale_ptr + scale_at"
BUGS = [
    Bug(
        "window off by one",
        "paged_tile",
        "prefill",
        "> query_position[:, None] - w",
        ">= query_position[:, None] - w",
        WINDOW,
    ),
    Bug("window off by one", "paged_decode", "decode", "(key_end - window, begin)", "(key_end - window - 1, begin)", WINDOW),
    Bug(
        "edge taken for full",
        "paged_prefill",
        "prefill",
        "last_begin = tl.maximum(key_end - window",
        "last_begin = tl.maximum(key_begin",
        WINDOW,
    ),
    Bug("edge taken for full", "paged_decode", "decode", "tl.where(begin < key_begin, BLOCK_N, 0)", "0", WINDOW),
    Bug(
        "first edge lost",
        "paged_tile",
        "decode",
        "first_key = edge + tl.where(edge < full_begin, 0, num_full)",
        "first_key = edge + num_full",
        WINDOW,
    ),
    Bug(
        "block id of the other edge",
        "paged_tile",
        "prefill",
        "    if begin < full_begin:\n",
        "    if begin > full_begin:\n",
        WINDOW,
    ),
    Bug(
        "window from the start",
        "paged_decode",
        "decode",
        "begin += (key_begin - begin) // BLOCK_N * BLOCK_N",
        "begin += 0",
        WINDOW,
    ),
    Bug("cap in another base", "paged_tile", "decode", "2.8853900817779268", "2.0", CAP),
    Bug("cap of one end only", "paged_tile", "prefill", "cap - 2.0 * cap /", "cap - cap /", CAP),
    Bug("sink in another base", "paged_tile", "decode", "other=0.0) * 1.4426950408889634", "other=0.0)", SINKS),
    Bug(
        "sink in every part",
        "paged_decode",
        "decode",
        "None if split else options.sinks",
        "options.sinks",
        SINKS | {"num_splits": 2},
    ),
    Bug(
        "no sink in the merge",
        "paged_decode",
        "decode",
        "if sinks_ptr is None:\n        top",
        "if True:\n        top",
        SINKS | {"num_splits": 2},
    ),
    Bug("sink of another head", "paged_tile", "prefill", "tl.load(sinks_ptr + head", "tl.load(sinks_ptr + head * 0", SINKS),
    Bug("scales mixed up", "paged_decode", "decode", SCALES, "(value_scale_ptr + scale_at, key_scale_ptr + scale_at", FP8),
    Bug("scale of another head", "paged_prefill", "prefill", "kv_head * stride_scale_head", "0 * stride_scale_head", FP8),
    Bug("scale of another slot", "paged_tile", "decode", "slot * stride_scale_slot", "slot", FP8),
    Bug("values' scale in the sum", "paged_tile", "decode", SUM + SCALE_VALUES, SCALE_VALUES + SUM, FP8),
    Bug("sign lost", "float8", "decode", "-0x78100000", "0x07F00000", FP8),
    Bug("exponent off by one", "float8", "prefill", "<< 20) & -0x78100000", "<< 21) & -0x70200000", FP8),
    Bug("NaN reaches earlier rows", "paged_tile", "prefill", "v = tl.where(zero == 0.0, v, 0.0)", "pass", {"spoil": True}),
    Bug("NaN is lost", "paged_tile", "prefill", "scores += spoiled[None, :]", "pass", {"spoil": True}),
    Bug(
        "NaN scale reaches earlier rows",
        "paged_tile",
        "prefill",
        "tl.where(value_scale * 0.0 == 0.0, value_scale, 0.0)",
        "value_scale",
        FP8 | {"spoil": True},
    ),
    Bug("surplus programs run", "paged_prefill", "prefill", "if request < 0:", "if request < -1:"),
    Bug("a request's tiles are another's", "paged_prefill", "prefill", "right=True", "right=False"),
    Bug(
        "tiles of a request overlap",
        "paged_prefill",
        "prefill",
        "tiles_of[index]) * block_q",
        "tiles_of[index]) * (block_q - 1)",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name} ({bug.module}, {bug.run})")
def test_bug_is_caught(mutate, bug):
    if bug.module == "float8":
        mutate("float8", bug.old, bug.new, entry="paged_tile")
        entry = mutate("paged_tile", "", "", entry=f"paged_{bug.run}")
    else:
        entry = mutate(bug.module, bug.old, bug.new, entry=f"paged_{bug.run}" if bug.module == "paged_tile" else None)
    assert_caught(lambda: attention(entry, bug.run, **bug.options))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_bug_is_not_caught(mutate, kind):
    entry = mutate("paged_tile", "", "", entry=f"paged_{kind}")
    assert attention(entry, kind, window=21, soft_cap=2.0, sinks=True, fp8=True, spoil=kind == "prefill") == 0
