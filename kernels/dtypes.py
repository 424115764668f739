"""Dtypes as kernels see them: words, Triton's types, the bytes of fill values, and conversions of small floats.

`decode` and `encode` convert between 8- and 16-bit floats and float32 with equal results on every target. The
interpreter truncates where hardware rounds bfloat16 and misreads float8's special values (SOFT: use integers instead);
float8 instructions are missing on some GPUs and saturate on others. Rounding is to nearest even. float8_e4m3fn has no
infinity: values beyond 448 become 448, as in torch 2.13 and in hardware.
"""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""The integer type of a word, by its size in bytes."""
ELEMENTS = {
    torch.bool: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
"""The Triton type of an element, by dtype."""


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex dtype, else the dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def pattern(fill: float | int | bool, dtype: torch.dtype) -> bytes:
    """Return the bytes of an element of `dtype` with value `fill`.

    Raises:
        ArgumentError: the dtype cannot represent the value.
    """
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    try:
        # torch.full does not make float8.
        element = torch.full((1,), fill, dtype=torch.float32 if is_float8 else dtype, device="cpu").to(dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"fill is {fill!r}, which {dtype} cannot represent: {error}") from None
    return element.view(torch.uint8).numpy().tobytes()


def pattern_word(element: bytes, word: int) -> int | None:
    """Return `element` repeated to 8 bytes as a signed integer; None if its words of `word` bytes differ."""
    whole = (element * 8)[: max(8, len(element))]
    words = {whole[i : i + word] for i in range(0, len(whole), word)}
    return struct.unpack("q", whole[:8])[0] if len(words) == 1 else None


@functools.lru_cache
def poison_word(dtype: torch.dtype) -> tuple[int, int]:
    """The fill value for outputs of failed ranks: 8 bytes as an integer, and the size of a word."""
    part = real_dtype(dtype)
    if part is torch.bool:
        value: float | int | bool = True
    else:
        value = float("nan") if part.is_floating_point else torch.iinfo(part).max
    word = pattern_word(pattern(value, part), part.itemsize)
    assert word is not None
    return word, part.itemsize


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
