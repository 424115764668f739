"""Scales in blocks of 128 rows by 4, group by group: equal to a rearrangement of each group, byte for byte."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from test_token_kernels import device, same  # noqa: F401 # a fixture
from variants import crossed

from shardweave.kernels import (
    Columns,
    block_rows,
    block_scales,
    block_scales_torch,
    block_width,
    column_words,
    unblocked_scales,
)
from shardweave.kernels.tokens.block_scales import block_scales_reference
from shardweave.kernels.tokens.receive_rows import receive_rows

POISON = 0x5A5A5A5A
# Sizes of groups, their alignment, scales of a row, the byte of a row in which they begin, and rows of the buffer.
CASES: list[tuple[list[int], int, int, int, int]] = [
    ([5, 0, 130, 128, 1], 1, 7, 16, 300),
    ([32, 0, 0, 160], 32, 8, 32, 192),
    ([128, 384], 128, 33, 16, 512),
    ([0, 0], 1, 1, 0, 3),
    ([], 1, 3, 16, 5),
    ([96, 288], 96, 70, 48, 384),
    ([int(n) for n in np.random.default_rng(0).integers(0, 3, 150)], 1, 4, 16, 320),
]
FILLS = [None, 0, -1]


def to_blocked(scales: torch.Tensor) -> torch.Tensor:
    """Padded to 128 rows and 4 columns, then as torch's tests for block-scaled GEMMs rearrange a matrix of scales."""
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    blocks = padded.view(len(padded) // 128, 128, padded.shape[1] // 4, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


def of_groups(scales: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    parts = [to_blocked(part) for part in scales[: sum(sizes)].split(sizes) if len(part)] if sizes else []
    return torch.cat(parts) if parts else scales.new_empty(0)


def rows_with_scales(case: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Packed rows of random bytes, the scales of each, the ends of groups, and the rows of their blocks."""
    sizes, align, scales, begin, rows = case
    words = -(-(begin + scales) // 16) * 4
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, words * 4), generator=generator, dtype=torch.uint8)
    offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    return packed.view(torch.int32), packed[:, begin : begin + scales], offsets, block_rows(rows, len(sizes), align)


# Each case with one fill.
@crossed(
    "case, fill", CASES, FILLS, ids=lambda value: str(value)[:40],
    gate=lambda case, fill: (CASES.index(case) + FILLS.index(fill)) % 3 == 0,
)  # fmt: skip
def test_block_scales(device: str, case: Any, fill: int | None) -> None:  # noqa: F811
    sizes, _, scales, begin, _ = case
    rows, given, offsets, number = rows_with_scales(case)
    out = torch.full((number, -(-scales // 4)), POISON, dtype=torch.int32, device=device)
    block_scales(rows.to(device), begin, scales, out, offsets.to(device), fill)
    want, got = of_groups(given, sizes), out.cpu().view(torch.uint8).flatten()
    assert want.tolist() == block_scales_reference(given, offsets.tolist())
    same(got[: len(want)], want)
    if fill is not None:
        assert (got[len(want) :].view(torch.int32) == fill).all()
    blocks = out.cpu().view(torch.uint8)
    end = sum(sizes)
    same(unblocked_scales(blocks, offsets, len(rows), scales)[:end], given[:end])


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: str(case)[:40])
def test_block_scales_writes_groups_only(device: str, case: Any) -> None:  # noqa: F811
    """Without `fill`, kernels leave what is behind the last group."""
    sizes, _, scales, begin, _ = case
    rows, given, offsets, number = rows_with_scales(case)
    out = torch.full((number + 128, -(-scales // 4)), POISON, dtype=torch.int32, device=device)
    block_scales(rows.to(device), begin, scales, out, offsets.to(device))
    rest = out.cpu().flatten()[len(of_groups(given, sizes)) // 4 :]
    assert len(rest) and len(set(rest.tolist())) == 1  # left, or zero by torch operations


FILLED_ROWS = [None, 0.0, math.nan]


# Each case with one fill, copied and not.
@crossed(
    "case, fill, copied", CASES, FILLED_ROWS, [True, False], ids=lambda value: str(value)[:40],
    gate=lambda case, fill, copied: (CASES.index(case) + FILLED_ROWS.index(fill) + copied) % 3 == 0,
)  # fmt: skip
def test_receive_rows_stores_scales_in_blocks(
    device: str,  # noqa: F811
    case: Any,
    fill: float | None,
    copied: bool,
) -> None:
    """And the rows as without it."""
    sizes, _, scales, begin, _ = case
    rows, given, offsets, number = rows_with_scales(case)
    rows, end = rows.to(device), sum(sizes)
    target = torch.full_like(rows, POISON) if copied else rows.clone()
    out = torch.full((number, -(-scales // 4)), POISON, dtype=torch.int32, device=device)
    columns = Columns(begin, scales, out, offsets.to(device))
    num_rows = torch.tensor([end], dtype=torch.int32, device=device)
    receive_rows(rows if copied else None, target, num_rows, fill, None, None, columns)
    want, got = of_groups(given, sizes), out.cpu().view(torch.uint8).flatten()
    same(got[: len(want)], want)
    same(target[:end], rows[:end])
    if fill is not None:
        bits = -1 if math.isnan(fill) else 0
        assert (got[len(want) :].view(torch.int32) == bits).all() and (target[end:] == bits).all()


COLUMN_BYTES = [1, 2, 4, 12, 24, 226, 1040]


@crossed(
    "size, fill", COLUMN_BYTES, FILLED_ROWS, ids=str,
    gate=lambda size, fill: (COLUMN_BYTES.index(size) + FILLED_ROWS.index(fill)) % 3 == 0,
)  # fmt: skip
def test_receive_rows_copies_columns(device: str, size: int, fill: float | None) -> None:  # noqa: F811
    """In order, of any size, from memory that is copied, or where rows stay."""
    for number, copied in ((0, True), (3, True), (37, False), (40, True)):
        words = -(-(16 + size) // 16) * 4
        rows = torch.randint(0, 256, (40, words * 4), dtype=torch.uint8).view(torch.int32).to(device)
        target = torch.full_like(rows, POISON) if copied else rows.clone()
        columns, dtype = column_words(size)
        out = torch.full((40, columns), 90, dtype=dtype, device=device)
        num_rows = torch.tensor([number], dtype=torch.int32, device=device)
        given = Columns(16, size, out, None)
        receive_rows(rows if copied else None, target, num_rows, fill, None, None, given)
        got = out.cpu().view(torch.uint8)
        same(got[:number], rows.cpu().view(torch.uint8)[:number, 16 : 16 + size])
        left = torch.full((40, columns), 90, dtype=dtype).view(torch.uint8)
        rest = left[number:] if fill is None else left[number:].fill_(255 if math.isnan(fill) else 0)
        same(got[number:], rest)
        same(target[:number], rows[:number])


@pytest.mark.plan
@pytest.mark.parametrize("align", [1, 3, 8, 32, 48, 96, 128, 200, 256])
def test_block_rows_have_room_for_all_groups(align: int) -> None:
    """And not more than a block for each group; a multiple of 128, at least as many as rows, as torch asks for."""
    rng = np.random.default_rng(align)
    for _ in range(200):
        groups, least = int(rng.integers(1, 9)), int(rng.integers(0, 9))
        rows = align * int(rng.integers(least, 40))
        cuts = np.sort(rng.integers(0, rows // align + 1, groups - 1))
        sizes = np.diff([0, *cuts, rows // align]) * align
        needed = int((-(-sizes // 128) * 128).sum())
        got = block_rows(rows, groups, align)
        assert needed <= got and rows <= got and got % 128 == 0 and got <= rows + 128 * (groups + 1)
    assert block_rows(128 * 5, 4, 128) == 640 and block_rows(0, 4, 8) == 0 and block_rows(5, 0, 1) == 128


@pytest.mark.plan
def test_traced_operations_equal_kernels() -> None:
    rows, given, offsets, number = rows_with_scales(CASES[0])
    eager = block_scales_torch(given, offsets, number, -1)
    compiled = torch.compile(block_scales_torch, backend="aot_eager", fullgraph=True)(given, offsets, number, -1)
    same(compiled, eager)
    assert eager.shape == (number, block_width(7)) and len(rows) == 300
