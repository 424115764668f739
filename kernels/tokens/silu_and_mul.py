"""silu_and_mul: silu(gate) * up of a gated expert and its backward, for the rows below a device-side row count."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import ELEMENTS, decode, encode
from ..launch import Constants, Launches, interpreted, runs_on
from .rows import CHUNK, PAYLOADS, RowLaunch, check_rows, programs_of, row_alignment, row_constants


@triton.jit
def _row(address, row, stride, WORD: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr):
    """The address of a row."""
    base = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    return base + tl.multiple_of(row * stride, VEC)


@triton.jit(do_not_specialize=["gate", "up", "out", "gate_stride", "up_stride", "programs"])
def silu_and_mul_kernel(
    num_rows,  # int32 [1]
    gate: tl.int64,  # address
    up: tl.int64,  # address
    out: tl.int64,  # address
    gate_stride: tl.int64,  # elements
    up_stride: tl.int64,  # elements
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    SOFT: tl.constexpr,
):
    """Program i processes rows i, i + programs, ... below num_rows."""
    end = tl.load(num_rows).to(tl.int64)
    for row in range(tl.program_id(0), end, programs):
        g_row = _row(gate, row, gate_stride, WORD, ALIGN, VEC)
        u_row = _row(up, row, up_stride, WORD, ALIGN, VEC)
        o_row = _row(out, row, H, WORD, ALIGN, VEC)
        for start in range(0, H, COLS):
            c = start + tl.arange(0, COLS)
            g = decode(tl.load(g_row + c, mask=c < H, other=0), DTYPE, SOFT)
            u = decode(tl.load(u_row + c, mask=c < H, other=0), DTYPE, SOFT)
            value = g * (1.0 / (1.0 + tl.exp(-g))) * u
            tl.store(o_row + c, encode(value, DTYPE, SOFT).to(WORD), mask=c < H)


@triton.jit(
    do_not_specialize=[
        "gradient", "gate", "up", "gate_out", "up_out", "gradient_stride", "gate_stride", "up_stride", "rows",
        "programs",
    ]
)  # fmt: skip
def silu_and_mul_backward_kernel(
    num_rows,  # int32 [1]
    gradient: tl.int64,  # address
    gate: tl.int64,  # address
    up: tl.int64,  # address
    gate_out: tl.int64,  # address
    up_out: tl.int64,  # address
    gradient_stride: tl.int64,  # elements
    gate_stride: tl.int64,  # elements
    up_stride: tl.int64,  # elements
    rows: tl.int32,
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    SOFT: tl.constexpr,
):
    """Program i processes rows i, i + programs, ...; from num_rows on it reads nothing and writes zeros."""
    end = tl.load(num_rows).to(tl.int64)
    for row in range(tl.program_id(0), end, programs):
        d_row = _row(gradient, row, gradient_stride, WORD, ALIGN, VEC)
        g_row = _row(gate, row, gate_stride, WORD, ALIGN, VEC)
        u_row = _row(up, row, up_stride, WORD, ALIGN, VEC)
        dg_row = _row(gate_out, row, H, WORD, ALIGN, VEC)
        du_row = _row(up_out, row, H, WORD, ALIGN, VEC)
        for start in range(0, H, COLS):
            c = start + tl.arange(0, COLS)
            d = decode(tl.load(d_row + c, mask=c < H, other=0), DTYPE, SOFT)
            g = decode(tl.load(g_row + c, mask=c < H, other=0), DTYPE, SOFT)
            u = decode(tl.load(u_row + c, mask=c < H, other=0), DTYPE, SOFT)
            s = 1.0 / (1.0 + tl.exp(-g))
            tl.store(dg_row + c, encode(d * u * s * (1.0 + g * (1.0 - s)), DTYPE, SOFT).to(WORD), mask=c < H)
            tl.store(du_row + c, encode(d * (g * s), DTYPE, SOFT).to(WORD), mask=c < H)
    zeros = tl.zeros([COLS], tl.int32).to(WORD)
    for row in range(end + tl.program_id(0), rows.to(tl.int64), programs):
        dg_row = _row(gate_out, row, H, WORD, ALIGN, VEC)
        du_row = _row(up_out, row, H, WORD, ALIGN, VEC)
        for start in range(0, H, COLS):
            c = start + tl.arange(0, COLS)
            tl.store(dg_row + c, zeros, mask=c < H)
            tl.store(du_row + c, zeros, mask=c < H)


def silu_and_mul(
    gate: torch.Tensor, up: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor, launch: RowLaunch | None = None
) -> None:
    """Write silu(gate) * up to `out`, computed in float32 and rounded once.

    Rows from `num_rows` on are neither read nor written.

    Args:
        gate, up: [R, F] of one dtype, float32, bfloat16 or float16; the elements of a row adjacent, any stride between
            rows.
        num_rows: int32 [1], at most R.
        out: contiguous [R, F] of the same dtype.

    Raises:
        ArgumentError: unsupported shape or dtype.
    """
    _check(out, gate=gate, up=up)
    if not runs_on(out.device):
        silu_and_mul_cpu(gate, up, num_rows, out)
        return
    rows, length = out.shape
    launch = launch or RowLaunch.for_rows(length, out.element_size())
    programs = programs_of(out.device, rows)
    align = row_alignment(out.dtype, length, _bits(gate, up, out))
    numbers = gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.stride(0), up.stride(0), programs
    constants = _constants(silu_and_mul_kernel, out.dtype, length, align, launch)
    _launches((programs, 1, 1), out.device, (num_rows,), numbers, constants)


def silu_and_mul_backward(
    gradient: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    num_rows: torch.Tensor,
    gate_out: torch.Tensor,
    up_out: torch.Tensor,
    launch: RowLaunch | None = None,
) -> None:
    """Write the gradients of `gate` and `up`, computed in float32 and rounded once.

    Rows from `num_rows` on are not read; their gradients are zero.

    Args:
        gradient: of the result; gate, up: the inputs. As in `silu_and_mul`.
        gate_out, up_out: contiguous [R, F] of the same dtype.

    Raises:
        ArgumentError: unsupported shape or dtype.
    """
    _check(gate_out, gradient=gradient, gate=gate, up=up)
    _check(up_out, gate=gate)
    if not runs_on(gate_out.device):
        silu_and_mul_backward_cpu(gradient, gate, up, num_rows, gate_out, up_out)
        return
    rows, length = gate_out.shape
    align = row_alignment(gate_out.dtype, length, _bits(gradient, gate, up, gate_out, up_out))
    if launch is None:
        launch = RowLaunch.for_rows(length, gate_out.element_size())
        if align == 2 and launch.columns > 1024:
            # Single-element accesses: 3 * 16 of them per thread would spill.
            launch = RowLaunch(launch.columns // 2, launch.num_warps)
    programs = programs_of(gate_out.device, rows)
    numbers = (
        gradient.data_ptr(), gate.data_ptr(), up.data_ptr(), gate_out.data_ptr(), up_out.data_ptr(),
        gradient.stride(0), gate.stride(0), up.stride(0), rows, programs,
    )  # fmt: skip
    constants = _constants(silu_and_mul_backward_kernel, gate_out.dtype, length, align, launch)
    _backward_launches((programs, 1, 1), gate_out.device, (num_rows,), numbers, constants)


_launches, _backward_launches = Launches(silu_and_mul_kernel), Launches(silu_and_mul_backward_kernel)


@cache
def _constants(kernel: Any, dtype: torch.dtype, length: int, align: int, launch: RowLaunch) -> Constants:
    constants = row_constants(dtype, length, align) | {"COLS": launch.columns, "DTYPE": ELEMENTS[dtype]}
    return Constants(kernel, constants | {"SOFT": interpreted(kernel)}, num_warps=launch.num_warps)


def silu_and_mul_cpu(gate: torch.Tensor, up: torch.Tensor, num_rows: torch.Tensor, out: torch.Tensor) -> None:
    """silu_and_mul in torch operations, some rows at a time."""
    for these in _pieces(int(num_rows), out.shape[1]):
        g = gate[these].float()
        out[these] = g * torch.sigmoid(g) * up[these]


def silu_and_mul_backward_cpu(
    gradient: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    num_rows: torch.Tensor,
    gate_out: torch.Tensor,
    up_out: torch.Tensor,
) -> None:
    """silu_and_mul_backward in torch operations, some rows at a time."""
    number = int(num_rows)
    for these in _pieces(number, gate_out.shape[1]):
        d, g = gradient[these].float(), gate[these].float()
        s = torch.sigmoid(g)
        gate_out[these] = d * up[these] * s * (1 + g * (1 - s))
        up_out[these] = d * (g * s)
    gate_out[number:] = 0
    up_out[number:] = 0


def _pieces(number: int, length: int) -> Iterator[slice]:
    each = max(1, CHUNK // max(length, 1))
    return (slice(first, min(number, first + each)) for first in range(0, number, each))


def _bits(*tensors: torch.Tensor) -> int:
    """The bitwise or of addresses, and of strides between rows in bytes."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr() | x.stride(0) * x.element_size()
    return bits


def _check(out: torch.Tensor, **given: torch.Tensor) -> None:
    if out.dim() != 2 or out.dtype not in PAYLOADS or not out.is_contiguous():
        raise ArgumentError(
            f"out: {out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}; allowed: torch.float32, "
            f"torch.bfloat16 or torch.float16 of shape [R, F], contiguous"
        )
    rows, length = out.shape
    for name, x in given.items():
        check_rows(name, x, (rows, length), out.dtype)
