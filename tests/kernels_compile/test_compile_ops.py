"""The ops that are not attention, compiled through their launchers for GPUs that are not here."""

import cross_compile
import pytest
from batchgen_kernels import activation, kv_cache, merge_states, rms_norm, rotary
from batchgen_kernels.cases import attention, cache
from batchgen_kernels.cases import elementwise as ew
from gates import BF16, TARGETS, assert_sound

OPS = {
    "rms_norm_kernel": (rms_norm, "rms_norm", lambda: ew.rms_norm_case((4, 4096), BF16)),
    "rms_norm_kernel of heads": (rms_norm, "rms_norm", lambda: ew.rms_norm_case((4, 8, 128), BF16, strided=True)),
    "rms_norm_kernel with add": (rms_norm, "add_rms_norm", lambda: ew.add_rms_norm_case((4, 4096), BF16)),
    "rotary_embedding_kernel": (
        rotary,
        "rotary_embedding",
        lambda: ew.rotary_embedding_case(4, 32, 8, 128, 128, BF16),
    ),
    "act_and_mul_kernel": (activation, "silu_and_mul", lambda: ew.silu_and_mul_case(4, 14336, BF16)),
    "write_kv_kernel": (kv_cache, "write_kv", lambda: cache.write_kv_case([1, 2], 3, 16, 8, 128, BF16)),
    "copy_blocks_kernel": (kv_cache, "copy_blocks", lambda: cache.copy_blocks_case([(1, 2)], 2, 3, 16, 8, 128, BF16)),
    "merge_states_kernel": (merge_states, "merge_states", lambda: attention.merge_states_case(5, 32, 128, BF16)),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_op(architecture, name, table):
    module, op, make = OPS[name]
    with cross_compile.target(*TARGETS[architecture]), cross_compile.capture(module, name.split()[0]) as compiled:
        make().run(getattr(module, f"{op}_triton"))
        (r,) = map(cross_compile.report, compiled)
    table(name, f"{architecture} bfloat16", r)
    assert_sound(r)
    # AMD packs 16-bit stores by two where it converts from float32
    assert r["wide_stores"] > 0 or architecture == "gfx942", r
