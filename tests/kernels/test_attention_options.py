"""Sliding windows, soft caps, sinks and float8 caches: the launchers against the reference, and what each must not touch.

Bounds: `TOLERANCE` holds with options too, as they add no rounding to a 16-bit type, with two exceptions. With a float8
cache weight times scale is rounded to bfloat16 also where the query is float16. A soft cap in float32 is computed from
1 - 2 / (1 + e^2x), which is right to 2^-23 and so leaves a score wrong by cap * 2^-23, and a weight by that share.
"""

import math

import pytest
import torch
from batchgen_kernels import paged_decode, paged_prefill
from batchgen_kernels._triton import interpreting, tl, triton
from batchgen_kernels.attention_options import NO_OPTIONS, AttentionOptions
from batchgen_kernels.attention_reference import plan_attention_reference
from batchgen_kernels.attention_torch import plan_attention_torch
from batchgen_kernels.attention_triton import plan_attention_triton
from batchgen_kernels.cases.attention import paged_inputs, with_options
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.float8 import decode_e4m3
from batchgen_kernels.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Launch(16, 16, 4, 1)
EVERYTHING = {"window": 21, "soft_cap": 5.0, "sinks": True, "fp8": True}


def reference(inputs, options):
    metadata, query, key_cache, value_cache, scale = inputs
    plan = plan_attention_reference(metadata, query.shape[1], key_cache.shape[2], query.shape[2])
    return plan(query, key_cache, value_cache, scale, *options)


def launch_all(inputs, options, launch=SMALL, num_splits=1):
    """Both launchers over the requests of the metadata -> (out, lse), NaN where nothing was written."""
    metadata, query, key_cache, value_cache, scale = inputs
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=DEVICE)
    lse = torch.full(query.shape[:2], math.nan, device=DEVICE)
    index = (metadata.block_table, metadata.query_start, metadata.seq_lens, metadata.kv_start)
    shared = (query, key_cache, value_cache, *index)
    rest = {"launch": launch, "options": options}
    paged_decode.paged_decode(
        *shared, metadata.decode_requests, metadata.max_seq_len, scale, out, lse, num_splits=num_splits, **rest
    )
    paged_prefill.paged_prefill(*shared, metadata.prefill_requests, metadata.max_query_len, scale, out, lse, **rest)
    return out, lse


def allowed(dtype, fp8=False, soft_cap=0.0, **rest):
    return TOLERANCE[BF16 if fp8 and dtype == FP16 else dtype] + (2**-23 * soft_cap if dtype == FP32 else 0)


@pytest.mark.parametrize(("dtype", "block_size"), [(FP32, 16), (BF16, 4), (FP16, 32)])
@pytest.mark.parametrize(
    "what",
    [{"window": 7}, {"window": 30}, {"window": 1000}, {"soft_cap": 30.0}, {"sinks": True}, {"fp8": True}, EVERYTHING],
    ids=lambda what: "-".join(what),
)
def test_option(what, block_size, dtype):
    """Blocks smaller than a tile, as large and larger; -1 in unused table entries, NaN in slots of nobody."""
    lens = ([1, 10, 1, 3], [67, 42, 16, 40])
    inputs, options = with_options(paged_inputs(*lens, 6, 2, 32, block_size, dtype, DEVICE, padding=-1), **what)
    out, _ = launch_all(inputs, options, num_splits=1 if block_size == 16 else 3)
    assert relative_error(out, reference(inputs, options)) < allowed(dtype, **what)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (3, 1), (5, 1), (7, 1), (20, 1), (71, 1), (14, 2)])
