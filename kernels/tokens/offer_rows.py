"""offer_rows: copy rows to a buffer that peers read, unless they lie in one, and tell all ranks which buffer it is."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch import Constants, Launches, runs_on
from .copy_rows import BLOCK, check_buffer, copy_rows_cpu
from .rows import Buffers, cdiv, programs_of, row_alignment, row_constants


@triton.jit(do_not_specialize=["source", "target", "place", "word", "ranks", "programs"])
def offer_rows_kernel(
    num_rows,  # int32 [1]
    words,  # int64 [ranks], addresses of int32 tensors
    source: tl.int64,  # address
    target: tl.int64,  # address
    place: tl.int64,  # in each tensor of words
    word: tl.int32,
    ranks: tl.int32,
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    COPY: tl.constexpr,
):
    """Program i writes the word of ranks i, i + programs, ... and copies these blocks of the rows below num_rows."""
    for rank in range(tl.program_id(0), ranks, programs):
        tl.store(tl.load(words + rank).to(tl.pointer_type(tl.int32)) + place, word)
    if COPY:
        here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        end = tl.load(num_rows).to(tl.int64) * H
        step = programs.to(tl.int64) * COLS
        for start in range(tl.program_id(0).to(tl.int64) * COLS, end, step):
            at = start + tl.arange(0, COLS)
            tl.store(there + at, tl.load(here + at, mask=at < end, other=0), mask=at < end)


def offer_rows(
    source: torch.Tensor, target: torch.Tensor | None, num_rows: torch.Tensor, words: Buffers, place: int, word: int
) -> None:
    """Copy the rows of `source` below `num_rows` to `target`, and write `word` to all ranks.

    Args:
        source, target: [R, ...] as for copy_rows; target None: nothing is copied.
        num_rows: int32 [1], at most R; read on the device.
        words: int32, contiguous, of each destination; the element at index `place` of their memory is written.
        word: a number of 32 bits.

    Raises:
        ArgumentError: unsupported shape, dtype or stride.
    """
    check_buffer("source", source, None if target is None else target.shape)
    if target is not None:
        check_buffer("target", target)
    if not runs_on(source.device):
        for tensor in words.tensors:
            tensor.view(-1)[place] = word
        if target is not None:
            copy_rows_cpu(source, target, num_rows)
        return
    copied = target is not None and source.numel() > 0
    length, here, there = source.numel() // max(len(source), 1), source.data_ptr(), 0
    programs = len(words)
    if target is not None and copied:
        there = target.data_ptr()
        programs = programs_of(source.device, cdiv(source.numel() * source.itemsize, BLOCK))
    constants = _constants(source.dtype, length, row_alignment(source.dtype, length, here | there), copied)
    numbers = here, there, place, word, len(words), programs
    _launches((programs, 1, 1), source.device, (num_rows, words.table()[0]), numbers, constants)


_launches = Launches(offer_rows_kernel)


@cache
def _constants(dtype: torch.dtype, length: int, align: int, copied: bool) -> Constants:
    constants = row_constants(dtype, length, align) | {"COLS": BLOCK // dtype.itemsize, "COPY": copied}
    return Constants(offer_rows_kernel, constants, num_warps=4)
