"""Linear layers: packing, batch invariance, split inputs, offsets past 2^31, wrong inputs. (Cases run in test_ops.py.)"""

import pytest
import torch
from batchgen_kernels import linear, rms_norm
from batchgen_kernels._triton import interpreting
from batchgen_kernels.cases.case import TOLERANCE, relative_error, tolerance
from batchgen_kernels.cases.linear import linear_case
from batchgen_kernels.linear_launch import LinearLaunch
from batchgen_kernels.registry import load

DEVICE = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
OPS = ["linear_invariant", "linear_int8", "linear_fp8", "linear_int4"]


@pytest.mark.parametrize("group_size", linear.GROUP_SIZES)
def test_int4_packs_what_it_unpacks(group_size):
    """Codes by their places in the file's words, and every value within half a step of the original."""
    weight = torch.randn(5, 2 * group_size, generator=torch.Generator().manual_seed(0))
    packed, scale, zero = linear.quantize_int4(weight, group_size)
    values = linear.unpack_int4(packed, zero) * scale[..., None]
    # half a step by the code, and half a step more where the zero itself was rounded
    assert ((values.flatten(1) - weight).abs() <= scale.repeat_interleave(group_size, 1) * 1.0001).all()
    code = (linear.unpack_int4(packed, zero) + zero[..., None]).to(torch.uint8)
    half = group_size // 2
    assert packed[3, 1, 1] == code[3, 1, 1] | code[3, 1, half + 1] << 4


def test_zeros_that_are_no_whole_numbers():
    """The same weights whichever zero their codes are counted from; all columns must agree."""
    packed, scale, zero = linear.quantize_int4(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), 32)
    values = linear.unpack_int4(packed, zero + 0.5)
    assert torch.equal(values, linear.unpack_int4(packed, zero) - 0.5)
    x = torch.eye(64)
    for column in ("reference", "torch", "triton"):
        out = load("linear_int4", column)(x.to(DEVICE), packed.to(DEVICE), scale.to(DEVICE), (zero + 0.5).to(DEVICE))
        want = (values * scale[..., None]).flatten(1).T
        assert torch.allclose(out.cpu(), want, rtol=1e-6), column


