"""What writes the key/value cache, and norms and activations of large models, compiled for GPUs that are not here."""

import contextlib

import cross_compile
import pytest
import torch
from batchgen_kernels import activation, kv_cache, rms_norm, rope_write, rotary
from batchgen_kernels.cases import cache
from batchgen_kernels.cases import elementwise as ew
from batchgen_kernels.float8 import E4M3
from gates import BF16, FP32, TARGETS, assert_sound


def compile_case(module, op, kernel, case, architecture):
    with cross_compile.target(*TARGETS[architecture]), cross_compile.capture(module, kernel) as compiled:
        case.run(getattr(module, f"{op}_triton"))
        (r,) = map(cross_compile.report, compiled)
    return r


def assert_wide(r, architecture):
    assert_sound(r)
    assert r["wide_stores"] > 0 or architecture == "gfx942", r  # AMD packs 16-bit stores by two after a conversion


FUSED = {  # (query heads, key/value heads, head_dim, rotary dim), options
    "llama": ((32, 8, 128, 128), {}),
    "qwen3 fp8": ((32, 8, 128, 128), {"norm": True, "float8": True}),
    "small heads": ((9, 3, 64, 64), {}),
    "large heads fp8": ((16, 8, 256, 256), {"norm": True, "float8": True}),
    "partial": ((32, 32, 80, 32), {"norm": True}),
    "interleaved": ((32, 2, 128, 64), {"interleaved": True}),
    "interleaved fp8": ((32, 8, 128, 128), {"norm": True, "interleaved": True, "float8": True}),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("architecture", TARGETS)
def test_rope_and_write_kv(architecture, name, table):
    sizes, options = FUSED[name]
    case = cache.rope_and_write_kv_case([1, 2], 3, 16, *sizes, BF16, **options)
    r = compile_case(rope_write, "rope_and_write_kv", "rope_and_write_kv_kernel", case, architecture)
    table("rope_and_write_kv_kernel", f"{architecture} bfloat16 {name}", r)
    assert_wide(r, architecture)
    if architecture != "gfx942" and name != "partial":  # two of query, key and value each; others may be weights and angles
        assert r["wide_loads"] >= 6, r


def test_an_unaligned_stride_is_seen():
    """What the gate is for: a query whose heads are 8 elements apart from where they should be loads 2 bytes at a time."""
    wide, narrow = (
        compile_case(
            rope_write, "rope_and_write_kv", "rope_and_write_kv_kernel",
            cache.rope_and_write_kv_case([1, 2], 3, 16, 8, 2, head_dim, 64, BF16), "sm_90",
        )
        for head_dim in (64, 67)
    )  # fmt: skip
    assert wide["loads"] < narrow["loads"] / 2


OTHERS = {
    "rotary_embedding_kernel interleaved": (
        rotary, "rotary_embedding", lambda: ew.rotary_embedding_case(4, 32, 8, 128, 128, BF16, interleaved=True)
    ),
    "write_kv_kernel 32 heads fp8": (
        kv_cache, "write_kv", lambda: cache.write_kv_case([1, 2, 3], 3, 16, 32, 128, BF16, float8=True)
    ),
    "copy_blocks_kernel fp8": (kv_cache, "copy_blocks", lambda: cache.copy_blocks_case([(1, 2)], 2, 3, 16, 8, 128, E4M3)),
    "copy_blocks_kernel of scales": (
        kv_cache, "copy_blocks", lambda: cache.copy_blocks_case([(1, 2)], 2, 3, 32, 16, 0, FP32)
    ),
    "act_and_mul_kernel gelu": (activation, "gelu_and_mul", lambda: ew.gelu_and_mul_case(4, 14336, BF16)),
    "act_and_mul_kernel gelu tanh": (
        activation, "gelu_and_mul", lambda: ew.gelu_and_mul_case(4, 14336, BF16, approximate="tanh")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_op(architecture, name, table):
    module, op, make = OTHERS[name]
    kernel, _, what = name.partition(" ")
    r = compile_case(module, op, kernel, make(), architecture)
    table(kernel, f"{architecture} bfloat16 {what}", r)
    assert_wide(r, architecture)


@pytest.mark.parametrize("hidden", [8192, 18432])
@pytest.mark.parametrize("architecture", TARGETS)
def test_norm_of_large_models(architecture, hidden, table):
    """The row of a program stays in registers; float32 with the addition holds most."""
    r = compile_case(rms_norm, "add_rms_norm", "rms_norm_kernel", ew.add_rms_norm_case((4, hidden), FP32), architecture)
    table("rms_norm_kernel", f"{architecture} float32 {hidden} with add", r)
    assert_wide(r, architecture)


def test_one_variant_serves_every_batch():
    """One of each kernel for plain caches and one for float8, over batch sizes and unaligned index tensors."""
    cos = torch.zeros(300, 32)
    caches, codes, scales = (torch.zeros(2, 9, 16, 2, 64), torch.zeros(2, 9, 16, 2, 64).to(E4M3), torch.zeros(2, 9, 16, 2))

    def run(num_tokens, offset):
        index = torch.zeros(num_tokens + offset, dtype=torch.int64)[offset:]
        q, k, v = torch.empty(num_tokens, 12, 64).split([8, 2, 2], 1)
        rope_write.rope_and_write_kv_triton(q, k, v, *caches, index, cos, cos, index)
        options = {"key_scale": scales[0], "value_scale": scales[1]}
        rope_write.rope_and_write_kv_triton(q, k, v, *codes, index, cos, cos, index, **options)
        kv_cache.write_kv_triton(k, v, *caches, index)
        kv_cache.write_kv_triton(k, v, *codes, index, *scales)
        kv_cache.copy_blocks_triton(codes[None], index, index)
        kv_cache.copy_blocks_triton(scales[None], index, index)
        activation.gelu_and_mul_triton(v.flatten(1).contiguous())

    kernels = {
        "rope_and_write_kv_kernel": (rope_write, 2),
        "write_kv_kernel": (kv_cache, 2),
        "copy_blocks_kernel": (kv_cache, 2),
        "act_and_mul_kernel": (activation, 1),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(cross_compile.target("cuda", 90))
        variants = stack.enter_context(cross_compile.count_variants())
        for name, (module, _) in kernels.items():
            stack.enter_context(cross_compile.capture(module, name))
        for num_tokens in [*range(1, 19), 31, 32, 33, 1000]:
            for offset in (0, 1):
                run(num_tokens, offset)
    assert {name: len(keys) for name, keys in variants.items()} == {name: n for name, (_, n) in kernels.items()}
