"""receive_rows: copy_rows and fill_rows of received rows, and of a number for each row, in one launch.

Of packed rows it copies some bytes of each row to memory of their own as well, in the order of rows (copy_columns) or
in blocks (block_scales).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import poison_word
from ..fused_signals import is_last_program, overwrite
from ..launch import Constants, Launches, registers_of_sm, runs_on
from .block_scales import BLOCK_ROWS, copy_scale_blocks
from .columns import Columns, column_parts
from .copy_columns import copy_column_blocks
from .copy_rows import BLOCK, bits_of, check_buffer, copy_rows_cpu, fill_rows_cpu
from .rows import PROGRAMS_OF_SM, cdiv, programs_of, row_alignment, row_constants
from .window_signals import WindowSignals, finished_of, rank_has_failed, release_window, signal_constants

NUMBERS = tl.constexpr(1024)  # numbers at a time


@triton.jit(do_not_specialize=["source", "target", "word", "number_word", "rows", "tiles", "programs"])
def receive_rows_kernel(
    num_rows,  # int32 [1]
    numbers_in,  # float32 [rows]
    numbers_out,  # float32 [rows]
    columns_out,  # integers, as `Columns.out`
    offsets,  # int32 [GROUPS]
    signals,  # int64 [8]
    source: tl.int64,  # address
    target: tl.int64,  # address
    word: tl.int32,  # the bits of the fill value
    number_word: tl.int32,  # likewise, of numbers
    rows: tl.int32,
    tiles: tl.int32,  # of 128 rows of columns_out
    programs: tl.int32,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    COPY: tl.constexpr,
    FILL: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
    POISON: tl.constexpr,  # 8 bytes, of rows
    NUMBER_POISON: tl.constexpr,  # 8 bytes, of numbers
    COLUMNS_AT: tl.constexpr,  # the byte of a row in which columns begin; below 0: there are none
    GROUPS: tl.constexpr,  # of columns that are stored in blocks; below 0: they are stored in order
    STEP_GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    WIDE: tl.constexpr,  # words of a row of columns
    STEP_ROWS: tl.constexpr,
    COLUMN_WORD: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
    PEERS: tl.constexpr,  # 0: no window is released
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i processes blocks i, i + programs, ... of the rows below num_rows, of those from there on, of the
    numbers, and of columns. The last one to finish overwrites all of them if this rank has failed, and releases the
    window."""
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    number = tl.load(num_rows).to(tl.int64)
    first, step = tl.program_id(0).to(tl.int64) * COLS, programs.to(tl.int64) * COLS
    if COPY:
        for start in range(first, number * H, step):
            at = start + tl.arange(0, COLS)
            tl.store(there + at, tl.load(here + at, mask=at < number * H, other=0), mask=at < number * H)
    if FILL:
        end = rows.to(tl.int64) * H
        words = tl.full([COLS], 0, WORD) + word.to(WORD)
        for start in range(number * H + first, end, step):
            at = start + tl.arange(0, COLS)
            tl.store(there + at, words, mask=at < end)
    if HAS_NUMBERS:
        filler = tl.full([NUMBERS], 0, tl.int32) + number_word.to(tl.int32)
        last = number
        if FILL:
            last = rows.to(tl.int64)
        for start in range(tl.program_id(0).to(tl.int64) * NUMBERS, last, programs.to(tl.int64) * NUMBERS):
            i = start + tl.arange(0, NUMBERS)
            values = tl.load(numbers_in + i, mask=i < number, other=0.0)
            if FILL:
                values = tl.where(i < number, values, filler.to(tl.float32, bitcast=True))
            tl.store(numbers_out + i, values, mask=i < last)
    if COLUMNS_AT >= 0:
        columns = columns_out.to(tl.int64)
        begin = target.to(tl.int64) + COLUMNS_AT
        if COPY:
            begin = source.to(tl.int64) + COLUMNS_AT
        if GROUPS >= 0:
            copy_scale_blocks(
                offsets, begin, columns, H * 4, tiles, word, programs, GROUPS, STEP_GROUPS, SCALES, STEP_WORDS, FILL
            )
        else:
            until = number
            if FILL:
                until = rows.to(tl.int64)
            copy_column_blocks(
                number, until, begin, columns, H * 4, word, programs, WIDE, STEP_ROWS, STEP_WORDS, COLUMN_WORD,
                COLUMN_ALIGN,
            )  # fmt: skip
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            failed = rank_has_failed(signals)
            if failed:
                overwrite(target, rows.to(tl.int64) * H, POISON, WORD)
                if HAS_NUMBERS:
                    overwrite(numbers_out, rows.to(tl.int64), NUMBER_POISON, tl.int32)
                if COLUMNS_AT >= 0:
                    if GROUPS >= 0:
                        overwrite(columns_out, tiles.to(tl.int64) * (128 * ((SCALES + 3) // 4)), POISON, tl.int32)
                    else:
                        overwrite(columns_out, rows.to(tl.int64) * WIDE, POISON, COLUMN_WORD)
            release_window(signals, failed, PEERS, PTX, WIDTH)


def receive_rows(
    source: torch.Tensor | None,
    target: torch.Tensor,
    num_rows: torch.Tensor,
    fill: float | None,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
    release: WindowSignals | None = None,
    columns: Columns | None = None,
) -> None:
    """Copy the rows of `source` below `num_rows` to `target` and fill the rows from there on; numbers likewise, and
    columns of the rows.

    Args:
        source: as `target`; None: nothing is copied.
        target: [R, H], 16- or 32-bit floats or int32, contiguous.
        num_rows: int32 [1], at most R; read on the device.
        fill: a number, or NaN; None: nothing is filled.
        numbers: a number for each row, float32 [R], contiguous, and where they are copied to.
        release: the window to release afterwards; if this rank has failed, the outputs are overwritten before. Only
            where kernels run.
        columns: bytes of each row that are copied out as well. Only of packed rows, int32 [R, H].

    Raises:
        ArgumentError: unsupported shape, dtype or stride.
    """
    check_buffer("target", target, floats=True)
    if columns is not None:
        columns.check(target)
    if source is not None:
        check_buffer("source", source, target.shape)
        if source.dtype is not target.dtype:
            raise ArgumentError(f"source: {source.dtype}; allowed: {target.dtype}, that of target")
    for name, x in zip(("numbers[0]", "numbers[1]"), numbers or (), strict=False):
        if x.dtype is not torch.float32 or x.shape != target.shape[:1] or not x.is_contiguous():
            raise ArgumentError(
                f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: contiguous float32 of "
                f"shape {tuple(target.shape[:1])}"
            )
    rows = len(target)
    if release is None and (not rows or (source is None and fill is None and numbers is None and columns is None)):
        return
    if not runs_on(target.device):
        if source is not None:
            copy_rows_cpu(source, target, num_rows)
        if numbers is not None:
            copy_rows_cpu(*numbers, num_rows)
        if columns is not None:
            bits = None if fill is None else bits_of(fill, target.dtype)
            columns.copy_cpu(target if source is None else source, num_rows, bits)
        if fill is not None:
            for out in (target,) if numbers is None else (target, numbers[1]):
                fill_rows_cpu(out, num_rows, fill)
        return
    there, here, length = target.data_ptr(), 0 if source is None else source.data_ptr(), target.numel() // max(rows, 1)
    blocks = cdiv(rows, NUMBERS.value) if numbers is not None else 1
    if source is not None or fill is not None:
        blocks = max(blocks, cdiv(target.numel() * target.itemsize, BLOCK))
    if columns is not None:
        blocks = max(blocks, columns.blocks(rows))
    programs = programs_of(target.device, blocks)
    words = (0, 0) if fill is None else (bits_of(fill, target.dtype), bits_of(fill, torch.float32))
    align = row_alignment(target.dtype, length, here | there)
    peers, signals = (0, num_rows) if release is None else (release.peers, release.words)
    constants = _constants(
        target.dtype, length, align, source is not None, fill is not None, numbers is not None, peers,
        None if columns is None else (columns.begin, columns.size),
        None if columns is None or columns.offsets is None else len(columns.offsets),
    )  # fmt: skip
    out, offsets, tiles = num_rows, num_rows, 0
    if columns is not None:
        out = columns.out
        if columns.offsets is not None:
            offsets, tiles = columns.offsets, len(out) // BLOCK_ROWS
    tensors = (num_rows, *((num_rows, num_rows) if numbers is None else numbers), out, offsets, signals)
    _launches((programs, 1, 1), target.device, tensors, (here, there, *words, rows, tiles, programs), constants)


_launches = Launches(receive_rows_kernel)


@cache
def _constants(
    dtype: torch.dtype,
    length: int,
    align: int,
    copied: bool,
    filled: bool,
    has_numbers: bool,
    peers: int,
    columns: tuple[int, int] | None,
    groups: int | None,
) -> Constants:
    """`columns`: (begin, size); `groups`: of columns that are stored in blocks."""
    constants = row_constants(dtype, length, align) | {"COLS": BLOCK // dtype.itemsize, "COPY": copied}
    constants |= {"FILL": filled, "HAS_NUMBERS": has_numbers, **signal_constants(peers, 4)}
    constants |= {"POISON": poison_word(dtype)[0], "NUMBER_POISON": poison_word(torch.float32)[0]}
    constants |= column_parts(columns, groups)
    return Constants(receive_rows_kernel, constants, num_warps=4, **registers_of_sm(4, PROGRAMS_OF_SM))
