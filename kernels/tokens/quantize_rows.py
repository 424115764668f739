"""quantize_rows: cast rows to float8_e4m3fn with their scales beside them, in packed rows that dispatch moves as bytes.

The scale of a group of elements is its largest magnitude divided by 448, the largest float8_e4m3fn: a quotient of
float32, at least the smallest normal one. With "mxfp8", an OCP microscaling format, it is rounded up to a power of two,
and 2**-127 for a group of zeros. An element is divided by the scale in float32 and rounded to nearest even, so nothing
exceeds 448. A group with an infinity or a NaN becomes NaN, its scale too. Results are equal to the bit on every target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import ELEMENTS, decode, encode
from ..launch import Constants, Launches, runs_on
from .rows import CHUNK, PAYLOADS, cdiv, check_rows, power_of_two, programs_of, row_alignment, row_constants

MOST = 448.0  # the largest float8_e4m3fn
_LEAST = 2.0**-126
STEP = 2048  # elements that 4 warps cast at a time: 16 for each of 128 threads, which store them at once


@dataclass(frozen=True)
class Quantization:
    """How rows are quantized.

    Attributes:
        group: elements of a scale, adjacent; the last group of a row may have fewer. None: the row.
        scale_dtype: float32, or float8_e8m0fnu for powers of two.
    """

    group: int | None
    scale_dtype: torch.dtype = torch.float32

    def scales(self, hidden: int) -> int:
        """Return the scales of a row."""
        return 1 if self.group is None else cdiv(hidden, self.group)

    def columns(self, hidden: int, most: int) -> int:
        """Return the elements of a row that a program casts at a time: at most `most`, or one group. A row with one
        scale is one program's, in as many steps as that takes."""
        if self.group is None:
            return min(power_of_two(hidden), most)
        return self.group * min(power_of_two(self.scales(hidden)), max(most // self.group, 1))

    def blocks(self, hidden: int, columns: int) -> int:
        """Return the programs' blocks of a row."""
        return 1 if self.scales(hidden) == 1 else cdiv(hidden, columns)

    def constants(self, dtype: torch.dtype, hidden: int, most: int) -> dict[str, Any]:
        """Return the constants of kernels that quantize rows of `dtype`."""
        powers, columns = self.scale_dtype is not torch.float32, self.columns(hidden, most)
        return {"GROUP": self.group or hidden, "COLS": columns, "POWERS": powers, "DTYPE": ELEMENTS[dtype]}


@dataclass(frozen=True)
class QuantizedRows:
    """Packed rows as quantize_rows writes them.

    Attributes:
        scales_at: the byte of a row in which its scales begin.
    """

    how: Quantization
    scales_at: int

    def places(self, nbytes: int) -> dict[str, int]:
        """Return the constants of kernels over such rows of `nbytes`."""
        return {"ROW_BYTES": nbytes, "SCALES_AT": self.scales_at}

    def check(self, dtype: torch.dtype, shape: torch.Size, hidden: int) -> None:
        """
        Raises:
            ArgumentError: tensors of this dtype and shape are not such rows of `hidden` elements.
        """
        width = self.scales_at + self.how.scales(hidden) * self.how.scale_dtype.itemsize
        if dtype is not torch.int32 or shape[1] % 4 or shape[1] * 4 < width or not hidden <= self.scales_at:
            raise ArgumentError(
                f"buffers: {dtype} of shape {tuple(shape)}; allowed: int32, packed rows of {hidden} elements with "
                f"scales at byte {self.scales_at}"
            )

    def rows_of(self, x: torch.Tensor, words: int) -> torch.Tensor:
        """Return `x`, [T, hidden], as packed rows of so many words, int32 [T, words]."""
        rows = torch.empty((len(x), words), dtype=torch.int32, device=x.device)
        quantize_rows(x, rows, self.scales_at, self.how)
        return rows

    def values(self, rows: torch.Tensor, hidden: int) -> torch.Tensor:
        """Return the values of packed rows, int32 [R, W]: float32 [R, hidden]."""
        data, nbytes = rows.view(torch.uint8), self.how.scales(hidden) * self.how.scale_dtype.itemsize
        elements = data[:, :hidden].view(torch.float8_e4m3fn)
        scales = data[:, self.scales_at : self.scales_at + nbytes].view(self.how.scale_dtype)
        scales = scales[:, 0] if self.how.group is None else scales
        return dequantize_rows(elements, scales, self.how, torch.float32)


QuantizationName = Literal["fp8_row", "fp8_128", "mxfp8"]
QUANTIZATIONS: dict[str, Quantization] = {
    "fp8_row": Quantization(None),
    "fp8_128": Quantization(128),
    "mxfp8": Quantization(32, torch.float8_e8m0fnu),
}


@triton.jit
def group_scale(most, POWERS: tl.constexpr):
    """Return (scale, bits of the scale, whether it is NaN) of groups by the bits of their largest magnitude."""
    quotient = tl.div_rn(most.to(tl.float32, bitcast=True), tl.full(most.shape, 448.0, tl.float32))
    bad = most >= 0x7F800000
    if POWERS:
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        # To multiply by: the reciprocal, which is exact.
        return ((254 - exponent) << 23).to(tl.float32, bitcast=True), tl.where(bad, 255, exponent), bad
    else:
        scale = tl.where(quotient < 1.1754943508222875e-38, 1.1754943508222875e-38, quotient)
        return scale, tl.where(bad, 0x7FC00000, scale.to(tl.int32, bitcast=True)), bad


@triton.jit
def cast_group(value, scale, bad, POWERS: tl.constexpr):
    """Return the bits of float8_e4m3fn, int8."""
    if POWERS:
        scaled = value * scale
    else:
        scaled = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    return tl.where(bad, tl.full((1, 1), 0x7F, tl.int8), encode(scaled, tl.float8e4nv, True))


@triton.jit
def load_group(source, c, H: tl.constexpr, DTYPE: tl.constexpr):
    """Return elements c of a row, float32; 0 from H on."""
    # No dtype of rows is decoded by float8 instructions.
    return decode(tl.load(source + c, mask=c < H, other=0), DTYPE, False)


@triton.jit
def row_scale(source, H: tl.constexpr, COLS: tl.constexpr, POWERS: tl.constexpr, DTYPE: tl.constexpr):
    """Return `group_scale` of a row, [1, 1] each. Whoever casts the row then reads it again, from the cache."""
    c = tl.arange(0, COLS)[None, :]
    largest = tl.zeros([1, COLS], tl.int32)
    for start in range(0, H, COLS):
        value = load_group(source, start + c, H, DTYPE)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return group_scale(tl.max(largest, axis=1)[:, None], POWERS)


@triton.jit
def quantized_groups(source, c, H: tl.constexpr, POWERS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the bits of float8_e4m3fn elements, int8, and those of the scales of groups c, [groups, elements]."""
    value = load_group(source, c, H, DTYPE)
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]
    scale, bits, bad = group_scale(largest, POWERS)
    return cast_group(value, scale, bad, POWERS), bits


@triton.jit
def store_scales(scales, group, bits, there, POWERS: tl.constexpr):
    """Store the bits of scales of groups, [groups, 1]; `scales`: a row's, as bytes, of no stated alignment, so that
    they are stored one at a time: their masks are not those of vectors."""
    if POWERS:
        tl.store(scales + group, bits.to(tl.uint8).to(tl.int8, bitcast=True), mask=there)
    else:
        tl.store(scales.to(tl.pointer_type(tl.int32)) + group, bits, mask=there)


@triton.jit
def quantize_blocks(
    x, out, x_stride, out_stride, scales_at, rows, programs,
    H: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr, POWERS: tl.constexpr,
    DTYPE: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program i quantizes blocks i, i + programs, ... of the first rows: each is COLS elements of a row, a multiple of
    GROUP, or, if a row has one scale, the row. Arguments and constants are those of quantize_rows_kernel."""
    WHOLE: tl.constexpr = GROUP >= H
    steps: tl.constexpr = 1 if WHOLE else (H + COLS - 1) // COLS
    for block in range(tl.program_id(0).to(tl.int64), rows * steps, programs):
        # A loop variable is a number of Python's in the interpreter.
        t = tl.full((), 0, tl.int64) + block // steps
        # An address that was an integer has lost its alignment.
        source = tl.multiple_of(x.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN) + tl.multiple_of(t * x_stride, VEC)
        target = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(tl.int8)), 16) + tl.multiple_of(t * out_stride, 16)
        scales = out.to(tl.int64).to(tl.pointer_type(tl.int8)) + (t * out_stride + scales_at)
        if WHOLE:
            c = tl.arange(0, COLS)[None, :]
            scale, bits, bad = row_scale(source, H, COLS, POWERS, DTYPE)
            for start in range(0, H, COLS):
                value = load_group(source, start + c, H, DTYPE)
                tl.store(target + start + c, cast_group(value, scale, bad, POWERS), mask=start + c < H)
            store_scales(scales, tl.zeros([1, 1], tl.int32), bits, tl.full([1, 1], 1, tl.int1), POWERS)
        else:
            GROUPS: tl.constexpr = COLS // GROUP
            group = block % steps * GROUPS + tl.arange(0, GROUPS)[:, None]
            c = group * GROUP + tl.arange(0, GROUP)[None, :]
            elements, bits = quantized_groups(source, c, H, POWERS, DTYPE)
            tl.store(target + c, elements, mask=c < H)
            store_scales(scales, group, bits, group * GROUP < H, POWERS)


@triton.jit(do_not_specialize=["x", "out", "x_stride", "out_stride", "scales_at", "rows", "programs"])
def quantize_rows_kernel(
    num_rows,  # int32 [1]
    x: tl.int64,  # address
    out: tl.int64,  # address
    x_stride: tl.int64,  # elements
    out_stride: tl.int64,  # bytes, a multiple of 16
    scales_at: tl.int64,  # byte of a row in which its scales begin, a multiple of 16
    rows: tl.int64,
    programs: tl.int64,
    COUNTED: tl.constexpr,  # whether the number of rows is num_rows
    H: tl.constexpr,
    GROUP: tl.constexpr,  # elements of a scale
    COLS: tl.constexpr,  # elements of a step
    POWERS: tl.constexpr,  # whether scales are powers of two, of 8 bits
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
):
    """Program i processes blocks i, i + programs, ..., as `quantize_blocks` has them."""
    number = rows
    if COUNTED:
        number = tl.load(num_rows).to(tl.int64)
    quantize_blocks(
        x, out, x_stride, out_stride, scales_at, number, programs, H, GROUP, COLS, POWERS, DTYPE, WORD, ALIGN, VEC
    )  # fmt: skip


_launches = Launches(quantize_rows_kernel)


@cache
def _constants(dtype: torch.dtype, hidden: int, align: int, how: Quantization, counted: bool) -> Constants:
    constants = row_constants(dtype, hidden, align) | how.constants(dtype, hidden, STEP)
    return Constants(quantize_rows_kernel, constants | {"COUNTED": counted}, num_warps=4)


def quantize_rows(
    x: torch.Tensor, out: torch.Tensor, scales_at: int, how: Quantization, num_rows: torch.Tensor | None = None
) -> None:
    """Write the float8_e4m3fn elements of each row to the first bytes of a packed row, and its scales behind them.

    Args:
        x: [T, H]; float32, bfloat16 or float16, the elements of a row adjacent, any stride between rows.
        out: int32 [T, W], contiguous; rows of a multiple of 16 bytes.
        scales_at: the byte of a row in which its scales begin, a multiple of 16. Other bytes are not written.
        num_rows: int32 [1], at most T; read on the device: rows from there on are neither read nor written.

    Raises:
        ArgumentError: unsupported shape, dtype, stride or place.
    """
    hidden = x.shape[-1]
    check_payload(x.dtype)
    check_rows("x", x, (None, hidden), x.dtype)
    width = scales_at + how.scales(hidden) * how.scale_dtype.itemsize
    fits = out.dim() == 2 and len(out) == len(x) and out.dtype is torch.int32 and out.is_contiguous()
    if not fits or out.shape[1] % 4 or out.shape[1] * 4 < width or scales_at % 16 or scales_at < hidden:
        raise ArgumentError(
            f"out: {out.dtype} of shape {tuple(out.shape)}, scales at byte {scales_at}; allowed: contiguous int32 of "
            f"shape [{len(x)}, W], rows of a multiple of 16 bytes with room for {hidden} elements and their scales"
        )
    if not x.numel():
        return
    if not runs_on(x.device):
        number = len(x) if num_rows is None else int(num_rows)
        quantize_rows_cpu(x[:number], out[:number], scales_at, how)
        return
    address, stride = x.data_ptr(), x.stride(0)
    align = row_alignment(x.dtype, hidden, address | stride * x.element_size())
    blocks = len(x) * how.blocks(hidden, how.columns(hidden, STEP))
    # The rows of tokens are all there; of a buffer for received rows, which is often larger, programs find out.
    programs = blocks if num_rows is None else programs_of(x.device, blocks)
    numbers = address, out.data_ptr(), stride, out.stride(0) * 4, scales_at, len(x), programs
    count = out if num_rows is None else num_rows
    constants = _constants(x.dtype, hidden, align, how, num_rows is not None)
    _launches((programs, 1, 1), x.device, (count,), numbers, constants)


def check_payload(dtype: torch.dtype) -> None:
    """
    Raises:
        ArgumentError: rows of this dtype are not quantized.
    """
    if dtype not in PAYLOADS:
        raise ArgumentError(f"x: {dtype}; allowed: float32, bfloat16, float16")


def quantize_rows_cpu(x: torch.Tensor, out: torch.Tensor, scales_at: int, how: Quantization) -> None:
    """quantize_rows in torch operations, some rows at a time so that intermediates stay in the cache."""
    hidden = x.shape[1]
    group, scales = how.group or hidden, how.scales(hidden)
    data = out.view(torch.uint8)
    most = max(1, CHUNK // hidden)
    nbytes = scales * how.scale_dtype.itemsize
    for first in range(0, len(x), most):
        these = slice(first, first + most)
        value = x[these].float()
        value = torch.nn.functional.pad(value, (0, scales * group - hidden)).view(len(value), scales, group)
        scale, bits, bad = _scales(value.abs().amax(2), how)
        value = value.mul_(scale[..., None]) if bits.dtype is torch.uint8 else value.div_(scale[..., None])
        cast = value.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill_(bad[..., None], 0x7F)
        data[these, :hidden] = cast.view(len(value), -1)[:, :hidden]
        data[these, scales_at : scales_at + nbytes] = bits.contiguous().view(torch.uint8)


def _scales(most: torch.Tensor, how: Quantization) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`group_scale` of the largest magnitudes, float32."""
    quotient, bad = most / MOST, ~most.isfinite()
    if how.scale_dtype is torch.float32:
        scale = quotient.clamp(min=_LEAST)
        return scale, scale.view(torch.int32).masked_fill(bad, 0x7FC00000), bad
    bits = quotient.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0)
    return ((254 - exponent) << 23).view(torch.float32), exponent.masked_fill(bad, 255).to(torch.uint8), bad


def quantize_rows_reference(x: torch.Tensor, how: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements, scales) of quantize_rows by their definition, group by group. For tests; CPU tensors only."""
    hidden = x.shape[1]
    group, scales = how.group or hidden, how.scales(hidden)
    elements = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cpu")
    factors = torch.empty((len(x), scales), dtype=how.scale_dtype, device="cpu")
    for t in range(len(x)):
        for g in range(scales):
            these = slice(g * group, (g + 1) * group)
            value = x[t, these].float()
            most = value.abs().max()
            if not most.isfinite():
                elements[t, these], factors[t, g] = float("nan"), float("nan")
                continue
            scale = most / MOST
            if how.scale_dtype is torch.float32:
                scale = torch.maximum(scale, torch.tensor(_LEAST))
            else:  # the least power of two that is not below, and not subnormal
                fraction, exponent = math.frexp(float(scale))
                power = -127 if scale == 0 else max(exponent - (fraction == 0.5), -126)
                scale = torch.tensor(2.0**power)
            elements[t, these], factors[t, g] = (value.double() / scale.double()).float(), scale
    return elements, factors


def dequantize_rows(x: torch.Tensor, scale: torch.Tensor, how: Quantization, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that elements and scales stand for, rounded once.

    Args:
        x: float8_e4m3fn [..., H].
        scale: [...] if a row has one scale, else [..., scales].
    """
    factors = scale.float()
    if how.group is None:
        return (x.float() * factors[..., None]).to(dtype)
    return (x.float() * factors.repeat_interleave(how.group, -1)[..., : x.shape[-1]]).to(dtype)
