"""copy_columns: copy some bytes of every row below a row count that is on the device to contiguous memory."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import WORDS
from ..launch import Constants, Launches, runs_on
from .rows import cdiv, power_of_two, programs_of

_STEP = 512  # words: four of each of 128 threads
TORCH_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_column_blocks(
    number, last, source, target, row_bytes, filler, programs,
    WIDE: tl.constexpr, STEP_ROWS: tl.constexpr, STEP_WORDS: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Program i copies blocks i, i + programs, ... of `WIDE` words of the rows below `number`, and fills those from
    there to `last`.

    `source`: the address of these words of the first row; `row_bytes`: a multiple of 16; `filler`: an int32, whose bits
    are repeated or cut. `ALIGN`: bytes that addresses and `WIDE` words are multiples of.
    """
    SIZE: tl.constexpr = WORD.primitive_bitwidth // 8
    parts: tl.constexpr = (WIDE + STEP_WORDS - 1) // STEP_WORDS
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    pitch = tl.multiple_of((tl.full((), 0, tl.int64) + row_bytes) // SIZE, ALIGN // SIZE)
    blocks = (last + STEP_ROWS - 1) // STEP_ROWS * parts
    for block in range(tl.program_id(0).to(tl.int64), blocks, programs.to(tl.int64)):
        # A loop variable is a number of Python's in the interpreter.
        row = (tl.full((), 0, tl.int64) + block // parts) * STEP_ROWS + tl.arange(0, STEP_ROWS)[:, None]
        at = block % parts * STEP_WORDS + tl.arange(0, STEP_WORDS)[None, :]
        words = tl.load(here + row * pitch + at, mask=(row < number) & (at < WIDE), other=0)
        fill = (tl.full([1, 1], 0, tl.int64) + filler.to(tl.int64)).to(WORD)
        words = tl.where(row < number, words, fill)
        tl.store(there + row * WIDE + at, words, mask=(row < last) & (at < WIDE))


@triton.jit(do_not_specialize=["source", "target", "row_bytes", "programs"])
def copy_columns_kernel(
    num_rows,  # int32 [1]
    source: tl.int64,  # address
    target: tl.int64,  # address
    row_bytes: tl.int64,
    programs: tl.int32,
    WIDE: tl.constexpr,  # words of a row to copy
    STEP_ROWS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
):
    """Program i copies blocks i, i + programs, ... of the words of the rows below num_rows."""
    number = tl.load(num_rows).to(tl.int64)
    copy_column_blocks(
        number, number, source, target, row_bytes, tl.full((), 0, tl.int32), programs,
        WIDE, STEP_ROWS, STEP_WORDS, WORD, ALIGN,
    )  # fmt: skip


_launches = Launches(copy_columns_kernel)


@cache
def column_constants(size: int) -> dict[str, Any]:
    """Return the constants of kernels that copy so many bytes of each row."""
    word = math.gcd(size, 8)
    wide = size // word
    step = min(power_of_two(wide), _STEP)
    constants = {"WIDE": wide, "STEP_ROWS": _STEP // step, "STEP_WORDS": step}
    return constants | {"WORD": WORDS[word], "ALIGN": math.gcd(size, 16)}


def column_blocks(rows: int, size: int) -> int:
    """Return the number of blocks of so many rows, of `size` bytes each."""
    constants = column_constants(size)
    return cdiv(rows, constants["STEP_ROWS"]) * cdiv(constants["WIDE"], constants["STEP_WORDS"])


@cache
def _constants(size: int) -> Constants:
    return Constants(copy_columns_kernel, column_constants(size), num_warps=4)


def copy_columns(rows: torch.Tensor, begin: int, out: torch.Tensor, num_rows: torch.Tensor) -> None:
    """Copy the bytes of `rows` from `begin` on to the rows of `out`. Rows from `num_rows` on are neither read nor
    written.

    Args:
        rows: int32 [R, W], contiguous; rows of a multiple of 16 bytes.
        begin: a byte of a row, a multiple of 16.
        out: [R, ...], contiguous, of any dtype.
        num_rows: int32 [1], at most R; read on the device.

    Raises:
        ArgumentError: unsupported shape, dtype, stride or place.
    """
    size = out.numel() // max(len(out), 1) * out.itemsize
    check_columns(rows, begin, size)
    if len(out) != len(rows) or not out.is_contiguous():
        raise ArgumentError(
            f"out: shape {tuple(out.shape)}, strides {out.stride()}; allowed: contiguous, of as many rows as `rows`, "
            f"{len(rows)}"
        )
    if not out.numel():
        return
    if not runs_on(out.device):
        copy_columns_cpu(rows, begin, out, num_rows)
        return
    programs = programs_of(out.device, column_blocks(len(rows), size))
    numbers = rows.data_ptr() + begin, out.data_ptr(), rows.shape[1] * 4, programs
    _launches((programs, 1, 1), out.device, (num_rows,), numbers, _constants(size))


def check_columns(rows: torch.Tensor, begin: int, size: int) -> None:
    """
    Raises:
        ArgumentError: `rows` are no packed rows, or have no `size` bytes from byte `begin` on.
    """
    fits = rows.dim() == 2 and rows.dtype is torch.int32 and rows.is_contiguous() and rows.shape[1] % 4 == 0
    if not fits or begin % 16 or begin + size > rows.shape[1] * 4:
        raise ArgumentError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}, {size} bytes of each from byte {begin}; allowed: "
            f"contiguous int32 rows of a multiple of 16 bytes, and bytes of theirs from a multiple of 16 on"
        )


def copy_columns_cpu(rows: torch.Tensor, begin: int, out: torch.Tensor, num_rows: torch.Tensor) -> None:
    """copy_columns in torch operations."""
    number, size = int(num_rows), out.numel() // max(len(out), 1) * out.itemsize
    word = math.gcd(size, 8)
    columns = rows.view(TORCH_WORDS[word])[:number, begin // word : (begin + size) // word]
    out.view(-1).view(torch.uint8).view(TORCH_WORDS[word]).view(len(out), -1)[:number] = columns
