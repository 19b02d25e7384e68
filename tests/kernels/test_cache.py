"""What goes into the key/value cache: the float8 encoder, scales, the fused write, offsets past 2^31."""

import math

import pytest
import torch
from batchgen_kernels import float8, kv_cache, rope_write, rotary
from batchgen_kernels._triton import interpreting, tl, triton
from batchgen_kernels.cases.cache import rope_and_write_kv_case
from batchgen_kernels.cases.case import TOLERANCE, relative_error
from batchgen_kernels.float8 import E4M3, dequantize_rows, quantize_rows
from batchgen_kernels.registry import load

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
BF16 = torch.bfloat16


@triton.jit
def encode_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < SIZE, other=0.0)
    tl.store(out_ptr + i, float8.encode_e4m3(x), mask=i < SIZE)


def encode(x):
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    encode_kernel[(-(-x.numel() // 16384),)](x, out, SIZE=x.numel(), BLOCK=16384)
    return out


def test_encoder_equals_torch():
    """Every float16, every number halfway between two codes with its neighbours, and what float32 has beyond float16."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    middle = (codes[1:] + codes[:-1]) / 2
    edges = torch.cat([middle, middle.nextafter(middle + 1), middle.nextafter(middle - 1), codes])
    beyond = torch.tensor([1e30, 3.4e38, 1e-38, 1e-45, 464.0, 464.1, 480.0, math.inf, math.nan])
    x = torch.cat([halves, edges, -edges, beyond, -beyond]).to(DEVICE)
    want, nan = x.clamp(-448, 448).to(E4M3).view(torch.uint8), x.isnan()
    got = encode(x)
    assert torch.equal(got[~nan], want[~nan])
    assert ((got[nan] & 0x7F) == 0x7F).all()


def test_encoder_is_exact_on_all_codes():
    codes = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(encode(codes.view(E4M3).float()), codes)


@pytest.mark.parametrize("implementation", ["reference", "torch", "triton"])
def test_round_trip(implementation):
    """Half of the last of 3 bits of mantissa: 2^-4 of an element, or of the smallest normal number if it is below that."""
    key = torch.randn(6, 3, 80, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    key *= torch.tensor([1e-20, 1e-3, 1.0, 50.0, 1e4, 1e30], device=DEVICE)[:, None, None]
    cache = torch.zeros(2, 2, 8, 3, 80, dtype=E4M3, device=DEVICE)
    scale = torch.zeros(2, 2, 8, 3, device=DEVICE)
    slots = torch.arange(9, 15, device=DEVICE)
    load("write_kv", implementation)(key, -key, *cache, slots, *scale)
    for sign, codes, scales in zip((1, -1), cache, scale):
        got = dequantize_rows(codes, scales).flatten(0, 1)[9:15]
        smallest = 2.0**-6 * scales.flatten(0, 1)[9:15, :, None]
        # the scale, the product with its inverse and with itself are rounded: 2^-22 of the element
        assert ((got - sign * key).abs() <= (2.0**-4 + 2.0**-22) * torch.maximum(key.abs(), smallest)).all()
        assert ((got.abs().amax(-1) / key.abs().amax(-1) - 1).abs() < 1e-6).all(), "the largest is one of the codes"


def test_rows_without_a_scale():
    rows = torch.zeros(4, 8)
    rows[1, 2], rows[2, 3], rows[3, 0] = 1e-31, math.inf, math.nan
    codes, scale = quantize_rows(rows)
    assert torch.equal(scale[:2], torch.ones(2)) and scale[2:].isnan().all()
    assert (codes[:2].float() == 0).all() and codes[2:].float().isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_fused_equals_the_three_ops(implementation, interleaved, float8, dtype):
    """It rounds where they round. Bitwise on torch; on Triton two sums of squares take another order, so now and then a last
    digit differs (and with it, in one of 2^20 elements of float32, a code: none in these)."""
    case = rope_and_write_kv_case(
        [9, 18, -1, 6], 5, 4, 5, 2, 80, 48, dtype, DEVICE, norm=True, interleaved=interleaved, float8=float8
    )
    args = case.make()
    query, key, value, key_cache, value_cache, slots, cos, sin, positions, o = args
    parts = {name: load(name, implementation) for name in ("rms_norm", "rotary_embedding", "write_kv")}
    q, k = parts["rms_norm"](query, o["q_norm"], o["eps"]), parts["rms_norm"](key, o["k_norm"], o["eps"])
    parts["rotary_embedding"](q, k, cos, sin, positions, interleaved)
    parts["write_kv"](k, value, key_cache, value_cache, slots, o["key_scale"], o["value_scale"])
    if float8:
        key_cache, value_cache = dequantize_rows(key_cache, o["key_scale"]), dequantize_rows(value_cache, o["value_scale"])
    outputs = case.run(load("rope_and_write_kv", implementation))
    bound = 0.0 if implementation == "torch" else {torch.float32: 1e-6, BF16: 3e-4, torch.float16: 3e-5}[dtype]
    for out, want in zip(outputs, (q, value, key_cache, value_cache), strict=True):
        assert relative_error(out, want) <= bound


def test_fused_without_norm_or_rest():
    """The query past the rotated part, keys and values inside the fused tensor: nothing else of it is touched."""
    case = rope_and_write_kv_case([9, -1], 5, 4, 5, 2, 80, 48, BF16, DEVICE)
    args = case.make()
    before = args[0]._base.clone()
    load("rope_and_write_kv", "triton")(*args[:-1], **args[-1])
    after = args[0]._base
    assert torch.equal(after[:, 5:], before[:, 5:]) and torch.equal(after[:, :5, 48:], before[:, :5, 48:])
    assert not torch.equal(after[:, :5, :48], before[:, :5, :48])


def far_view(shape, strides):
    """A view of untouched memory, which costs address space only."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
    return lambda dtype: torch.empty(size, dtype=dtype, device=DEVICE).as_strided(shape, strides)


@pytest.mark.parametrize("far", ["block", "slot", "head"])
@pytest.mark.parametrize("fused", [False, True], ids=["write_kv", "fused"])
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_offsets_past_2_to_the_31(far, fused, float8):
    """The last block, slot or head lies past 2^31 elements: of the cache, and of its scales but for heads."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # NaN everywhere would be real memory
    step = {"block": 2**31 // 3 + 5, "slot": 2**31 // 3 + 5, "head": 2**31 // 3 + 5}[far]
    strides = {"block": (step, 128, 32, 1), "slot": (128, step, 32, 1), "head": (128, 32, step, 1)}[far]
    shape = (5, 4, 4, 24)
    caches = [far_view(shape, strides)(E4M3 if float8 else BF16) for _ in range(2)]
    scales = [far_view(shape[:3], {"slot": (4, step, 1)}.get(far, (step, 4, 1)))(torch.float32) for _ in range(2)]
    scales = scales if float8 else [None, None]
    heads = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(0)).to(BF16).to(DEVICE)
    slots, positions = torch.tensor([19], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    if fused:
        cos, sin = torch.ones(1, 12, device=DEVICE), torch.zeros(1, 12, device=DEVICE)
        rope_write.rope_and_write_kv_triton(
            heads.clone(), heads, heads, *caches, slots, cos, sin, positions, key_scale=scales[0], value_scale=scales[1]
        )
    else:
        kv_cache.write_kv_triton(heads, heads, *caches, slots, *scales)
    for cache, scale in zip(caches, scales):
        if scale is None:
            assert torch.equal(cache[-1, -1], heads[0])
        else:
            codes, want = quantize_rows(heads[0])
            assert torch.equal(cache[-1, -1].float(), codes.float()) and torch.equal(scale[-1, -1], want)


@pytest.mark.parametrize("dtype", [E4M3, torch.float32])
def test_copy_past_2_to_the_31(dtype):
    """Layers, planes and blocks that far apart; bytes and scales."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    for strides in ((2**31 + 8, 64, 16, 4, 1), (64, 2**31 + 8, 16, 4, 1), (256, 128, 2**31 // 3 + 8, 4, 1)):
        cache = far_view((2, 2, 4, 3, 4), strides)(dtype)
        for layer in range(2):
            for plane in range(2):
                cache[layer, plane, 3] = torch.full((3, 4), 1.0 + layer + 2 * plane).to(dtype)
        kv_cache.copy_blocks_triton(cache, torch.tensor([3], device=DEVICE), torch.tensor([1], device=DEVICE))
        for layer in range(2):
            for plane in range(2):
                assert (cache[layer, plane, 1].float() == 1.0 + layer + 2 * plane).all()


def test_queries_past_2_to_the_31():
    """Tokens and heads of a query that far apart: rotated in place by both ops."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    cos, sin = torch.zeros(1, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    for strides in ((2**30, 8, 1), (64, 2**30, 1)):
        for interleaved in (False, True):
            query = far_view((3, 3, 8), strides)(BF16)
            query[-1, -1] = torch.arange(8, device=DEVICE)
            key, positions = (
                torch.zeros(3, 1, 8, dtype=BF16, device=DEVICE),
                torch.zeros(3, dtype=torch.int64, device=DEVICE),
            )
            rotary.rotary_embedding_triton(query, key, cos, sin, positions, interleaved)
            want = [-1, 0, -3, 2, -5, 4, -7, 6] if interleaved else [-4, -5, -6, -7, 0, 1, 2, 3]
            assert query[-1, -1].tolist() == want
            caches = torch.zeros(2, 1, 4, 1, 8, dtype=BF16, device=DEVICE)
            slots = torch.full((3,), -1, device=DEVICE)
            rope_write.rope_and_write_kv_triton(
                query, key, key, *caches, slots, cos, sin, positions, interleaved=interleaved
            )
            assert query[-1, -1].tolist() == [-x for x in range(8)], "twice a quarter turn"


HEADS, TABLE, AT = torch.ones(3, 2, 8), torch.ones(9, 4), torch.zeros(3, dtype=torch.int64)
CACHE, SCALE = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2)
CODES = CACHE.to(E4M3)


def fused(query=HEADS, key=HEADS, value=HEADS, caches=(CACHE, CACHE), slots=AT, table=TABLE, positions=AT, **options):
    return lambda: rope_write.rope_and_write_kv_triton(query, key, value, *caches, slots, table, table, positions, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (fused(key=HEADS[:2]), "rope_and_write_kv: query .* must agree"),
        (fused(value=HEADS[:, :1]), "rope_and_write_kv: key and value"),
        (fused(slots=AT[:2]), "rope_and_write_kv: key and value"),
        (fused(query=HEADS.half()), "rope_and_write_kv: query and key must share one dtype"),
        (fused(table=torch.ones(9, 5)), "rope_and_write_kv: cos rotates 10 elements, but head_dim is 8"),
        (fused(q_norm=torch.ones(8)), "rope_and_write_kv: give both q_norm and k_norm, or neither"),
        (fused(q_norm=torch.ones(8), k_norm=torch.ones(4)), r"rope_and_write_kv: k_norm must be contiguous \[8\]"),
        (fused(caches=(CODES, CODES)), "rope_and_write_kv: key_scale and value_scale belong to caches of float8_e4m3fn"),
        (fused(key_scale=SCALE, value_scale=SCALE), "belong to caches of float8_e4m3fn, got caches of torch.float32"),
        (fused(caches=(CODES, CODES), key_scale=SCALE), "rope_and_write_kv: key_scale and value_scale belong"),
        (fused(caches=(CODES, CACHE), key_scale=SCALE, value_scale=SCALE), "must share one dtype"),
        (fused(caches=(CODES, CODES), key_scale=SCALE[:1], value_scale=SCALE), r"key_scale must be \[2, 4, 2\] float32"),
        (
            fused(caches=(CODES, CODES), key_scale=SCALE, value_scale=SCALE.half()),
            r"value_scale must be \[2, 4, 2\] float32",
        ),
        (
            fused(caches=(CODES, CODES), key_scale=SCALE, value_scale=torch.zeros(2, 2, 4).mT),
            "key_scale and value_scale must have the same strides",
        ),
        (lambda: load("gelu_and_mul", "triton")(HEADS[0], "erf"), 'gelu_and_mul: approximate must be "none" or "tanh"'),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
