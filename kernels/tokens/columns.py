"""Columns: some bytes of each packed row, which receive_rows copies to memory of their own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError
from .block_scales import BLOCK_ROWS, block_constants, block_pieces, block_scales_torch, check_blocks
from .copy_columns import TORCH_WORDS, check_columns, column_blocks, column_constants, copy_columns_cpu

_NO_COLUMNS = {
    "COLUMNS_AT": -1, "COLUMN_WORD": None, "GROUPS": -1, "STEP_GROUPS": 1, "SCALES": 1, "STEP_WORDS": 1, "WIDE": 1,
    "STEP_ROWS": 1, "COLUMN_ALIGN": 1,
}  # fmt: skip


def column_words(size: int) -> tuple[int, torch.dtype]:
    """Return the number and the dtype of the integers that are `size` bytes of a row in `Columns.out`."""
    dtype = TORCH_WORDS[math.gcd(size, 8)]
    return size // dtype.itemsize, dtype


class Columns(NamedTuple):
    """Some bytes of each packed row, and where receive_rows copies them to."""

    begin: int
    """The byte of a row in which they begin, a multiple of 16."""
    size: int
    """Bytes of a row, at least 1."""
    out: torch.Tensor
    """Contiguous integers: [R, n] as `column_words` says; in blocks int32 as for block_scales."""
    offsets: torch.Tensor | None
    """int32 [S]: stored in blocks of these groups, as by block_scales. None: in order."""

    def check(self, rows: torch.Tensor) -> None:
        """
        Raises:
            ArgumentError: these are no bytes of packed rows `rows`, or do not fit in `out`.
        """
        if self.offsets is not None:
            check_blocks(rows, self.begin, self.size, self.out, self.offsets)
            return
        check_columns(rows, self.begin, self.size)
        number, dtype = column_words(self.size)
        shape = len(rows), number
        if self.out.dtype is not dtype or self.out.shape != shape or not self.out.is_contiguous():
            raise ArgumentError(
                f"columns.out: {self.out.dtype} of shape {tuple(self.out.shape)}, strides {self.out.stride()}; "
                f"allowed: contiguous {dtype} of shape {shape}"
            )

    def blocks(self, rows: int) -> int:
        """Return into how many blocks the programs divide them."""
        if self.offsets is None:
            return column_blocks(rows, self.size)
        return block_pieces(len(self.out) // BLOCK_ROWS, self.size)

    def copy_cpu(self, rows: torch.Tensor, num_rows: torch.Tensor, fill: int | None) -> None:
        """Copy them in torch operations, and fill what is left with the bits of an int32."""
        if self.offsets is not None:
            part = rows.view(torch.uint8)[:, self.begin : self.begin + self.size]
            self.out.view(torch.uint8).copy_(block_scales_torch(part, self.offsets, len(self.out), fill))
            return
        copy_columns_cpu(rows, self.begin, self.out, num_rows)
        if fill is not None:
            self.out[int(num_rows) :].view(torch.uint8).fill_(fill & 255)


def column_parts(columns: tuple[int, int] | None, groups: int | None) -> dict[str, Any]:
    """Return the constants of the kernel for columns (begin, size), in blocks of `groups` groups, or in order."""
    if columns is None:
        return _NO_COLUMNS
    begin, size = columns
    if groups is not None:
        return _NO_COLUMNS | {"COLUMNS_AT": begin} | block_constants(groups, size)
    in_order = column_constants(size)
    in_order = in_order | {"COLUMN_WORD": in_order["WORD"], "COLUMN_ALIGN": in_order["ALIGN"]}
    return {name: in_order.get(name, value) for name, value in _NO_COLUMNS.items()} | {"COLUMNS_AT": begin}
