"""Planted bugs in the ops on logits; see mutants.py."""

import math
from typing import NamedTuple

import pytest
import torch
from batchgen_kernels import sampling
from batchgen_kernels._triton import tl, triton
from batchgen_kernels.cases import CASES
from batchgen_kernels.cases.case import relative_error, tolerance
from batchgen_kernels.cases.sampling import sample_tokens_case, survivors
from batchgen_kernels.registry import load
from mutants import assert_caught


class Bug(NamedTuple):
    name: str
    old: str
    new: str


def bugs(kind, *texts):
    """Parameters of a test: (name, text, text with the bug)."""
    return pytest.mark.parametrize("bug", [Bug(*t) for t in texts], ids=lambda bug: f"{bug.name} ({kind})")


def first_error(op, mutant, dtype=torch.float32):
    """The first error out of tolerance over the cases of an op, as a share of it; 0 if there is none."""
    allowed = max(tolerance(op, "triton", dtype), 1e-9)
    for case in CASES[op](dtype, "cpu"):
        for out, want in zip(case.run(mutant), case.run(load(op, "reference"))):
            if relative_error(out, want) > allowed:
                return relative_error(out, want) / allowed
    return 0.0


@bugs(
    "token",
    ("noise by place in the chunk", "block = start // 4 + tl.arange", "block = tl.arange"),
    ("top-k 1 draws", "greedy | (tl.load(top_k_ptr + row) == 1)", "greedy | (tl.load(top_k_ptr + row) < 0)"),
    (
        "ties of chunks go to the last",
        "chosen = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)",
        "chosen = tl.max(tl.where(score == best, token, 0), 0)",
    ),
    (
        "ties in a chunk go to the last",
        "chosen = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)",
        "chosen = tl.max(tl.where(x == best, token, 0), 0)",
    ),
    ("infinity passes as a logit", '| (x == float("inf")).to(tl.int32)', ""),
    ("a bad logit is forgotten", "(tl.min(token, 0) >= 0) & ", ""),
    ("columns past the end", "mask=token < vocab", "mask=token <= vocab"),
    ("rows taken as dense", "logits_ptr + row * stride_row + token", "logits_ptr + row * vocab + token"),
    ("temperature ignored", "x = tl.fma(x, tl.div_rn(1.0, temperature), noise)", "x = x + noise"),
    ("survivors ignored", "tl.where(order_key(x) >= tl.load(threshold_ptr + row), x", "tl.where(order_key(x) > -9, x"),
)
def test_token_bug_is_caught(mutate, bug):
    mutant = mutate("sampling", bug.old, bug.new).sample_tokens_triton
    assert_caught(lambda: first_error("sample_tokens", mutant))


EDGES = (  # row, top-k, top-p: neighbouring floats, signs that differ, a nucleus of what top-k left
    ([1.0 + i * 2.0**-23 for i in range(6)], 3, 1.0),
    ([-1.0, -2.0, -4.0, 2.0, 1.0, -0.5], 4, 1.0),
    ([0.0, -0.1, -0.2, -0.3, -0.4, -0.5], 3, 0.5),
)


@bugs(
    "search",
    ("none", "", ""),
    ("order of negative logits", "bits >= 0, bits, -(bits & 0x7FFFFFFF))", "bits >= 0, bits, bits & 0x7FFFFFFF)"),
    ("weights without temperature", "tl.fma(x, inverse_temperature, -top)", "(x - top)"),
    ("top-p over the whole row", "mass += tl.where(key >= low,", "mass += tl.where(key >= -2147483647,"),
    ("one survivor too many", "reached = tl.sum(sums, 0) >= target", "reached = tl.sum(sums, 0) > target"),
    ("search ends early", "while high - low > 1:", "while high - low > 4:"),
    ("ends of the undecided range", "tl.max(most, 0).to(tl.int64) + 1)", "tl.max(most, 0).to(tl.int64))"),
    ("tiles skipped too soon", "if tl.max(key, 0) >= low:", "if tl.max(key, 0) >= low + 9999999:"),
    ("min-p replaces top-p", "tl.minimum(tl.maximum(low, cutoff), last)", "tl.minimum(cutoff, last)"),
    ("rows taken as dense", "row_ptr = logits_ptr + row * stride_row", "row_ptr = logits_ptr + row * vocab"),
    ("columns past the end", "mask=column < vocab", "mask=column <= vocab"),
)
def test_search_bug_is_caught(mutate, bug):
    """The exact survivors; a token shows too seldom that there is one more or less."""
    mutant = mutate("sampling", bug.old, bug.new)
    mutant.BLOCK = 64  # several tiles a row

    def differs(logits, *parameters):
        found = survivors(mutant.find_thresholds, logits, *parameters)
        for i, row in enumerate(logits):
            temperature, top_k, top_p, min_p = (p[i] for p in parameters)
            if row.isnan().any() or not row.max().isfinite() or top_k == 1 or top_p <= 0 or temperature < 1e-3:
                continue
            if not torch.equal(found[i], sampling._survivors_reference(row, temperature, int(top_k), top_p, min_p)):
                return True
        return False

    def run():
        rows, top_k, top_p = map(torch.tensor, zip(*EDGES))
        one = torch.ones(len(EDGES))
        batches = [(rows, one, top_k.int(), top_p, one * 0)]
        batches += [sample_tokens_case(11, 300, torch.float32, levels=n).make()[:5] for n in (0, 40)]
        return math.inf if any(differs(*batch) for batch in batches) else 0.0

    if bug.old:
        assert_caught(run)
    else:
        assert run() == 0.0


