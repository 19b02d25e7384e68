"""Linear layers with quantised weights, and one whose rows do not depend on their neighbours.

    y[t, n] = (sum_k x[t, k] w[n, k]) + bias[n]            with w[n, k] =
        linear_invariant   weight[n, k]
        linear_int8        weight[n, k] scale[n]                                int8, one scale an output channel
        linear_fp8         weight[n, k] scale[n]                                e4m3, likewise
        linear_int4        (code[n, k] - zero[n, k // g]) scale[n, k // g]      four bits, groups of g neighbours

Only weights are quantised. They are turned into numbers of x's dtype in registers, which is exact (8 bits of integer fit in
the 8 bits of bfloat16's significand), and scales multiply the float32 sums, so quantised weights are rounded nowhere; but
a zero that is no whole number, which other quantisers make, costs one rounding of code minus zero.

The product is computed as y^T = w x^T: the weight is the left operand, which tensor cores take from registers, where it was
decoded; and its channels fill the 64 rows that Hopper's warpgroup instruction needs, however few the tokens are.

Packing of int4: [N, K / g, g / 2], where byte j of a group of g weights holds weight j in its low half and weight j + g / 2
in its high half, so that each half is a run of neighbours and nothing is shuffled.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton
from batchgen_kernels.float8 import E4M3, decode_e4m3
from batchgen_kernels.launch import DTYPES, current_architecture, num_processors
from batchgen_kernels.linear_launch import LinearLaunch, linear_launch
from batchgen_kernels.paged_tile import dot_precision

GROUP_SIZES = (32, 64, 128)
MAX_SPLITS = 8
MIN_SPLIT_K = 1024  # a shorter part costs more to merge than it saves


# ---- quantisation -----------------------------------------------------------------------------------------------------


def _check_weight(what: str, weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] == 0 or not weight.is_floating_point():
        raise ValueError(f"{what}: weight must be [N, K] of floats with K > 0, got {list(weight.shape)} {weight.dtype}")
    if not weight.is_meta and not torch.isfinite(weight).all():
        raise ValueError(f"{what}: the weight has {int((~torch.isfinite(weight)).sum())} values that are NaN or infinite")


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (int8 [N, K], scale [N] float32), to nearest, the largest of a channel at 127.
    Raises ValueError, like all three, for a weight that is not a matrix of finite numbers."""
    _check_weight("quantize_int8", weight)
    scale = weight.float().abs().amax(1).clamp(min=1e-30) / 127
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], scale [N] float32), the largest of a channel at 448."""
    _check_weight("quantize_fp8", weight)
    scale = weight.float().abs().amax(1).clamp(min=1e-30) / 448
    return (weight.float() / scale[:, None]).to(E4M3), scale


def quantize_int4(weight: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (packed uint8 [N, K / g, g / 2], scale and zero [N, K / g] float32), least and greatest of a group at
    0 and 15; zeros are whole. Raises ValueError if K is not a multiple of group_size."""
    _check_weight("quantize_int4", weight)
    num_out, num_in = weight.shape
    if group_size not in GROUP_SIZES or num_in % group_size:
        raise ValueError(
            f"quantize_int4: group_size must be one of {', '.join(map(str, GROUP_SIZES))} and divide the {num_in} inputs, "
            f"got {group_size}"
        )
    groups = weight.float().view(num_out, -1, group_size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)  # so that zero is a code
    scale = ((high - low) / 15).clamp(min=1e-30)
    zero = (-low / scale).round()
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8)
    half = group_size // 2
    return codes[..., :half] | codes[..., half:] << 4, scale, zero


def unpack_int4(packed: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """packed [N, K / g, g / 2] -> codes minus their zeros, [N, K / g, g] float32."""
    return torch.cat([packed & 15, packed >> 4], -1).float() - zero[..., None]


# ---- reference and torch --------------------------------------------------------------------------------------------


def _add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def linear_invariant_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K] of x's dtype, bias [N] -> [T, N] of x's dtype."""
    return _add_bias(x.double() @ weight.double().T, bias).to(x.dtype)


def linear_int8_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], weight [N, K] int8, scale [N] float32, bias [N] of x's dtype -> [T, N] of x's dtype."""
    return _add_bias(x.double() @ weight.double().T * scale.double(), bias).to(x.dtype)


def linear_fp8_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], weight [N, K] float8_e4m3fn, scale [N] float32, bias [N] of x's dtype -> [T, N] of x's dtype."""
    return _add_bias(x.double() @ weight.float().double().T * scale.double(), bias).to(x.dtype)


def linear_int4_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], weight [N, K / g, g / 2] uint8, scale and zero [N, K / g] float32, bias [N] -> [T, N] of x's dtype."""
    values = unpack_int4(weight, zero).double() * scale.double()[..., None]
    return _add_bias(x.double() @ values.flatten(1).T, bias).to(x.dtype)


