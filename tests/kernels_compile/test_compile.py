"""Every kernel in every launch that its launcher can choose, through that launcher, for GPUs that are not here.

What is asserted is what the compiler can be held to: nothing spills, shared memory fits, tensor cores are used, loads are
128 bits wide, copies stay in flight while a tile computes, and one variant serves every batch. It says nothing about time.
"""

import contextlib

import cross_compile
import pytest
import torch
from batchgen_kernels import (
    activation,
    attention_triton,
    cases,
    kv_cache,
    launch,
    merge_states,
    paged_decode,
    paged_prefill,
    rms_norm,
    rotary,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = {"sm_80": ("cuda", 80), "sm_90": ("cuda", 90), "sm_100": ("cuda", 100), "gfx942": ("hip", "gfx942")}
ELSEWHERE = ("cuda", 86)  # an architecture without rows of its own
PREFILL_MMA = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "MFMA", "sm_86": "HMMA"}
DECODE_MMA = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_100": "HMMA", "gfx942": "MFMA", "sm_86": "HMMA"}


@pytest.fixture(scope="session")
def table(request):
    """Lines for the end of the run."""
    plugin = next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "TABLE", None) is not None)

    def add(kernel, what, r):
        plugin.TABLE.append(
            f"{kernel:25} {what:38} {r['registers']:4} registers {r['spills']:4} spills "
            f"{r['shared']:7} of {r['shared_limit']} shared {r['wide_loads']:4} of {r['loads']:3} loads wide, "
            f"in flight {r['async_waits'] or '-'}, {r['mma'] or '-'}"
        )

    return add


def compile_attention(kind, target, dtype, head_dim, block_size, num_splits=1, heads=(8, 2)):
    """[(kernel name, report)] of what the launcher would run on this target."""
    module = {"decode": paged_decode, "prefill": paged_prefill}[kind]
    num_tokens = 1 if kind == "decode" else 70
    inputs = cases.paged_inputs([num_tokens] * 2, [300] * 2, *heads, head_dim, block_size, dtype, poison=False)
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


def assert_sound(r, spills=0):
    assert r["spills"] <= spills, r
    assert r["shared"] <= r["shared_limit"], r
    assert r["wide_loads"] > 0, r  # 128 bits; what else is loaded are block ids, lengths and offsets


def assert_copies_in_flight(r, launched):
    """Copies of later tiles are under way while a tile computes: in each loop, for every wait, unless it has two stages."""
    assert r["async_waits"], r
    if launched.num_stages > 2:
        assert min(r["async_waits"]) > 0, r


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
        assert PREFILL_MMA[architecture] in r["mma"], r
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
        assert DECODE_MMA[architecture] in r["mma"], r
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
    assert DECODE_MMA[architecture] in parts[1]["mma"]
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


OPS = {
    "rms_norm_kernel": (rms_norm, "rms_norm", lambda: cases.rms_norm_case((4, 4096), BF16)),
    "rms_norm_kernel of heads": (rms_norm, "rms_norm", lambda: cases.rms_norm_case((4, 8, 128), BF16, strided=True)),
    "rms_norm_kernel with add": (rms_norm, "add_rms_norm", lambda: cases.add_rms_norm_case((4, 4096), BF16)),
    "rotary_embedding_kernel": (rotary, "rotary_embedding", lambda: cases.rotary_embedding_case(4, 32, 8, 128, 128, BF16)),
    "silu_and_mul_kernel": (activation, "silu_and_mul", lambda: cases.silu_and_mul_case(4, 14336, BF16)),
    "write_kv_kernel": (kv_cache, "write_kv", lambda: cases.write_kv_case([1, 2], 3, 16, 8, 128, BF16)),
    "copy_blocks_kernel": (kv_cache, "copy_blocks", lambda: cases.copy_blocks_case([(1, 2)], 2, 3, 16, 8, 128, BF16)),
    "merge_states_kernel": (merge_states, "merge_states", lambda: cases.merge_states_case(5, 32, 128, BF16)),
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


def test_one_variant_serves_every_batch(monkeypatch):
    """A further variant is seconds of compilation in the middle of a job. Aligned or not, one request or many."""
    cos = torch.zeros(300, 32)

    def run(num_decodes, offset):
        lens = [1] * num_decodes + [3] * (num_decodes % 3)
        inputs = cases.paged_inputs(lens, [600 + 17 * num_decodes] * len(lens), 8, 2, 64, 16, BF16, poison=False)
        shifted = {
            field: torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view(t.shape)
            for field, t in inputs.metadata._asdict().items()
            if field in ("block_table", "query_start", "seq_lens", "kv_start", "decode_requests", "prefill_requests")
        }
        metadata = inputs.metadata._replace(max_seq_len=100_000, **shifted)  # as if there were keys for many parts
        plan = attention_triton.plan_attention_triton(metadata, 8, 2, 64)
        plan(*inputs[1:])
        tokens = torch.zeros(sum(lens) + offset, dtype=torch.int64)[offset:]
        x = torch.empty(len(tokens), 64, dtype=BF16)
        rms_norm.add_rms_norm_triton(x, x.clone(), x[0], 1e-5)
        rotary.rotary_embedding_triton(inputs.query, inputs.query, cos, cos, tokens)
        activation.silu_and_mul_triton(x)
        kv_cache.write_kv_triton(inputs.query[:, :2], inputs.query[:, :2], inputs.key_cache, inputs.value_cache, tokens)
        kv_cache.copy_blocks_triton(inputs.key_cache[None, None].expand(2, 2, -1, -1, -1, -1), tokens, tokens)
        merge_states.merge_states_triton(*[torch.empty(len(tokens), 8, 64, dtype=BF16), torch.empty(len(tokens), 8)] * 2)

    kernels = [
        (paged_decode, "paged_decode_kernel"),
        (paged_decode, "merge_splits_kernel"),
        (paged_prefill, "paged_prefill_kernel"),
        (rms_norm, "rms_norm_kernel"),
        (rotary, "rotary_embedding_kernel"),
        (activation, "silu_and_mul_kernel"),
        (kv_cache, "write_kv_kernel"),
        (kv_cache, "copy_blocks_kernel"),
        (merge_states, "merge_states_kernel"),
    ]
    monkeypatch.setattr(attention_triton, "num_processors", lambda device: 132)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cross_compile.target("cuda", 90))
        variants = stack.enter_context(cross_compile.count_variants())
        for module, name in kernels:
            stack.enter_context(cross_compile.capture(module, name))
        for num_decodes in [*range(1, 19), 31, 32, 33, 70, 140]:
            for offset in (0, 1):
                run(num_decodes, offset)
    # decode has two: with and without parts
    assert {name: len(keys) for name, keys in variants.items()} == {
        name: 2 if name == "paged_decode_kernel" else 1 for _, name in kernels
    }
