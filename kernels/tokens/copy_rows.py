"""copy_rows and fill_rows: copy the rows below a row count that is on the device; fill the rows from it on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import pattern
from ..launch import Constants, Launches, runs_on
from .rows import cdiv, programs_of, row_alignment, row_constants

BLOCK = 4096  # bytes of a step: two 16-byte accesses for each of 128 threads


@triton.jit(do_not_specialize=["source", "target", "programs"])
def copy_rows_kernel(
    num_rows,  # int32 [1]
    source: tl.int64,  # address
    target: tl.int64,  # address
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
):
    """Program i copies blocks i, i + programs, ... of the elements of the rows below num_rows."""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    end = tl.load(num_rows).to(tl.int64) * H
    step = programs.to(tl.int64) * COLS
    for start in range(tl.program_id(0).to(tl.int64) * COLS, end, step):
        at = start + tl.arange(0, COLS)
        tl.store(there + at, tl.load(here + at, mask=at < end, other=0), mask=at < end)


def copy_rows(source: torch.Tensor, target: torch.Tensor, num_rows: torch.Tensor) -> None:
    """Copy the rows of `source` below `num_rows` to `target`. The other rows are neither read nor written.

    Args:
        source, target: [R, ...] of one shape and dtype, 16- or 32-bit, contiguous.
        num_rows: int32 [1], at most R; read on the device.

    Raises:
        ArgumentError: unsupported shape, dtype or stride.
    """
    check_buffer("source", source, target.shape)
    check_buffer("target", target)
    if source.dtype is not target.dtype:
        raise ArgumentError(f"source: {source.dtype}; allowed: {target.dtype}, that of target")
    if not source.numel():
        return
    if not runs_on(target.device):
        copy_rows_cpu(source, target, num_rows)
        return
    there, length, here = target.data_ptr(), target.numel() // len(target), source.data_ptr()
    programs = programs_of(target.device, cdiv(target.numel() * target.itemsize, BLOCK))
    constants = _constants(copy_rows_kernel, target.dtype, length, row_alignment(target.dtype, length, here | there))
    _copies((programs, 1, 1), target.device, (num_rows,), (here, there, programs), constants)


def copy_rows_cpu(source: torch.Tensor, target: torch.Tensor, num_rows: torch.Tensor) -> None:
    """copy_rows in torch operations."""
    number = int(num_rows)
    target[:number].copy_(source[:number])


@triton.jit(do_not_specialize=["target", "word", "rows", "programs"])
def fill_rows_kernel(
    num_rows,  # int32 [1]
    target: tl.int64,  # address
    word: tl.int32,  # the bits of the value
    rows: tl.int32,
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
):
    """Program i fills blocks i, i + programs, ... of the elements of the rows from num_rows on."""
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    first = tl.load(num_rows).to(tl.int64) * H + tl.program_id(0).to(tl.int64) * COLS
    end = rows.to(tl.int64) * H
    words = tl.full([COLS], 0, WORD) + word.to(WORD)
    for start in range(first, end, programs.to(tl.int64) * COLS):
        at = start + tl.arange(0, COLS)
        tl.store(there + at, words, mask=at < end)


def fill_rows(target: torch.Tensor, num_rows: torch.Tensor, value: float) -> None:
    """Fill the rows of `target` from `num_rows` on. The rows before are not written.

    Args:
        target: [R, ...], 16- or 32-bit floats or int32, contiguous.
        num_rows: int32 [1], at most R; read on the device.
        value: a number, or NaN.

    Raises:
        ArgumentError: unsupported shape, dtype or stride.
    """
    check_buffer("target", target, floats=True)
    if not target.numel():
        return
    if not runs_on(target.device):
        fill_rows_cpu(target, num_rows, value)
        return
    there, length = target.data_ptr(), target.numel() // len(target)
    programs = programs_of(target.device, cdiv(target.numel() * target.itemsize, BLOCK))
    constants = _constants(fill_rows_kernel, target.dtype, length, row_alignment(target.dtype, length, there))
    numbers = there, bits_of(value, target.dtype), len(target), programs
    _fills((programs, 1, 1), target.device, (num_rows,), numbers, constants)


def fill_rows_cpu(target: torch.Tensor, num_rows: torch.Tensor, value: float) -> None:
    """fill_rows in torch operations."""
    target[int(num_rows) :].fill_(value if target.is_floating_point() else bits_of(value, target.dtype))


_copies, _fills = Launches(copy_rows_kernel), Launches(fill_rows_kernel)


@cache
def _constants(kernel: Any, dtype: torch.dtype, length: int, align: int) -> Constants:
    constants = row_constants(dtype, length, align) | {"COLS": BLOCK // dtype.itemsize}
    return Constants(kernel, constants, num_warps=4)


@cache
def bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of a value as a signed integer. NaN in int32, the bytes of packed rows: all ones, NaN of most floats."""
    if dtype is torch.int32 and math.isnan(value):
        return -1
    return int.from_bytes(pattern(value, dtype), "little", signed=True)


def check_buffer(name: str, x: torch.Tensor, shape: Sequence[int] | None = None, floats: bool = False) -> None:
    """Check a contiguous tensor of 16- or 32-bit elements, the argument of copy_rows, fill_rows and offer_rows.

    Raises:
        ArgumentError: `x` is not one, or not of `shape`, or not of floats or int32 where `floats` is set.
    """
    fits = x.dim() >= 1 and x.itemsize in (2, 4) and x.is_contiguous()
    fits = fits and (x.is_floating_point() or not floats or x.dtype is torch.int32)
    if not fits or (shape is not None and x.shape != shape):
        raise ArgumentError(
            f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: "
            f"{'floats or int32 of ' if floats else ''}16 or 32 bits, "
            f"shape {'[R, ...]' if shape is None else tuple(shape)}, contiguous"
        )
