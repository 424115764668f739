"""copy_rows: the rows that are there, from one buffer to another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .pointers import WORDS, on_device, runs_on
from .rows import alignment, cdiv, programs_of

_BLOCK = 4096  # bytes of a program's step: two accesses of 16 bytes for each of 128 threads


@triton.jit(do_not_specialize=["source", "target", "programs"])
def copy_rows_kernel(
    source,  # address
    target,  # address
    num_rows,  # int32 [1]
    programs,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
):
    """Program i copies the pieces i, i + programs, ... of the elements of rows below num_rows."""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    end = tl.load(num_rows).to(tl.int64) * H
    step = programs.to(tl.int64) * COLS
    for start in range(tl.program_id(0).to(tl.int64) * COLS, end, step):
        at = start + tl.arange(0, COLS)
        tl.store(there + at, tl.load(here + at, mask=at < end, other=0), mask=at < end)


def copy_rows(source: torch.Tensor, target: torch.Tensor, num_rows: torch.Tensor) -> None:
    """Copy the rows of `source` below `num_rows` to those of `target`; of both the others are not touched.

    Args:
        source, target: [R, ...] of one shape and dtype, of 16 or 32 bits, contiguous.
        num_rows: int32 [1], up to R; on a GPU the device reads it.

    Raises:
        ArgumentError: a shape, dtype or stride that is not allowed.
    """
    for name, x in (("source", source), ("target", target)):
        if x.dim() < 1 or x.itemsize not in (2, 4) or x.shape != target.shape or not x.is_contiguous():
            raise ArgumentError(
                f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: 16 or 32 bits, shape "
                f"{tuple(target.shape)}, contiguous"
            )
    if source.dtype is not target.dtype:
        raise ArgumentError(f"source: {source.dtype}; allowed: {target.dtype}, that of target")
    if not source.numel():
        return
    if not runs_on(target.device):
        copy_rows_reference(source, target, num_rows)
        return
    length, itemsize = source[0].numel(), source.itemsize
    columns = _BLOCK // itemsize
    programs = programs_of(target.device, cdiv(source.numel(), columns))
    with on_device(target.device):
        copy_rows_kernel[(programs,)](
            source.data_ptr(), target.data_ptr(), num_rows, programs, H=length, COLS=columns, WORD=WORDS[itemsize],
            ALIGN=alignment(length * itemsize, source.data_ptr(), target.data_ptr()), num_warps=4,
        )  # fmt: skip


def copy_rows_reference(source: torch.Tensor, target: torch.Tensor, num_rows: torch.Tensor) -> None:
    """The same in torch operations."""
    number = int(num_rows)
    target[:number].copy_(source[:number])
