"""Planted bugs in the attention kernels; see mutants.py."""

import importlib
import math

import pytest
import torch
from batchgen_kernels.cases.attention import paged_inputs
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.launch import Launch
from mutants import Bug, assert_caught

BF16 = torch.bfloat16


def attention(module, kind, dtype=BF16, kv_start=0, num_splits=1, block_n=32, block_size=16):
    """Relative error of one launcher, of `out` and of `lse` (over rows that it writes), against itself in the package."""
    lens = ([1, 1, 1], [52, 33, 208]) if kind == "decode" else ([20, 3], [67, 80])
    inputs = paged_inputs(*lens, 6, 2, 64, block_size, dtype, padding=-1)
    results = []
    for m in (importlib.import_module(f"batchgen_kernels.paged_{kind}"), module):
        metadata, query, key_cache, value_cache, scale = inputs
        out, lse = torch.full(query.shape, math.nan, dtype=dtype), torch.full(query.shape[:2], math.nan)
        start = metadata.kv_start + kv_start
        args = (query, key_cache, value_cache, metadata.block_table, metadata.query_start, metadata.seq_lens, start)
        rest = {"lse": lse, "launch": Launch(16, block_n, 4, 1)}
        if kind == "decode":
            m.paged_decode(*args, metadata.decode_requests, 208, scale, out, num_splits=num_splits, **rest)
        else:
            m.paged_prefill(*args, metadata.prefill_requests, 20, scale, out, **rest)
        results.append((out, lse))
    (want, want_lse), (out, lse) = results
    return max(relative_error(out, want) / TOLERANCE[dtype], relative_error(lse, want_lse) / 1e-5)


SPLIT = {"num_splits": 2}
MANY = {"num_splits": 16, "block_n": 16}
PRIVATE = {"kv_start": 16}
ATTENTION = [
    Bug("causal off by one", "paged_tile", "prefill", "<= query_position[:, None]", "<= query_position[:, None] + 1"),
    Bug("sum is not rescaled", "paged_tile", "decode", "row_sum = row_sum * rescale +", "row_sum = row_sum +"),
    Bug("values past the end", "paged_tile", "decode", "mask=readable[:, None] &", "mask=(key >= 0)[:, None] &"),
    Bug("table past the end", "paged_tile", "decode", "mask=in_range(keys, key_begin, key_end)", "mask=keys >= 0"),
    Bug("table past the end, by tile", "paged_tile", "decode", "mask=first_key < key_end", "mask=True", {"block_n": 16}),
    Bug("tf32 for float32", "paged_tile", "prefill", '"ieee" if', '"tf32" if', {"dtype": torch.float32}),
    Bug("logarithm of another base", "paged_tile", "decode", "* 0.6931471805599453", "* 1.0"),
    Bug("block id of another trip", "paged_tile", "decode", "        block_ids = next_ids\n", ""),
    Bug("block id of another trip", "paged_tile", "prefill", "        block_ids = next_ids\n", ""),
    Bug("ragged tile taken for full", "paged_decode", "decode", "// BLOCK_N * BLOCK_N\n    full_begin", "\n    full_begin"),
    Bug(
        "causal tile taken for full",
        "paged_prefill",
        "prefill",
        "tl.maximum(first_position + 1 - begin, 0)",
        "tl.maximum(key_end - begin, 0)",
    ),
    Bug("heads mixed up", "paged_prefill", "prefill", "kv_head * GROUP + group_head", "kv_head + 2 * group_head"),
    Bug("padding rows are written", "paged_prefill", "prefill", "& (token < query_len)", ""),
    Bug("computed tokens forgotten", "paged_prefill", "prefill", "position = num_computed + token", "position = token"),
    Bug("private range ignored", "paged_decode", "decode", "= tl.load(kv_start_ptr + request)", "= 0", PRIVATE),
    Bug("private range ignored", "paged_prefill", "prefill", "= tl.load(kv_start_ptr + request)", "= 0", PRIVATE),
    Bug("parts overlap", "paged_decode", "decode", "tl.minimum(begin + part, key_end)", "key_end", SPLIT),
    Bug("parts write one place", "paged_decode", "decode", "* num_splits + split\n", "* num_splits\n", SPLIT),
    Bug("merge without the maximum", "paged_decode", "decode", "tl.exp(lse - base)", "tl.exp(lse)", SPLIT),
    Bug("last part lost", "paged_decode", "decode", "mask=split < num_splits,", "mask=split < num_splits - 1,", SPLIT),
    Bug("parts past the eighth lost", "paged_decode", "decode", "range(0, num_splits,", "range(0, 8,", MANY),
    Bug("earlier parts not rescaled", "paged_decode", "decode", "acc = acc * rescale", "acc = acc", MANY),
]


@pytest.mark.parametrize("bug", ATTENTION, ids=lambda bug: f"{bug.name} ({bug.module})")
def test_attention_bug_is_caught(mutate, bug):
    entry = mutate(bug.module, bug.old, bug.new, entry=f"paged_{bug.run}" if bug.module == "paged_tile" else None)
    assert_caught(lambda: attention(entry, bug.run, **bug.options))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_bug_is_not_caught(mutate, kind):
    assert attention(mutate("paged_tile", "", "", entry=f"paged_{kind}"), kind) == 0
