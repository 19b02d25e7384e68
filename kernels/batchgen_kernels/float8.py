"""float8 e4m3 (OCP 8-bit floating point, "fn": no infinities) in plain integer arithmetic, for the key/value cache.

A code is sign, 4 bits of exponent (bias 7), 3 bits of mantissa; from 2^-6 to 448 numbers are normal, below they are
multiples of 2^-9. 0x7F is NaN. No hardware conversion is used: sm_80 has none, and that of gfx942 is of another format.

A row of the cache is the head_dim elements of one token and one head, stored as codes and one float32 scale:
    a = max |x|;   scale = a / 448;   code = e4m3(x * (448 / a));            x ~ code * scale, within 2^-4 |x| where normal
A row with a < 2^-100, zeros above all, has scale 1 (and so is stored as zeros). A row with a value that is not finite has
scale NaN and codes NaN: it stays as wrong as it was.
"""

from __future__ import annotations

import torch

from batchgen_kernels._triton import tl, triton

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
TINY = 2.0**-100  # rows below it are zeros: no scale and no inverse of one is ever a subnormal number


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> codes [..., D] float8_e4m3fn and scales [...] float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    limit = torch.full_like(largest, LARGEST)  # a tensor: torch may divide by, and divides, a number in two roundings
    scale, inverse = largest / limit, limit / largest
    tiny, finite = largest < TINY, largest.isfinite()
    scale.masked_fill_(tiny, 1.0).masked_fill_(~finite, torch.nan)
    inverse.masked_fill_(tiny, 1.0).masked_fill_(~finite, torch.nan)
    return (x * inverse[..., None]).clamp_(-LARGEST, LARGEST).to(E4M3), scale


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes [..., D] float8_e4m3fn, scale [...] float32 -> [..., D] float32."""
    return codes.float() * scale[..., None]


@triton.jit
def encode_e4m3(x):
    """float32 -> uint8: to nearest, ties to even, saturating at 448; NaN is 0x7F or 0xFF."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448: positive floats are ordered as their bits are
    # normal: round 20 of 23 bits of mantissa away, where a carry goes into the exponent, whose bias becomes 7 from 127
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6: near 2^14 the last bit of a float32 is 2^-9, so this sum rounds to multiples of that
    small = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(bits):
    """uint8 -> float32, exact. The exponent's bias is 7 there and 127 here: shifted into place a number, a subnormal one
    too, is 2^120 times too small."""
    shifted = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # the sign fills all bits above it: keep one
    x = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(tl.abs(x) == 480.0, float("nan"), x)


@triton.jit
def row_maximum(x):
    """[rows, D] float32 -> [rows], the largest |x|; infinity if there is a NaN, which a maximum would pass over."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def row_scale(largest):
    """row_maximum -> scale and its inverse, [rows] float32. Divisions that are rounded right: codes equal those of torch."""
    tiny, finite = largest < 7.888609052210118e-31, largest < float("inf")  # 2^-100
    divisor = tl.where(tiny, 448.0, largest)
    scale = tl.where(finite, tl.div_rn(divisor, 448.0), float("nan"))
    return scale, tl.where(finite, tl.div_rn(448.0, divisor), float("nan"))
