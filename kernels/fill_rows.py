"""fill_rows: fill the rows from a device-side row count on with one value."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .pointers import on_device, pattern, runs_on
from .rows import block_launch, check_buffer


@triton.jit(do_not_specialize=["target", "word", "rows", "programs"])
def fill_rows_kernel(
    target,  # address
    word,  # the bits of the value
    num_rows,  # int32 [1]
    rows,
    programs,
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
        target: [R, ...], 16- or 32-bit floats, contiguous.
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
    programs, constants = block_launch(target)
    word = _word(value, target.dtype)
    with on_device(target.device):
        fill_rows_kernel[(programs,)](target.data_ptr(), word, num_rows, len(target), programs, **constants)


def fill_rows_cpu(target: torch.Tensor, num_rows: torch.Tensor, value: float) -> None:
    """fill_rows in torch operations."""
    target[int(num_rows) :].fill_(value)


@lru_cache
def _word(value: float, dtype: torch.dtype) -> int:
    return int.from_bytes(pattern(value, dtype), "little", signed=True)
