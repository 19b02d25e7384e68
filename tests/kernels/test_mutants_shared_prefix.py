"""Planted bugs in shared-prefix attention; see mutants.py."""

import pytest
import torch
from batchgen_kernels import attention_triton
from batchgen_kernels.attention_reference import plan_attention_reference
from batchgen_kernels.cases.attention import with_options
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.cases.shared_prefix import shared_inputs
from batchgen_kernels.launch import Launch
from mutants import Bug, assert_caught

FP32 = torch.float32


def shared(module, monkeypatch, num_programs=5, depth=2, seed=6, **given):
    """Error of the plan, in tolerances, with this module's kernels, of a step in which shares end in the middle of tiles."""
    inputs, options = with_options(shared_inputs(depth, 6, 2, 16, 16, FP32, seed=seed), **given)
    plan_shared = module.plan_shared
    launch = {"launch": Launch(16, 16, 4, 1), "num_programs": num_programs}
    monkeypatch.setattr(attention_triton, "plan_shared", lambda *args: plan_shared(*args, **launch))
    for name in ("attend_shared", "merge_shared", "token_positions"):
        monkeypatch.setattr(attention_triton, name, getattr(module, name))
    want = plan_attention_reference(inputs.metadata, 6, 2, 16)(*inputs[1:], *options)
    got = attention_triton.plan_attention_triton(inputs.metadata, 6, 2, 16)(*inputs[1:], *options)
    return relative_error(got, want) / TOLERANCE[FP32]


MANY = {"num_programs": 300}
WINDOW = {"window": 30}
BUGS = [
    Bug("parts of one tile in one place", "", "", "tile + program).to(tl.int64) * B", "tile).to(tl.int64) * B"),
    Bug("shares overlap", "", "", "key_tile + share_end - unit,", "key_tile + share_end - unit + 1,"),
    Bug("program of a unit off by one", "", "", "* num_programs - 1) // num_units", "* num_programs) // num_units"),
    Bug("empty shares", "", "", "num_programs = tl.minimum(grid, num_units)", "num_programs = grid", MANY),
    Bug(
        "search ends a node early",
        "",
        "",
        "tl.load(nodes_ptr + middle * 8) <= unit",
        "tl.load(nodes_ptr + middle * 8) < unit",
    ),
    Bug(
        "next node not taken",
        "",
        "",
        "node_ptr += tl.where(unit == tl.load(node_ptr + 8), 8, 0)",
        "pass",
        {"num_programs": 1},
    ),
    Bug("rows of other tokens", "", "", "(token < query_end) &", "(token >= 0) &"),
    Bug("keys past a share are read", "", "", "tl.minimum(end_tile * BLOCK_N, num_keys)", "num_keys"),
    Bug("first keys of a tile are lost", "", "", "begin = key_tile * BLOCK_N", "begin = key_tile * 0"),
    Bug("block ids of the first node", "", "", "blocks_ptr + tl.load(node_ptr + 5)", "blocks_ptr"),
    Bug("heads mixed up", "", "", "tile // row_tiles // HEAD_TILES", "tile % HEAD_TILES"),
    Bug(
        "merge takes another row", "", "", "(token - query_begin) % BLOCK_Q * TILE_HEADS", "(token - query_begin) % BLOCK_Q"
    ),
    Bug("merge without rescaling", "", "", "acc * rescale[:, None] + out", "acc + out"),
    Bug("last part of a tile lost", "", "", "range(first_program, last_program + 1)", "range(first_program, last_program)"),
    Bug("parents forgotten", "", "", "node = tl.load(node_ptr + 6)", "node = -1"),
    Bug(
        "sink forgotten", "", "", "tl.load(sinks_ptr + head, mask=head_ok, other=0.0)", "head * 0.0 - 100.0", {"sinks": True}
    ),
    Bug("window from the start of the node", "", "", "other=0) - tl.load(node_ptr + 7)", "other=0)", WINDOW),
    Bug("window of the first row for all", "", "", "tl.maximum(latest, begin)", "tl.maximum(earliest, begin)", WINDOW),
    Bug(
        "parent is the node before",
        "",
        "",
        "parent[g], position[g] = stack[-1]",
        "parent[g], position[g] = g - 1",
        {"seed": 11},
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_shared_prefix_bug_is_caught(mutate, monkeypatch, bug):
    mutant = mutate("shared_prefix", bug.old, bug.new)
    assert_caught(lambda: shared(mutant, monkeypatch, **bug.options))


def test_no_bug_is_not_caught(mutate, monkeypatch):
    for options in ({}, MANY, WINDOW, {"sinks": True}):
        assert shared(mutate("shared_prefix", "", ""), monkeypatch, **options) < 1