def test_any_group(num_q_heads, num_kv_heads):
    inputs = paged_inputs([1, 3, 9], [19, 21, 30], num_q_heads, num_kv_heads, 16, 16, BF16, DEVICE, padding=-1)
    inputs, options = with_options(inputs, **EVERYTHING)
    assert relative_error(launch_all(inputs, options)[0], reference(inputs, options)) < TOLERANCE[BF16]


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192, 256])
def test_any_head_dim(head_dim):
    inputs, options = with_options(paged_inputs([1, 5], [35, 21], 2, 1, head_dim, 16, BF16, DEVICE), **EVERYTHING)
    assert relative_error(launch_all(inputs, options)[0], reference(inputs, options)) < TOLERANCE[BF16]


def test_the_reference_against_torch():
    """A window as a mask of torch's own attention; and what an option does where it should do nothing, or everything."""
    inputs = paged_inputs([9], [33], 4, 2, 64, 16, FP32, poison=False)
    blocks = inputs.metadata.block_table[0].long()
    k, v = (c[blocks].flatten(0, 1)[None, :33].transpose(1, 2) for c in (inputs.key_cache, inputs.value_cache))
    q, position, key = inputs.query[None].transpose(1, 2), torch.arange(24, 33)[:, None], torch.arange(33)
    mask = (key <= position) & (key > position - 7)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=inputs.scale, enable_gqa=True)
    assert relative_error(reference(inputs, AttentionOptions(window=7)), want[0].transpose(0, 1)) < 1e-6
    own = v[0, :, 24:].transpose(0, 1).repeat_interleave(2, 1)
    assert relative_error(reference(inputs, AttentionOptions(window=1)), own) < 1e-6
    plain = reference(inputs, NO_OPTIONS)
    assert torch.equal(reference(inputs, AttentionOptions(window=33)), plain)
    assert torch.equal(reference(inputs, AttentionOptions(sinks=torch.full((4,), -math.inf))), plain)
    assert relative_error(reference(inputs, AttentionOptions(soft_cap=1e6)), plain) < 1e-6
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * inputs.scale).masked_fill(key > position, -math.inf)
    z = scores.exp().sum(-1)[0].T[..., None]  # a sink of ln z takes half of the weight
    capped = (2 * (scores / 2).tanh()).masked_fill(key > position, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    assert relative_error(reference(inputs, AttentionOptions(soft_cap=2.0)), capped[0].transpose(0, 1)) < 1e-6
    for t in (0, 8):
        halved = reference(inputs, AttentionOptions(sinks=z[t, :, 0].log().contiguous()))[t]
        assert relative_error(halved, plain[t] / 2) < 1e-6


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sink_joins_once(num_splits):
    """Also where nothing else is seen, and as part of lse: ln(e^lse + e^sink)."""
    inputs = paged_inputs([1, 1, 4], [64, 20, 6], 4, 2, 64, 16, FP32, DEVICE)
    metadata = inputs.metadata._replace(kv_start=torch.tensor([64, 0, 0], dtype=torch.int32, device=DEVICE))
    inputs, options = with_options(inputs._replace(metadata=metadata), sinks=True)
    out, lse = launch_all(inputs, options, num_splits=num_splits)
    without, lse_without = launch_all(inputs, NO_OPTIONS, num_splits=num_splits)
    assert not out[0].any() and relative_error(lse[0], options.sinks) < 1e-6
    total = torch.logaddexp(lse_without, options.sinks)
    assert relative_error(lse, total) < 1e-6
    assert relative_error(out, without * (lse_without - total).exp()[..., None]) < TOLERANCE[FP32]


def count_tiles(monkeypatch):
    """A list that gets an entry for each product of matrices; a tile has two."""
    from triton.runtime.interpreter import InterpreterBuilder

    dots, create_dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, *args: (dots.append(1), create_dot(self, *args))[1])
    return dots


