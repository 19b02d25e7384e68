"""Planted bugs in the ops that are not attention; see mutants.py."""

import math

import pytest
import torch
from mutants import Bug, assert_caught, assert_op_bug_is_caught

BF16 = torch.bfloat16

OPS = [
    Bug("statistics over the padding", "rms_norm", "rms_norm", "/ HIDDEN + eps", "/ PADDED_HIDDEN + eps"),
    Bug("columns past the end", "rms_norm", "rms_norm", "& (column < HIDDEN)[None, :]", ""),
    Bug("strides of a view ignored", "rms_norm", "rms_norm", "* stride_x_outer", "* INNER * HIDDEN"),
    Bug("residual is not stored", "rms_norm", "add_rms_norm", "tl.store(residual_tile, x, mask=cell_ok)", "pass"),
    Bug("residual is not rounded", "rms_norm", "add_rms_norm", "32)).to(out_ptr.dtype.element_ty)", "32))"),
    Bug("sign of the rotation", "rotary", "rotary_embedding", "x1 * c - x2 * s", "x1 * c + x2 * s"),
    Bug("heads past the end", "rotary", "rotary_embedding", "head < NUM_HEADS", "head < NUM_HEADS + 1"),
    Bug("position ignored", "rotary", "rotary_embedding", "tl.load(positions_ptr + token)", "token"),
    Bug("gate and up swapped", "activation", "silu_and_mul", "tl.exp(-gate)) * up", "tl.exp(-up)) * up"),
    Bug("columns past the end", "activation", "silu_and_mul", "mask=column < SIZE)", "mask=column < SIZE + 1)"),
    Bug("offset in the block ignored", "kv_cache", "write_kv", "offset * stride_slot", "0 * stride_slot"),
    Bug("offset of the value", "kv_cache", "write_kv", "token * stride_value_token", "token * stride_slot"),
    Bug("values are not copied", "kv_cache", "copy_blocks", "(tl.program_id(1) % 2).to(tl.int64) * stride_kv", "0"),
    Bug("block past its end", "kv_cache", "copy_blocks", "mask=element < SIZE", "mask=element < SIZE + 1"),
    Bug("weights not normalised", "merge_states", "merge_states", ") / safe[:, None]", ") / 1.0"),
    Bug("infinity less infinity", "merge_states", "merge_states", 'tl.where(top == float("-inf"), 0.0, top)', "top"),
    Bug("maximum of one side", "merge_states", "merge_states", "tl.maximum(lse_a, lse_b)", "lse_a"),
]


@pytest.mark.parametrize("bug", OPS, ids=lambda bug: f"{bug.name} ({bug.run})")
def test_op_bug_is_caught(mutate, bug):
    assert_op_bug_is_caught(mutate, bug)


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
