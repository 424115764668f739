"""block_scales: the scales of packed rows, in the layout in which grouped GEMMs with block scales take them.

Each group of rows is padded to a multiple of 128 rows, and each row to a multiple of 4 scales of one byte; the padding
is zero. A block of 128 rows by 4 scales is 512 adjacent bytes: row r, scale c of it is byte r % 32 * 16 + r // 32 * 4 +
c. Blocks are in order of groups, then rows, then scales. cuBLAS and CUTLASS call it the layout of 128 x 4 block scaling
factors, torch `SwizzleType.SWIZZLE_32_4_4`; a grouped GEMM finds the groups by the ends of groups alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, runs_on
from .copy_columns import check_columns
from .rows import cdiv, power_of_two, programs_of

BLOCK_ROWS, BLOCK_SCALES = 128, 4
_STEP_WORDS = 8  # blocks of a step: 8 words of each of 128 threads
_STEP_GROUPS = 128


def block_rows(rows: int, groups: int, align: int) -> int:
    """Return the largest number of rows, groups padded to 128, that `rows` rows of so many groups may take; a multiple
    of 128, at least `rows`.

    Args:
        align: the rows of each group are a multiple of it.
    """
    # A group of n rows, a multiple of `least`, has up to 128 - least rows of padding.
    least = min(align & -align, BLOCK_ROWS)  # the largest power of two that divides both: Dynamo traces no gcd
    nonempty = min(groups, rows // align)
    return max((rows + nonempty * (BLOCK_ROWS - least)) // BLOCK_ROWS, cdiv(rows, BLOCK_ROWS)) * BLOCK_ROWS


def block_width(scales: int) -> int:
    """Return the scales of a row with their padding."""
    return cdiv(scales, BLOCK_SCALES) * BLOCK_SCALES


@triton.jit
def copy_scale_blocks(
    offsets, source, target, row_bytes, tiles, filler, programs,
    GROUPS: tl.constexpr, STEP_GROUPS: tl.constexpr, SCALES: tl.constexpr, STEP_WORDS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Program i stores parts i, i + programs, ... of `tiles` tiles: 128 rows, of up to STEP_WORDS blocks each.

    `source`: the address of the scales of the first row; `row_bytes`: a multiple of 16. Tiles behind those of the last
    group are filled with the int32 `filler`, if FILL.
    """
    WIDE: tl.constexpr = (SCALES + 3) // 4  # words of a row: four scales, which are one row of a block
    parts: tl.constexpr = (WIDE + STEP_WORDS - 1) // STEP_WORDS
    # Rows are aligned to 16 bytes, but their words are read by vectors of which each is inside a row or outside.
    TOGETHER: tl.constexpr = 4 if WIDE % 4 == 0 else (2 if WIDE % 2 == 0 else 1)
    here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int32)), 4 * TOGETHER)
    there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    pitch = tl.multiple_of((tl.full((), 0, tl.int64) + row_bytes) // 4, 4)
    for piece in range(tl.program_id(0).to(tl.int64), tiles * parts, programs.to(tl.int64)):
        # A loop variable is a number of Python's in the interpreter.
        part = (tl.full((), 0, tl.int64) + piece % parts).to(tl.int32)
        tile = (tl.full((), 0, tl.int64) + piece // parts).to(tl.int32)
        total = tl.full((), 0, tl.int32)  # tiles of the groups so far
        first, begin, end = total, total, total  # of the group that has the tile
        for some in range(0, GROUPS, STEP_GROUPS):
            g = some + tl.arange(0, STEP_GROUPS)
            ends = tl.load(offsets + g, mask=g < GROUPS, other=0)
            begins = tl.load(offsets + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
            number = tl.where(g < GROUPS, (ends - begins + 127) // 128, 0)
            upto = total + tl.cumsum(number, 0)
            has = (upto - number <= tile) & (tile < upto)
            first += tl.sum(tl.where(has, upto - number, 0), 0)
            begin += tl.sum(tl.where(has, begins, 0), 0)
            end += tl.sum(tl.where(has, ends, 0), 0)
            total += tl.sum(number, 0)
        # In the order of the target.
        at = tl.arange(0, 128)[None, :]
        row = begin + (tile - first) * 128 + at % 4 * 32 + at // 4
        block = part * STEP_WORDS + tl.arange(0, STEP_WORDS)[:, None]
        words = tl.load(here + row.to(tl.int64) * pitch + block, mask=(row < end) & (block < WIDE), other=0)
        if SCALES % 4 > 0:  # bytes behind the last scale
            words = tl.where(block == WIDE - 1, words & ((1 << SCALES % 4 * 8) - 1), words)
        blocks = tl.full((), WIDE, tl.int32)
        if FILL:
            words = tl.where(tile < total, words, filler.to(tl.int32))
        else:
            blocks = tl.where(tile < total, blocks, 0)
        mask = (block < blocks) & (at < 128)
        tl.store(there + (tile.to(tl.int64) * (128 * WIDE) + block * 128) + at, words, mask=mask)


@triton.jit(do_not_specialize=["source", "target", "row_bytes", "tiles", "filler", "programs"])
def block_scales_kernel(
    offsets,  # int32 [GROUPS]
    source: tl.int64,  # address
    target: tl.int64,  # address
    row_bytes: tl.int64,
    tiles: tl.int32,
    filler: tl.int32,
    programs: tl.int32,
    GROUPS: tl.constexpr,
    STEP_GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    FILL: tl.constexpr,
):
    """Program i stores parts i, i + programs, ..., as `copy_scale_blocks` has them."""
    copy_scale_blocks(
        offsets, source, target, row_bytes, tiles, filler, programs, GROUPS, STEP_GROUPS, SCALES, STEP_WORDS, FILL
    )


_launches = Launches(block_scales_kernel)


@cache
def block_constants(groups: int, scales: int) -> dict[str, Any]:
    """Return the constants of kernels that store so many scales of each row in blocks."""
    words = cdiv(scales, BLOCK_SCALES)
    step = min(power_of_two(words), _STEP_WORDS)
    return {
        "GROUPS": groups, "STEP_GROUPS": min(power_of_two(max(groups, 1)), _STEP_GROUPS), "SCALES": scales,
        "STEP_WORDS": step,
    }  # fmt: skip


def block_pieces(tiles: int, scales: int) -> int:
    """Return the number of parts of so many tiles."""
    words = cdiv(scales, BLOCK_SCALES)
    return tiles * cdiv(words, min(power_of_two(words), _STEP_WORDS))


@cache
def _constants(groups: int, scales: int, fill: bool) -> Constants:
    return Constants(block_scales_kernel, block_constants(groups, scales) | {"FILL": fill}, num_warps=4)


def block_scales(
    rows: torch.Tensor, begin: int, scales: int, out: torch.Tensor, offsets: torch.Tensor, fill: int | None = None
) -> None:
    """Store the scales of packed rows in blocks of 128 rows by 4 scales, group by group. Rows behind the last group are
    not read.

    Args:
        rows: int32 [R, W], contiguous; rows of a multiple of 16 bytes.
        begin: the byte of a row in which its scales begin, a multiple of 16.
        scales: of a row, of one byte each.
        out: int32 [N, scales / 4, rounded up], contiguous; N as `block_rows` returns it.
        offsets: int32 [S], the end of each group, at most R; read on the device.
        fill: what is stored in rows of `out` behind those of the last group: four equal bytes, as an int32; None: they
            are not written.

    Raises:
        ArgumentError: unsupported shape, dtype, stride or place.
    """
    check_blocks(rows, begin, scales, out, offsets)
    if not out.numel():
        return
    if not runs_on(out.device):
        blocks = block_scales_torch(rows.view(torch.uint8)[:, begin : begin + scales], offsets, len(out), fill)
        out.view(torch.uint8).copy_(blocks)
        return
    tiles = len(out) // BLOCK_ROWS
    programs = programs_of(out.device, block_pieces(tiles, scales))
    numbers = rows.data_ptr() + begin, out.data_ptr(), rows.shape[1] * 4, tiles, fill or 0, programs
    constants = _constants(len(offsets), scales, fill is not None)
    _launches((programs, 1, 1), out.device, (offsets,), numbers, constants)


def check_blocks(rows: torch.Tensor, begin: int, scales: int, out: torch.Tensor, offsets: torch.Tensor) -> None:
    """
    Raises:
        ArgumentError: unsupported shape, dtype, stride or place of an argument of `block_scales`.
    """
    check_columns(rows, begin, scales)
    fits = out.dim() == 2 and out.shape[1] == cdiv(scales, BLOCK_SCALES) and len(out) % BLOCK_ROWS == 0
    if not fits or out.dtype is not torch.int32 or not out.is_contiguous():
        raise ArgumentError(
            f"out: {out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}; allowed: contiguous int32 of shape "
            f"[N, {cdiv(scales, BLOCK_SCALES)}], N a multiple of {BLOCK_ROWS}"
        )
    if offsets.dim() != 1 or offsets.dtype is not torch.int32 or not offsets.is_contiguous():
        raise ArgumentError(
            f"offsets: {offsets.dtype} of shape {tuple(offsets.shape)}; allowed: contiguous int32 of shape [S]"
        )


def block_scales_torch(
    scales: torch.Tensor, offsets: torch.Tensor, number: int, fill: int | None = None
) -> torch.Tensor:
    """block_scales in torch operations, which do not synchronise, and can be traced.

    Args:
        scales: uint8 [R, scales].
        offsets: int32 [S].
        number: N, the rows of the result.
        fill: as for block_scales; None: zero.

    Returns:
        uint8 [N, scales, rounded up to 4].
    """
    width = block_width(scales.shape[1])
    place, last = _places(offsets, len(scales), number)
    spread = scales.new_zeros(number + 1, width)
    # Rows of no group are stored in a last row, which is cut off.
    spread[place] = torch.nn.functional.pad(scales, (0, width - scales.shape[1]))
    tiles = spread[:number].view(-1, 4, 32, width // BLOCK_SCALES, BLOCK_SCALES)
    blocks = tiles.permute(0, 3, 2, 1, 4).reshape(number, width)
    if not fill:
        return blocks
    there = torch.arange(number, device=scales.device)[:, None] < last
    return torch.where(there, blocks, fill & 255)


def unblocked_scales(blocks: torch.Tensor, offsets: torch.Tensor, rows: int, scales: int) -> torch.Tensor:
    """Return the scales of rows, [rows, scales], of `block_scales`' result; of rows of no group, any.

    Args:
        blocks: [N, scales, rounded up to 4], of a dtype of one byte.
        offsets: int32 [S].
    """
    number, width = blocks.shape
    tiles = blocks.view(torch.uint8).view(-1, width // BLOCK_SCALES, 32, 4, BLOCK_SCALES)
    spread = tiles.permute(0, 3, 2, 1, 4).reshape(number, width)
    place, _ = _places(offsets, rows, number)
    return spread[place.clamp(max=max(number - 1, 0)), :scales].view(blocks.dtype)


def _places(offsets: torch.Tensor, rows: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each row among rows whose groups are padded to 128, int64 [rows], `number` for rows of no
    group; and the end of the last group there, int64 [1]."""
    zero = offsets.new_zeros(1, dtype=torch.int64)
    begins = torch.cat((zero, offsets.long()))
    # A last, empty group, so that there is one. Nothing is written in place: checkpointed regions may save each result.
    ends = torch.cat((begins[1:], begins.amax()[None]))
    padded = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    upto = padded.cumsum(0)
    row = torch.arange(rows, device=offsets.device)
    group = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    place = (upto - padded - begins)[group] + row
    return torch.where(row < ends[-1], place, number), upto[-1:]


def block_scales_reference(scales: torch.Tensor, ends: Sequence[int]) -> list[int]:
    """Return the bytes of block_scales by their definition, byte by byte; those of groups only. For tests; CPU only."""
    given: list[list[int]] = scales.tolist()
    width, result, begin = block_width(scales.shape[1]), list[int](), 0
    for end in ends:
        rows = given[begin:end]
        padded = cdiv(len(rows), BLOCK_ROWS) * BLOCK_ROWS
        blocks = [0] * (padded * width)
        for r, of_row in enumerate(rows):
            for c, scale in enumerate(of_row):
                block = r // BLOCK_ROWS * (width // BLOCK_SCALES) + c // BLOCK_SCALES
                blocks[block * 512 + r % 32 * 16 + r % BLOCK_ROWS // 32 * 4 + c % BLOCK_SCALES] = scale
        result += blocks
        begin = end
    return result