@pytest.mark.skipif(not interpreting(), reason="counts the products of the interpreter")
@pytest.mark.parametrize("block_size", [16, 64])
def test_hidden_keys_are_neither_read_nor_computed(block_size, monkeypatch):
    """A table may have lost the blocks before a window: -1 there, NaN in every block that is hidden whole."""
    lens = ([1, 9, 1], [300, 333, 12])
    inputs = paged_inputs(*lens, 2, 1, 16, block_size, BF16, padding=-1)
    window = 40
    want = reference(inputs, AttentionOptions(window))
    for r, (n, seq_len) in enumerate(zip(*lens)):
        hidden = max(0, seq_len - n - window + 1) // block_size
        for cache in (inputs.key_cache, inputs.value_cache):
            cache[inputs.metadata.block_table[r, :hidden].long()] = math.nan
        inputs.metadata.block_table[r, :hidden] = -1
    dots = count_tiles(monkeypatch)
    for num_splits in (1, 2):
        out, _ = launch_all(inputs, AttentionOptions(window), num_splits=num_splits)
        assert relative_error(out, want) < TOLERANCE[BF16]
    # 40 keys lie in 4 tiles of 16 at most, those of a query tile of 8 tokens in 4, of 1 token in 4, and 12 keys in one
    assert len(dots) // 2 <= 2 * (4 + 1) + 2 * (4 + 4)


def test_long_contexts():
    """100,000 tokens, and one: decode in parts and a chunk at the end; with a window only its keys are read."""
    inputs = paged_inputs([1, 2, 1], [100_000, 99_999, 1], 1, 1, 16, 64, FP32, DEVICE)
    launch = Launch(16, 2048, 4, 1)
    for options in (NO_OPTIONS, AttentionOptions(window=3000)):
        out, _ = launch_all(inputs, options, launch, num_splits=2)
        # sums of 50,000 terms: float32 in 2,048 at a time
        assert relative_error(out, reference(inputs, options)) < 2 * TOLERANCE[FP32]


