"""float8 e4m3 (the fn kind: no infinities, 0x7f and 0xff are NaN, up to 448) by integer operations on any GPU.

sm_80 has no such type and gfx942 another one by that name, so kernels see bytes: sign, 4 bits of exponent, 3 of mantissa.
"""

from __future__ import annotations

from batchgen_kernels._triton import tl, triton


@triton.jit
def decode_e4m3(bits):
    """uint8 -> float32, exact. The exponent's bias is 7 there and 127 here: shifted into place a number, a subnormal one
    too, is 2^120 times too small."""
    shifted = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # the sign fills all bits above it: keep one
    x = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(tl.abs(x) == 480.0, float("nan"), x)
