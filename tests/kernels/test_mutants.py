"""Planted bugs: each is one that a GPU would not report, and each must turn a check red, or the checks prove little."""

import importlib
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from batchgen_kernels.cases import CASES, TOLERANCE, paged_inputs, relative_error, tolerance
from batchgen_kernels.launch import Launch
from batchgen_kernels.registry import load

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("planted bugs corrupt memory on a GPU", allow_module_level=True)

BF16 = torch.bfloat16


@pytest.fixture
def mutate(monkeypatch, tmp_path):
    """mutate("paged_tile", old, new, entry="paged_decode") -> module paged_decode as if paged_tile had that text."""

    def copy_of(module, edit=lambda text: text):
        original = importlib.import_module(f"batchgen_kernels.{module}")
        path = tmp_path / f"{module}.py"
        path.write_text(edit(Path(original.__file__).read_text()))
        spec = importlib.util.spec_from_file_location(f"batchgen_kernels.{module}", path)
        mutant = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutant)
        return mutant

    def mutate(module, old, new, entry=None):
        def edit(text):
            assert old in text, f"{module} no longer has {old!r}: plant the bug anew"
            return text.replace(old, new)

        mutant = copy_of(module, edit)
        if entry is None:
            return mutant
        monkeypatch.setitem(sys.modules, f"batchgen_kernels.{module}", mutant)
        return copy_of(entry)

    return mutate


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


def assert_caught(run):
    """An error out of tolerance (1 is the tolerance), or the guard or the interpreter raising."""
    try:
        error = run()
    except Exception as fault:
        assert type(fault).__name__ in ("KernelFault", "InterpreterError"), repr(fault)
    else:
        assert error > 1, f"survived with {error:.2g} of the tolerance"


class Bug(NamedTuple):
    name: str
    module: str
    run: str  # the op, or "decode" or "prefill"
    old: str
    new: str
    options: dict = {}  # noqa: RUF012  of `attention`