@pytest.mark.parametrize("plan_attention", [plan_attention_reference, plan_attention_torch, plan_attention_triton])
@pytest.mark.parametrize("what", [{}, {"window": 12}, {"fp8": True}], ids=["plain", "window", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_is_not_finite_harms_only_those_who_see_it(plan_attention, what, bad, block_size):
    """A key or a value of token 20 of 33, whose chunk begins at token 10: tokens before it do not see it, nor do those that
    are a window later."""
    for name in ("key_cache", "value_cache"):
        inputs = paged_inputs([23, 5], [33, 5], 4, 2, 64, block_size, BF16, DEVICE, poison=False)
        if name == "key_cache":
            bad = math.nan  # an infinite key gives infinite scores of both signs
        clean = reference(*with_options(inputs, **what))
        table = inputs.metadata.block_table
        cache = getattr(inputs, name)
        cache[int(table[0, 20 // block_size]), 20 % block_size, 1] = bad
        (metadata, query, key_cache, value_cache, scale), options = with_options(inputs, **what)
        out = plan_attention(metadata, 4, 2, 64)(query, key_cache, value_cache, scale, *options)
        sees = torch.zeros(28, dtype=torch.bool)
        sees[10 : min(23, 10 + (options.window or 23))] = True
        harmed = ~out[:, 2:].isfinite().all(-1).all(-1).cpu()
        assert torch.equal(harmed, sees)
        assert not out[sees, 2:].isfinite().any()
        assert relative_error(out[~sees], clean[~sees]) < TOLERANCE[BF16]
        if plan_attention is not plan_attention_torch:  # which drops all heads of a token
            assert relative_error(out[:, :2], clean[:, :2]) < TOLERANCE[BF16]


@triton.jit
def decode_kernel(bits_ptr, out_ptr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, decode_e4m3(tl.load(bits_ptr + at)))


def test_every_byte_of_float8():
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](bits, out)
    want = bits.view(torch.float8_e4m3fn).float()
    assert torch.equal(out.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


def test_float8_in_a_16_bit_type_with_small_and_large_values():
    """Scales of 1e-6 and 100 in float16: weight times scale would vanish in it."""
    inputs = paged_inputs([1, 9], [50, 30], 4, 2, 64, 16, FP16, DEVICE, poison=False)
    inputs.value_cache[:, :, 0] *= 3e-4
    inputs.value_cache[:, :, 1] *= 1e4
    inputs, options = with_options(inputs, fp8=True)
    out, want = launch_all(inputs, options)[0], reference(inputs, options)
    for heads in (slice(0, 2), slice(2, 4)):
        assert relative_error(out[:, heads], want[:, heads]) < 2 * TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_soft_cap_at_both_ends(dtype):
    """Scores of hundreds of either sign, which overflow e^2x and make it vanish, and of nearly nothing."""
    inputs = paged_inputs([1, 6], [40, 40], 4, 2, 64, 16, dtype, DEVICE)
    for factor in (1000, 1e-4):
        scaled = inputs._replace(query=inputs.query * factor)
        options = AttentionOptions(soft_cap=30.0)
        assert relative_error(launch_all(scaled, options)[0], reference(scaled, options)) < allowed(dtype, soft_cap=30.0)


def test_scales_past_2_to_the_31_elements():
    """Strides as of a cache of a large GPU; nothing but a few blocks is touched, so it costs address space, not memory."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    inputs, options = with_options(paged_inputs([1, 3], [20, 18], 2, 1, 16, 16, BF16, DEVICE, poison=False), fp8=True)
    num_blocks = inputs.key_cache.shape[0]
    far = 2**31 // (num_blocks - 2)  # the last block begins past 2^31 elements
    buffers = [torch.empty(far * num_blocks, dtype=dtype, device=DEVICE) for dtype in (torch.uint8, FP32)]
    try:
        cache = buffers[0].as_strided((num_blocks, 16, 1, 16), (far, 16, 16, 1)).view(torch.float8_e4m3fn)
        scale = buffers[1].as_strided((num_blocks, 16, 1), (far, 1, 1))
    except RuntimeError as e:
        pytest.skip(f"no address space: {e}")
    cache.view(torch.uint8).copy_(inputs.key_cache.view(torch.uint8))
    scale.copy_(options.key_scale)
    last = inputs.metadata.block_table.max()
    assert int(last) * far > 2**31
    want = reference(inputs._replace(value_cache=inputs.key_cache), options._replace(value_scale=options.key_scale))
    for launch in (SMALL, Launch(16, 32, 4, 1)):  # a block id per tile, and one per key
        moved = inputs._replace(key_cache=cache, value_cache=cache)
        out, _ = launch_all(moved, options._replace(key_scale=scale, value_scale=scale), launch, num_splits=2)
        assert relative_error(out, want) < TOLERANCE[BF16]


def test_options_may_differ_from_layer_to_layer():
    inputs, sinks = with_options(paged_inputs([1, 30], [40, 38], 4, 2, 64, 16, FP32, DEVICE), sinks=True)
    for plan_attention in (plan_attention_torch, plan_attention_triton):
        plan = plan_attention(inputs.metadata, 4, 2, 64)
        clean = [c.nan_to_num(0) for c in inputs[2:4]]
        for options in (NO_OPTIONS, AttentionOptions(window=9), sinks, AttentionOptions(window=17), NO_OPTIONS):
            out = plan(inputs.query, *clean, inputs.scale, *options)
            assert relative_error(out, reference(inputs, options)) < TOLERANCE[FP32]


def test_tiles_cover_every_token_once_and_the_longest_come_first():
    generator = torch.Generator().manual_seed(0)
    for block_q, num_requests in [(1, 3), (4, 1), (8, 7), (18, 40)]:
        lens = torch.randint(0, 60, (num_requests,), generator=generator)
        computed = torch.randint(0, 500, (num_requests,), generator=generator)
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int()
        requests = torch.arange(num_requests)[torch.rand(num_requests, generator=generator) < 0.8]
        if len(requests) == 0:
            requests = torch.tensor([0])
        rest = (int(lens.sum()), max(1, int(lens.max())), block_q)
        tiles = paged_prefill.prefill_tiles(query_start, (lens + computed).int(), requests, *rest)
        there = tiles[tiles[:, 0] >= 0].tolist()
        assert [-1] * (len(tiles) - len(there)) == tiles[len(there) :, 0].tolist()
        assert sorted(there) == [[r, t] for r in requests.tolist() for t in range(0, int(lens[r]), block_q)]
        num_keys = [int(computed[r]) + t for r, t in there]
        assert num_keys == sorted(num_keys, reverse=True)


def test_short_chunks_get_small_tiles(monkeypatch):
    monkeypatch.setattr(paged_prefill, "num_processors", lambda device: 132)
    monkeypatch.setattr(paged_prefill, "current_architecture", lambda: "sm_90")

    def rows(num_tokens, num_requests, max_query_len, num_q_heads=32, num_kv_heads=8):
        query = torch.empty(1, 1, 1, dtype=BF16).expand(num_tokens, num_q_heads, 128)
        cache = torch.empty(3, 16, num_kv_heads, 128, dtype=BF16)
        index = torch.zeros(num_requests + 1, dtype=torch.int32), torch.zeros(num_requests, dtype=torch.int32)
        requests = torch.arange(num_requests)
        return paged_prefill.plan_prefill(query, cache, *index, requests, max_query_len).launch.block_m

    assert rows(8192, 1, 8192) == 128
    assert rows(8192, 128, 64) == 128  # 64 tokens of 4 heads each are 256 rows
    assert rows(8192, 160, 64) == 64
    assert rows(600, 100, 20) == 64
    assert rows(300, 1, 300) == 64  # 10 tiles of 128 rows for each of 8 heads: fewer than processors
    assert rows(300, 1, 300, 64, 16) == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AttentionOptions(window=-1), "window must be a whole number of tokens"),
        (AttentionOptions(window=2.5), "window must be a whole number of tokens"),
        (AttentionOptions(soft_cap=-1.0), "soft_cap must be positive"),
        (AttentionOptions(soft_cap=math.inf), "soft_cap must be positive"),
        (AttentionOptions(sinks=torch.zeros(3)), r"sinks must be contiguous float32 \[4\], got \[3\]"),
        (AttentionOptions(sinks=torch.zeros(4, dtype=BF16)), "sinks must be contiguous float32"),
        (AttentionOptions(key_scale=torch.zeros(5, 16, 2)), "must be given both or not at all"),
        (AttentionOptions(0, 0.0, None, *[torch.zeros(5, 16, 2)] * 2), "a cache of torch.bfloat16 has no scales"),
    ],
)
def test_wrong_options_are_named(options, message):
    inputs = paged_inputs([1], [20], 4, 2, 64, 16, BF16, DEVICE, poison=False)
    for plan_attention in (plan_attention_reference, plan_attention_torch, plan_attention_triton):
        with pytest.raises(ValueError, match=f"attention: .*{message}"):
            plan_attention(inputs.metadata, 4, 2, 64)(*inputs[1:], *options)
    with pytest.raises(ValueError, match=f"paged_decode: .*{message}"):
        launch_all(inputs, options)


def test_wrong_scales_are_named():
    inputs, options = with_options(paged_inputs([1], [20], 4, 2, 64, 16, BF16, DEVICE, poison=False), fp8=True)
    scale = options.key_scale
    for wrong, message in (
        ({"key_scale": None, "value_scale": None}, "a cache of torch.float8_e4m3fn needs scales"),
        ({"key_scale": scale[..., None]}, r"key_scale must be float32 \[5, 16, 2\]"),
        ({"value_scale": scale.half()}, "value_scale must be float32"),
        ({"value_scale": scale.transpose(1, 2).contiguous().transpose(1, 2)}, "must have the same strides"),
    ):
        with pytest.raises(ValueError, match=message):
            launch_all(inputs, options._replace(**wrong))