def test_quantised_weights_are_near():
    """Half a step at most: 1/127 of the channel's largest value, or a sixteenth of the value (or the least step of e4m3)."""
    weight = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    codes, scale = linear.quantize_int8(weight)
    assert ((codes * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    codes, scale = linear.quantize_fp8(weight)
    error = (codes.float() * scale[:, None] - weight).abs()
    assert (error <= weight.abs() / 15.9 + scale[:, None] * 2**-10).all()


def test_rows_do_not_depend_on_the_batch():
    """Bitwise, at any row count, place and neighbours; with sums long enough for any other order to show."""
    x, weight, _ = linear_case("linear_invariant", 70, 300, 40, FP32, DEVICE).make()
    whole = linear.linear_invariant_triton(x, weight)
    for n in (1, 2, 15, 16, 17, 33):
        assert torch.equal(linear.linear_invariant_triton(x[:n], weight), whole[:n])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(linear.linear_invariant_triton(x[order], weight), whole[order])
    poisoned = torch.cat([torch.full_like(x[:5], float("nan")), x[:9]])
    assert torch.equal(linear.linear_invariant_triton(poisoned, weight)[5:], whole[:9])


def test_rms_norm_rows_do_not_depend_on_the_batch():
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.ones(300, device=DEVICE)
    whole = rms_norm.rms_norm_triton(x, weight, 1e-5)
    for n in (1, 3, 8, 33):
        assert torch.equal(rms_norm.rms_norm_triton(x[-n:].contiguous(), weight, 1e-5), whole[-n:])


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_parts_of_the_inputs_add_up(op, splits):
    """More parts than blocks, so that some are empty, and parts of unequal size."""
    case = linear_case(op, 3, 320, 40, BF16, DEVICE, bias=True, group_size=64)
    args = case.make()
    scale, zero, bias = (None, None, args[2]) if op == "linear_invariant" else (args[2], None, args[3])
    if op == "linear_int4":
        scale, zero, bias = args[2:]
    kind = {"linear_invariant": "plain"}.get(op, op.removeprefix("linear_"))
    launch = LinearLaunch(32, 16, 64, 4, 1)
    out = linear._launch(op, kind, args[0], args[1], scale, zero, bias, launch, num_splits=splits)
    assert relative_error(out, case.run(load(op, "reference"))[0]) <= tolerance(op, "triton", BF16)


def test_parts_where_processors_would_idle():
    assert linear.choose_splits(64, 4096, 132) == 2
    assert linear.choose_splits(264, 4096, 132) == 1
    assert linear.choose_splits(4, 2048, 132) == 2  # parts of a thousand inputs
    assert linear.choose_splits(1, 10**6, 132) == linear.MAX_SPLITS


def test_weight_of_more_than_2_to_the_31_elements():
    """One row of weights in two billion elements of address space."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    base = torch.empty(2**31 + 3 * 2**27, dtype=torch.int8, device=DEVICE)
    weight = base.as_strided((35, 32), (2**26, 1))  # channel 34 begins past 2^31
    weight[:] = torch.arange(35 * 32, device=DEVICE).view(35, 32) % 100
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scale = torch.ones(35, device=DEVICE)
    out = linear.linear_int8_triton(x, weight, scale)
    assert relative_error(out, linear.linear_int8_reference(x, weight, scale)) < TOLERANCE[FP32]


def test_no_tokens():
    assert linear.linear_int8_triton(torch.empty(0, 8), torch.zeros(3, 8, dtype=torch.int8), torch.ones(3)).shape == (0, 3)


X, W8, S = torch.ones(2, 64), torch.zeros(3, 64, dtype=torch.int8), torch.ones(3)
W4, S4 = torch.zeros(3, 2, 16, dtype=torch.uint8), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear.linear_int8_triton(X[0], W8, S), r"linear_int8: x must be \[T, K\]"),
        (lambda: linear.linear_int8_triton(X, W8.int(), S), r"linear_int8: weight must be torch.int8, got torch.int32"),
        (lambda: linear.linear_int8_triton(X[:, :9], W8, S), "linear_int8: x has 9 inputs, the weight 64"),
        (lambda: linear.linear_int8_triton(X, W8, S[:2]), r"linear_int8: scale must be contiguous \[3\], got \[2\]"),
        (lambda: linear.linear_int8_triton(X, W8, S.half()), "linear_int8: scale must be float32"),
        (lambda: linear.linear_int8_triton(X.T.contiguous().T, W8, S), "dense in their last dimension"),
        (lambda: linear.linear_fp8_triton(X, W8, S), "linear_fp8: weight must be torch.float8_e4m3fn"),
        (lambda: linear.linear_int4_triton(X, W4.view(3, 4, 8), S4, S4), "groups must be of 32, 64, 128 weights, got 16"),
        (lambda: linear.linear_int4_triton(X, W4.view(3, 32), S4, S4), r"weight \[N, K / g, g / 2\], got"),
        (lambda: linear.linear_int4_triton(X, W4, S4[:, :1].contiguous(), S4), r"scale must be contiguous \[3, 2\], got"),
        (lambda: linear.linear_int4_triton(X, W4, S4, None), "linear_int4: zero must be given"),
        (lambda: linear.linear_int8_triton(X, W8, None), "linear_int8: scale must be given"),
        (lambda: linear.quantize_int8(X.clone().fill_(float("nan"))), "the weight has 128 values that are NaN or infinite"),
        (lambda: linear.quantize_fp8(X[0]), r"quantize_fp8: weight must be \[N, K\] of floats with K > 0, got \[64\]"),
        (lambda: linear.quantize_int4(X[:, :0]), r"K > 0, got \[2, 0\]"),
        (lambda: linear.linear_invariant_triton(X, X, torch.ones(3)), r"bias must be contiguous \[2\], got \[3\]"),
        (lambda: linear.quantize_int4(X, 48), "group_size must be one of 32, 64, 128 and divide the 64 inputs, got 48"),
        (lambda: linear.quantize_int4(X[:, :50], 32), "divide the 50 inputs, got 32"),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