def linear_invariant_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Invariant where the BLAS is: MKL in its strict mode (MKL_CBWR=AUTO,STRICT)."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_int8_torch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _add_bias(torch.nn.functional.linear(x.float(), weight.float()) * scale, bias).to(x.dtype)


def linear_fp8_torch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return linear_int8_torch(x, weight, scale, bias)


def linear_int4_torch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    values = unpack_int4(weight, zero) * scale[..., None]
    return _add_bias(torch.nn.functional.linear(x.float(), values.flatten(1)), bias).to(x.dtype)


# ---- triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def decode_weight(w, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Bytes as numbers of x's dtype; exact."""
    if KIND == "fp8":
        return decode_e4m3(w).to(DTYPE)
    return w.to(DTYPE)


@triton.jit
def store_outputs(acc, out_ptr, scale_ptr, bias_ptr, channel, token, num_tokens, stride_out, NUM_OUT: tl.constexpr):
    """acc [channels, tokens] float32, scaled, with bias, to out [T, N]."""
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + channel, mask=channel < NUM_OUT, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=channel < NUM_OUT, other=0.0).to(tl.float32)[:, None]
    cell_ok = (channel < NUM_OUT)[:, None] & (token < num_tokens)[None, :]
    out_tile = out_ptr + token.to(tl.int64)[None, :] * stride_out + channel[:, None]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=cell_ok)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr,
    weight_ptr,  # of int4: two to a byte
    out_ptr,  # of x's dtype; if SPLITS > 1: [SPLITS, T, N] float32
    scale_ptr,  # [N] (int4: [N, K / GROUP_SIZE]) float32, or None
    zero_ptr,  # of int4: [N, K / GROUP_SIZE] float32
    bias_ptr,  # [N], or None
    num_tokens,
    stride_x,
    stride_weight,
    stride_out,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    KIND: tl.constexpr,  # "plain", "int8", "fp8", "int4"
    GROUP_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # channels
    BLOCK_T: tl.constexpr,  # tokens
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of channels and tokens, over its part of the inputs. Tiles of tokens are the fastest: they share a weight."""
    # past the end the last token and channel are read once more, so that no load needs a mask; nothing of that is stored
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    x_row = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64) * stride_x
    safe_channel = tl.minimum(channel, NUM_OUT - 1).to(tl.int64)
    weight_row = weight_ptr + safe_channel * stride_weight
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    BLOCKS: tl.constexpr = (NUM_IN + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    first = split * PART
    last = tl.minimum(first + PART, BLOCKS)
    if KIND == "int4":  # BLOCK_K is the size of a group
        HALF: tl.constexpr = BLOCK_K // 2
        column = tl.arange(0, HALF)
        group_row = safe_channel * BLOCKS
        for block in range(first, last):
            codes = tl.load(weight_row[:, None] + (block * HALF + column)[None, :])
            zero = tl.load(zero_ptr + group_row + block)
            scale = tl.load(scale_ptr + group_row + block)
            x_tile = x_row[None, :] + (block * BLOCK_K + column)[:, None]
            low = ((codes & 15).to(tl.float32) - zero[:, None]).to(x_ptr.dtype.element_ty)
            high = ((codes >> 4).to(tl.float32) - zero[:, None]).to(x_ptr.dtype.element_ty)
            part = tl.dot(low, tl.load(x_tile), input_precision=PRECISION)
            part = tl.dot(high, tl.load(x_tile + HALF), part, input_precision=PRECISION)
            acc += part * scale[:, None]
    else:
        column = tl.arange(0, BLOCK_K)
        for block in range(first, last):
            k = block * BLOCK_K + column
            if NUM_IN % BLOCK_K == 0:
                w = tl.load(weight_row[:, None] + k[None, :])
                x = tl.load(x_row[None, :] + k[:, None])
            else:
                w = tl.load(weight_row[:, None] + k[None, :], mask=(k < NUM_IN)[None, :], other=0)
                x = tl.load(x_row[None, :] + k[:, None], mask=(k < NUM_IN)[:, None], other=0.0)
            acc = tl.dot(decode_weight(w, x.dtype, KIND), x, acc, input_precision=PRECISION)
    if SPLITS > 1:
        part_ptr = out_ptr + split.to(tl.int64) * num_tokens * NUM_OUT
        store_outputs(acc, part_ptr, None, None, channel, token, num_tokens, NUM_OUT, NUM_OUT)
    elif KIND == "int4":
        store_outputs(acc, out_ptr, None, bias_ptr, channel, token, num_tokens, stride_out, NUM_OUT)
    else:
        store_outputs(acc, out_ptr, scale_ptr, bias_ptr, channel, token, num_tokens, stride_out, NUM_OUT)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_splits_kernel(
    part_ptr,  # [SPLITS, T, N] float32
    out_ptr,
    scale_ptr,
    bias_ptr,
    num_tokens,
    stride_out,
    NUM_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of one token in their order, so that the sum is the same every time."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < NUM_OUT
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        acc += tl.load(part_ptr + (split * num_tokens.to(tl.int64) + token) * NUM_OUT + channel, mask=there, other=0.0)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + channel, mask=there, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + channel, acc.to(out_ptr.dtype.element_ty), mask=there)


def linear_invariant_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference; a row is bitwise the same in any batch: one tile shape and one order of sums for every T."""
    return _launch("linear_invariant", "plain", x, weight, None, None, bias)


