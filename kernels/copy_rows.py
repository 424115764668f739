"""copy_rows: copy the rows below a device-side row count from one buffer to another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .pointers import on_device, runs_on
from .rows import block_launch, check_buffer


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
    programs, constants = block_launch(target, source)
    with on_device(target.device):
        copy_rows_kernel[(programs,)](source.data_ptr(), target.data_ptr(), num_rows, programs, **constants)


def copy_rows_cpu(source: torch.Tensor, target: torch.Tensor, num_rows: torch.Tensor) -> None:
    """copy_rows in torch operations."""
    number = int(num_rows)
    target[:number].copy_(source[:number])