def test_zeros_that_differ_are_caught(mutate):
    """The third largest is a zero, so all zeros survive, of either sign."""
    rows = torch.tensor([[1.0, 0.0, 0.0, -0.0, -0.0, -9.0]]).expand(24, 6)
    args = sample_tokens_case(24, 6, torch.float32, settings=((30.0, 3, 1.0, 0.0),)).make()[1:]
    old, new = "bits >= 0, bits, -(bits & 0x7FFFFFFF))", "bits >= 0, bits, -1 - (bits & 0x7FFFFFFF))"
    assert set(sampling.sample_tokens_triton(rows, *args)[0].tolist()) == {0, 1, 2, 3, 4}
    mutant = mutate("sampling", old, new).sample_tokens_triton
    assert set(mutant(rows, *args)[0].tolist()) == {0, 1, 2}, "survived"


kernels = sampling  # the module, or the mutant, of which this takes the noise


@triton.jit
def noise_kernel(out_ptr, key, sample, position, start, seed_low, seed_high, CHUNK: tl.constexpr):
    noise = kernels.gumbel_kernel(key, sample, position, start, seed_low, seed_high, CHUNK)
    tl.store(out_ptr + tl.arange(0, CHUNK), noise)


@bugs(
    "noise",
    ("none", "", ""),
    ("words of a block out of order", "interleave(r0, r2)", "interleave(r0, r1)"),
    ("high half of the key ignored", "((key >> 32) & 0x", "((key >> 63) & 0x"),
    ("high half of the seed ignored", "seed_high.to(tl.uint32, bit", "seed_low.to(tl.uint32, bit"),
    ("sample index ignored", "(sample | block >> 8 << 20)", "(block >> 8 << 20)"),
    ("position overlaps the block", "(position | (block & 0xFF) << 24)", "(position | block << 20)"),
    ("u near 1 loses its difference", "tl.where(r < 1073741824, below, ln", "tl.where(r < 0, below, ln"),
    ("u can be 0", "((r ^ 0xFFFFFFFF).to(tl.float32) + 0.5)", "((r ^ 0xFFFFFFFF).to(tl.float32))"),
)
def test_noise_bug_is_caught(mutate, monkeypatch, bug):
    monkeypatch.setitem(globals(), "kernels", mutate("sampling", bug.old, bug.new))
    key, sample, position, start, chunk = 0x1234567_89ABCDEF, 9_999, 9_999_999, 4096, 1024

    def run():
        out = torch.empty(chunk)
        noise_kernel[(1,)](out, key, sample, position, start, 0x1234567, -0x1234567, CHUNK=chunk)
        one = torch.ones(1, dtype=torch.int64)
        seed = (-0x1234567 & 0xFFFFFFFF) << 32 | 0x1234567
        want = sampling.gumbel_noise(one * key, one * sample, one * position, start + chunk, seed)[0, start:]
        return 0.0 if torch.equal(out, want) else math.inf

    if bug.old:
        assert_caught(run)
    else:
        assert run() == 0.0


@bugs(
    "gather",
    ("sum below another maximum", "total * tl.exp(top - base)", "total"),
    ("maximum left in", "x - base - log_sum", "x - log_sum"),
    ("padding counts", 'mask=token < vocab, other=float("-inf")', "mask=token < vocab, other=0.0"),
    ("ids past the end", "mask=j < num_ids, other=0).to(tl.int64)", "mask=j <= num_ids, other=0).to(tl.int64)"),
    ("id of another row", "row * stride_id_row", "row * num_ids"),
    ("infinity less infinity", 'base = tl.where(top == float("-inf"), 0.0, top)', "base = top"),
)
def test_gather_bug_is_caught(mutate, bug):
    mutant = mutate("gather_logprobs", bug.old, bug.new).gather_logprobs_triton
    assert_caught(lambda: first_error("gather_logprobs", mutant))


@pytest.mark.parametrize("after", ["row_ptr =", "start ="])
def test_32_bit_row_offset_is_caught(mutate, after):
    torch.utils.deterministic.fill_uninitialized_memory = False
    row = "row = tl.program_id(0){}\n    " + after
    mutant = mutate("sampling", row.format(".to(tl.int64)"), row.format("")).sample_tokens_triton
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # never touched but for three short ends
    logits = torch.as_strided(far, (3, 64), (2**30, 1)).copy_(torch.randn(3, 64))
    _, *rest, seed, filtered = sample_tokens_case(3, 64, torch.bfloat16, settings=((1.0, 5, 0.9, 0.0),)).make()

    def run():
        ids, _ = mutant(logits, *rest, seed, filtered)
        return 0.0 if torch.equal(ids, sampling.sample_tokens_reference(logits, *rest, seed, filtered)[0]) else math.inf

    assert_caught(run)
