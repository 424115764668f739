"""copy_columns: copy some bytes of every row below a row count that is on the device to contiguous memory."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import WORDS
from ..launch import Constants, Launches, runs_on
from .rows import cdiv, programs_of

_BLOCK = 4096  # bytes of a step
TORCH_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["source", "target", "stride", "programs"])
def copy_columns_kernel(
    num_rows,  # int32 [1]
    source: tl.int64,  # address
    target: tl.int64,  # address
    stride: tl.int64,  # words
    programs: tl.int32,
    WIDTH: tl.constexpr,  # words of a row to copy
    BLOCK: tl.constexpr,  # words
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # words
):
    """Program i copies blocks i, i + programs, ... of the words of the rows below num_rows."""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    end = tl.load(num_rows).to(tl.int64) * WIDTH
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, end, programs.to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = at // WIDTH
        words = tl.load(here + tl.multiple_of(row * stride, VEC) + at % WIDTH, mask=at < end, other=0)
        tl.store(there + at, words, mask=at < end)


_launches = Launches(copy_columns_kernel)


@cache
def _constants(word: int, width: int) -> Constants:
    align = math.gcd(width * word, 16)
    constants = {"WIDTH": width, "BLOCK": _BLOCK // word, "WORD": WORDS[word], "ALIGN": align, "VEC": align // word}
    return Constants(copy_columns_kernel, constants, num_warps=4)


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
    fits = rows.dim() == 2 and rows.dtype is torch.int32 and rows.is_contiguous() and rows.shape[1] % 4 == 0
    if not fits or len(out) != len(rows) or not out.is_contiguous() or begin % 16 or begin + size > rows.shape[1] * 4:
        raise ArgumentError(
            f"rows: {rows.dtype} of shape {tuple(rows.shape)}, {size} bytes of each from byte {begin}; allowed: "
            f"contiguous int32 rows of a multiple of 16 bytes, as many as of `out`, which is contiguous"
        )
    if not out.numel():
        return
    if not runs_on(out.device):
        copy_columns_cpu(rows, begin, out, num_rows)
        return
    word = math.gcd(size, 8)
    programs = programs_of(out.device, cdiv(out.numel() * out.itemsize, _BLOCK))
    numbers = rows.data_ptr() + begin, out.data_ptr(), rows.shape[1] * 4 // word, programs
    _launches((programs, 1, 1), out.device, (num_rows,), numbers, _constants(word, size // word))


def copy_columns_cpu(rows: torch.Tensor, begin: int, out: torch.Tensor, num_rows: torch.Tensor) -> None:
    """copy_columns in torch operations."""
    number, size = int(num_rows), out.numel() // max(len(out), 1) * out.itemsize
    word = math.gcd(size, 8)
    columns = rows.view(TORCH_WORDS[word])[:number, begin // word : (begin + size) // word]
    out.view(-1).view(torch.uint8).view(TORCH_WORDS[word]).view(len(out), -1)[:number] = columns