def linear_int8_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _launch("linear_int8", "int8", x, weight, scale, None, bias)


def linear_fp8_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _launch("linear_fp8", "fp8", x, weight, scale, None, bias)


def linear_int4_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _launch("linear_int4", "int4", x, weight, scale, zero, bias)


def choose_splits(num_tiles: int, num_in: int, processors: int) -> int:
    """Parts of the inputs: as many as give every processor a program, where tokens are few; does not depend on how few."""
    return max(1, min(processors // max(1, num_tiles), num_in // MIN_SPLIT_K, MAX_SPLITS))


def _launch(
    op: str,
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    launch: LinearLaunch | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    num_out, num_in, group_size = _check(op, kind, x, weight, scale, zero, bias)
    num_tokens = x.shape[0]
    out = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
    if num_tokens == 0 or num_out == 0:
        return out
    rows = None if op == "linear_invariant" else num_tokens
    launch = launch or linear_launch(current_architecture(), x.dtype, kind, rows)
    block_k = group_size or launch.block_k
    channel_tiles = -(-num_out // launch.block_n)
    if num_splits is None:
        small = rows is not None and rows <= launch.block_t
        num_splits = choose_splits(channel_tiles, num_in, num_processors(x.device)) if small else 1
    target = out
    if num_splits > 1:
        target = torch.empty((num_splits, num_tokens, num_out), dtype=torch.float32, device=x.device)
    linear_kernel[(-(-num_tokens // launch.block_t), channel_tiles, num_splits)](
        x, weight.view(torch.uint8) if kind == "fp8" else weight, target, scale, zero, bias, num_tokens,
        x.stride(0), weight.stride(0), out.stride(0),
        NUM_IN=num_in, NUM_OUT=num_out, KIND=kind, GROUP_SIZE=group_size, SPLITS=num_splits,
        BLOCK_N=launch.block_n, BLOCK_T=launch.block_t, BLOCK_K=block_k, PRECISION=dot_precision(x.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        block = min(1024, triton.next_power_of_2(num_out))
        sum_splits_kernel[(num_tokens, -(-num_out // block))](
            target, out, None if kind == "int4" else scale, bias, num_tokens, out.stride(0),
            NUM_OUT=num_out, SPLITS=num_splits, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _check(
    op: str,
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[int, int, int]:
    """(outputs, inputs, group size or 0); ValueError names what is wrong."""
    dtype = {"plain": x.dtype, "int8": torch.int8, "fp8": E4M3, "int4": torch.uint8}[kind]
    form = "[N, K / g, g / 2]" if kind == "int4" else "[N, K]"
    if x.dim() != 2 or weight.dim() != (3 if kind == "int4" else 2) or x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: x must be [T, K] of float32, bfloat16 or float16 and weight {form}, "
            f"got {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)}"
        )
    if weight.dtype != dtype:
        raise ValueError(f"{op}: weight must be {dtype}, got {weight.dtype}")
    num_out, num_in, group_size = weight.shape[0], weight.shape[1:].numel(), 0
    if kind == "int4":
        num_in, group_size = 2 * num_in, 2 * weight.shape[2]
        if group_size not in GROUP_SIZES:
            raise ValueError(f"{op}: groups must be of {', '.join(map(str, GROUP_SIZES))} weights, got {group_size}")
    if x.shape[1] != num_in:
        raise ValueError(f"{op}: x has {x.shape[1]} inputs, the weight {num_in}")
    if x.stride(1) != 1 or not weight[:1].is_contiguous():
        raise ValueError(f"{op}: x and weight must be dense in their last dimension")
    for name, t in (("scale", scale), ("zero", zero))[: {"plain": 0, "int4": 2}.get(kind, 1)]:
        if t is None:
            raise ValueError(f"{op}: {name} must be given")
    expected = {"scale": (num_out, num_in // group_size) if group_size else (num_out,), "bias": (num_out,)}
    expected["zero"] = expected["scale"]
    for name, t in (("scale", scale), ("zero", zero), ("bias", bias)):
        if t is not None and (t.shape != expected[name] or not t.is_contiguous()):
            raise ValueError(f"{op}: {name} must be contiguous {list(expected[name])}, got {list(t.shape)}")
        if t is not None and t is not bias and t.dtype != torch.float32:
            raise ValueError(f"{op}: {name} must be float32, got {t.dtype}")
    return num_out, num_in, group_size
