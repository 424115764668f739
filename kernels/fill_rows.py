"""fill_rows: one value for the rows of a buffer that no token is in, those from the device's number of rows on."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .pointers import WORDS, on_device, pattern, runs_on
from .rows import alignment, cdiv, programs_of

_BLOCK = 4096  # bytes of a program's step: two accesses of 16 bytes for each of 128 threads


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
    """Program i fills the pieces i, i + programs, ... of the elements of rows from num_rows on."""
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    first = tl.load(num_rows).to(tl.int64) * H + tl.program_id(0).to(tl.int64) * COLS
    end = rows.to(tl.int64) * H
    words = tl.full([COLS], 0, WORD) + word.to(WORD)
    for start in range(first, end, programs.to(tl.int64) * COLS):
        at = start + tl.arange(0, COLS)
        tl.store(there + at, words, mask=at < end)


def fill_rows(target: torch.Tensor, num_rows: torch.Tensor, value: float) -> None:
    """Write `value` to every element of the rows of `target` from `num_rows` on; the others are not touched.

    Args:
        target: [R, ...], floats of 16 or 32 bits, contiguous.
        num_rows: int32 [1], up to R; on a GPU the device reads it.
        value: a number, or NaN.

    Raises:
        ArgumentError: a shape, dtype or stride that is not allowed.
    """
    x = target
    if x.dim() < 1 or not x.is_floating_point() or x.itemsize not in (2, 4) or not x.is_contiguous():
        raise ArgumentError(
            f"target: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: floats of 16 or 32 bits, "
            f"[R, ...], contiguous"
        )
    if not x.numel():
        return
    if not runs_on(x.device):
        fill_rows_reference(x, num_rows, value)
        return
    length, itemsize = x[0].numel(), x.itemsize
    columns = _BLOCK // itemsize
    programs = programs_of(x.device, cdiv(x.numel(), columns))
    with on_device(x.device):
        fill_rows_kernel[(programs,)](
            x.data_ptr(), _word(value, x.dtype), num_rows, len(x), programs, H=length, COLS=columns,
            WORD=WORDS[itemsize], ALIGN=alignment(length * itemsize, x.data_ptr()), num_warps=4,
        )  # fmt: skip


def fill_rows_reference(target: torch.Tensor, num_rows: torch.Tensor, value: float) -> None:
    """The same in torch operations."""
    target[int(num_rows) :].fill_(value)


@lru_cache
def _word(value: float, dtype: torch.dtype) -> int:
    return int.from_bytes(pattern(value, dtype), "little", signed=True)
