"""Conversions between 8- and 16-bit floats and float32 with equal results on every target.

The interpreter truncates where hardware rounds bfloat16 and misreads float8's special values (SOFT: use integers
instead); float8 instructions are missing on some GPUs and saturate on others. Rounding is to nearest even.
float8_e4m3fn has no infinity: values beyond 448 become 448, as in torch 2.13 and in hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(word, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Convert the bits of DTYPE values to float32 for 8- and 16-bit floats, else to DTYPE."""
    if DTYPE == tl.float16:
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == tl.bfloat16:
        return (word.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float8e5:
        # The upper byte of a float16.
        return (word.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == tl.float8e4nv:
        if SOFT:
            bits = word.to(tl.uint8, bitcast=True).to(tl.uint32)
            magnitude = bits & 0x7F
            # With float32's bias the value is too small by 2**-120, subnormals included.
            value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            value = tl.where(magnitude == 0x7F, float("nan"), value)
            # Set the sign bit: Triton negates by subtracting from 0, which loses the sign of zero.
            return (value.to(tl.uint32, bitcast=True) | ((bits >> 7) << 31)).to(tl.float32, bitcast=True)
        else:
            return word.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return word.to(DTYPE, bitcast=True)


@triton.jit
def encode(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    """Convert values to the bits of DTYPE, rounded once; float64 to small floats by way of float32."""
    if DTYPE == tl.float64:
        return value.to(tl.float64).to(tl.int64, bitcast=True)
    elif DTYPE == tl.float32:
        return value.to(tl.float32).to(tl.int32, bitcast=True)
    elif DTYPE == tl.float16:
        return value.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True)
    elif DTYPE == tl.bfloat16:
        if SOFT:
            bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
            return rounded.to(tl.uint16).to(tl.int16, bitcast=True)
        else:
            return value.to(tl.float32).to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif DTYPE == tl.float8e4nv:
        return _encode_float8(value.to(tl.float32), 3, 7, 0x43E00000, 0x7E, 0x7F)
    elif DTYPE == tl.float8e5:
        return _encode_float8(value.to(tl.float32), 2, 15, 0x47700000, 0x7C, 0x7F)
    else:
        return value.to(DTYPE)


@triton.jit
def _encode_float8(
    value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, OVER: tl.constexpr, NAN: tl.constexpr
):
    """Convert float32 to float8 with MANTISSA bits; values with float32 bits from TOP on become OVER."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    rebased = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rebased >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Adding this number leaves the rounded subnormal in the lowest bits of the sum.
    UNIT: tl.constexpr = (127 - BIAS + 1 + DROPPED) << 23
    lifted = magnitude.to(tl.float32, bitcast=True) + tl.full((1, 1), UNIT, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = lifted.to(tl.uint32, bitcast=True) - UNIT
    result = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    result = tl.where(magnitude >= TOP, OVER, result)
    result = tl.where(magnitude > 0x7F800000, NAN, result)
    return (result | ((bits >> 31) << 7)).to(tl.uint8).to(tl.int8, bitcast=True)