SPLIT = {"num_splits": 2}
MANY = {"num_splits": 16, "block_n": 16}
PRIVATE = {"kv_start": 16}
ATTENTION = [
    Bug("causal off by one", "paged_tile", "prefill", "<= query_position[:, None]", "<= query_position[:, None] + 1"),
    Bug("sum is not rescaled", "paged_tile", "decode", "row_sum = row_sum * rescale +", "row_sum = row_sum +"),
    Bug("values past the end", "paged_tile", "decode", "mask=(key < key_end)[:, None] &", "mask=(key >= 0)[:, None] &"),
    Bug("table past the end", "paged_tile", "decode", "mask=keys < key_end", "mask=keys >= 0"),
    Bug("table past the end, by tile", "paged_tile", "decode", "mask=first_key < key_end", "mask=True", {"block_n": 16}),
    Bug("tf32 for float32", "paged_tile", "prefill", '"ieee" if', '"tf32" if', {"dtype": torch.float32}),
    Bug("logarithm of another base", "paged_tile", "decode", "* 0.6931471805599453", "* 1.0"),
    Bug("block id of another trip", "paged_decode", "decode", "        block_ids = next_ids\n", ""),
    Bug("block id of another trip", "paged_prefill", "prefill", "        block_ids = next_ids\n", ""),
    Bug("ragged tile taken for full", "paged_decode", "decode", "// BLOCK_N * BLOCK_N\n    block_ids", "\n    block_ids"),
    Bug("causal tile taken for full", "paged_prefill", "prefill", "num_computed + first_token + 1", "key_end"),
    Bug("heads mixed up", "paged_prefill", "prefill", "kv_head * GROUP + group_head", "kv_head + 2 * group_head"),
    Bug("padding rows are written", "paged_prefill", "prefill", "& (token < query_len)", ""),
    Bug("computed tokens forgotten", "paged_prefill", "prefill", "position = num_computed + token", "position = token"),
    Bug("private range ignored", "paged_decode", "decode", "= tl.load(kv_start_ptr + request)", "= 0", PRIVATE),
    Bug("private range ignored", "paged_prefill", "prefill", "= tl.load(kv_start_ptr + request)", "= 0", PRIVATE),
    Bug("parts overlap", "paged_decode", "decode", "tl.minimum(key_begin + part, key_end)", "key_end", SPLIT),
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


OPS = [
    Bug("statistics over the padding", "rms_norm", "rms_norm", "/ HIDDEN + eps", "/ PADDED_HIDDEN + eps"),
    Bug("columns past the end", "rms_norm", "rms_norm", "& (column < HIDDEN)[None, :]", ""),
    Bug("strides of a view ignored", "rms_norm", "rms_norm", "* stride_x_outer", "* INNER * HIDDEN"),
    Bug("residual is not stored", "rms_norm", "add_rms_norm", "tl.store(residual_tile, x, mask=cell_ok)", "pass"),
    Bug("residual is not rounded", "rms_norm", "add_rms_norm", "32)).to(out_ptr.dtype.element_ty)", "32))"),
    Bug("sign of the rotation", "rotary", "rotary_embedding", "x1 * c - x2 * s", "x1 * c + x2 * s"),
    Bug("heads past the end", "rotary", "rotary_embedding", "(head < NUM_HEADS)[:, None] &", ""),
    Bug("position ignored", "rotary", "rotary_embedding", "tl.load(positions_ptr + token)", "token"),
    Bug("gate and up swapped", "activation", "silu_and_mul", "tl.exp(-gate)) * up", "tl.exp(-up)) * up"),
    Bug("columns past the end", "activation", "silu_and_mul", "mask=column < SIZE)", "mask=column < SIZE + 1)"),
    Bug("offset in the block ignored", "kv_cache", "write_kv", "(slot % BLOCK_SIZE) * stride_slot", "0 * stride_slot"),
    Bug("offset of the value", "kv_cache", "write_kv", "token * stride_value_token", "token * stride_slot"),
    Bug("values are not copied", "kv_cache", "copy_blocks", "(tl.program_id(1) % 2).to(tl.int64) * stride_kv", "0"),
    Bug("block past its end", "kv_cache", "copy_blocks", "mask=element < SIZE", "mask=element < SIZE + 1"),
    Bug("weights not normalised", "merge_states", "merge_states", ") / safe[:, None]", ") / 1.0"),
    Bug("infinity less infinity", "merge_states", "merge_states", 'tl.where(top == float("-inf"), 0.0, top)', "top"),
    Bug("maximum of one side", "merge_states", "merge_states", "tl.maximum(lse_a, lse_b)", "lse_a"),
]


@pytest.mark.parametrize("bug", OPS, ids=lambda bug: f"{bug.name} ({bug.run})")
def test_op_bug_is_caught(mutate, bug):
    mutant = getattr(mutate(bug.module, bug.old, bug.new), f"{bug.run}_triton")
    allowed = max(tolerance(bug.run, "triton", BF16), 1e-9)

    def run():
        errors = []
        for case in CASES[bug.run](BF16, "cpu"):
            outputs = zip(case.run(mutant), case.run(load(bug.run, "reference")))
            errors += [relative_error(out, want) / allowed for out, want in outputs]
        return max(errors)

    assert_caught(run)


def test_slot_minus_one_bug_is_caught(mutate):
    write_kv = mutate("kv_cache", "if slot < 0:", "if slot < -1:").write_kv_triton
    heads, cache = torch.ones(2, 1, 8), torch.zeros(2, 3, 4, 1, 8)
    with pytest.raises(Exception, match="outside the tensors of this launch"):
        write_kv(heads, heads, cache[0], cache[1], torch.tensor([-1, 2]))


def test_32_bit_offset_is_caught(mutate):
    torch.utils.deterministic.fill_uninitialized_memory = False
    write_kv = mutate("kv_cache", "tl.load(slot_ptr + token).to(tl.int64)", "tl.load(slot_ptr + token).to(tl.int32)")
    cache = torch.empty(2**31 // 1024 + 2, 16, 1, 64, dtype=BF16)
    heads = torch.ones(1, 1, 64, dtype=BF16)
    slots = torch.tensor([cache.shape[0] * 16 - 1])

    def run():
        write_kv.write_kv_triton(heads, heads, cache, cache, slots)
        return 0 if torch.equal(cache[-1, -1], heads[0]) else math.inf

    assert_caught(run)
