"""spread_rows: fetch each token that has rows here once from its rank, and store it in all of these rows."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import Constants, Launches, runs_on
from .group_rows import Groups, padding_rows
from .push_rows import MOST_PADDING
from .rows import Buffers, RowLaunch, cdiv, power_of_two, row_alignment, row_constants


class OwnRows(NamedTuple):
    """The rows of this rank that tokens have: its table of `RowTables`."""

    row: torch.Tensor
    """int32 [W * M, K]."""
    weight: torch.Tensor
    """float32 [W * M, K]."""


@triton.jit(do_not_specialize=["out", "slots", "most", "blocks"])
def spread_rows_kernel(
    sources,  # int64 [W], addresses
    row_in,  # int32 [slots, K]
    weight_in,  # float32 [slots, K]
    error,  # int64 [1]
    row_out,  # int32 [slots, K]
    weight_out,  # float32 [slots, K]
    numbers_out,  # float32 [rows]
    offsets,  # int32 [groups]
    counts,  # int64 [groups]
    padded_counts,  # int64 [groups]
    out: tl.int64,  # address
    slots: tl.int32,
    most: tl.int32,  # slots of a source
    blocks: tl.int64,
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    PADDING: tl.constexpr,  # parts of each group's padding
    NEW: tl.constexpr,  # whether the table has just arrived: it is checked and kept, and weights are stored
):
    """Program i processes block i: first those of the slots, then those of the groups' padding."""
    row_blocks: tl.constexpr = (H + COLS - 1) // COLS
    target = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    block = tl.program_id(0).to(tl.int64)
    if block < blocks:
        slot = block // row_blocks
        first = block % row_blocks == 0
        c = block % row_blocks * COLS + tl.arange(0, COLS)
        inside = c < H
        if slot < slots:
            k = tl.arange(0, KP)
            at = slot * K + k
            rows = tl.load(row_in + at, mask=k < K, other=-1)
            if NEW:
                # After a failure the table may be of any dispatch.
                rows = tl.where(tl.load(error) == 0, rows, -1)
                if first:
                    weight = tl.load(weight_in + at, mask=rows >= 0, other=0.0)
                    tl.store(row_out + at, rows, mask=k < K)
                    tl.store(weight_out + at, weight, mask=k < K)
                    tl.store(numbers_out + rows, weight, mask=rows >= 0)
            if tl.max(rows, 0) >= 0:
                rank = slot.to(tl.int32) // most
                source = tl.multiple_of(tl.load(sources + rank).to(tl.pointer_type(WORD)), ALIGN)
                t = slot - rank.to(tl.int64) * most
                words = tl.load(source + t * H + c, mask=inside, other=0)
                for i in tl.static_range(K):
                    row = tl.load(row_in + slot * K + i)
                    if row >= 0:
                        tl.store(target + row.to(tl.int64) * H + c, words, mask=inside)
        else:
            group = (slot - slots) // PADDING
            end = tl.load(offsets + group).to(tl.int64)
            begin = end - (tl.load(padded_counts + group) - tl.load(counts + group))
            zeros = tl.zeros([COLS], tl.int32).to(WORD)
            for pad in range(begin + (slot - slots) % PADDING, end, PADDING):
                tl.store(target + pad * H + c, zeros, mask=inside)
                if NEW:
                    if first:
                        tl.store(numbers_out + pad, 0.0)


def spread_rows(
    sources: Buffers,
    table: OwnRows,
    out: torch.Tensor,
    groups: Groups,
    most_padding: int = MOST_PADDING,
    keep: OwnRows | None = None,
    numbers: torch.Tensor | None = None,
    error: torch.Tensor | None = None,
    launch: RowLaunch | None = None,
) -> None:
    """Store each token in the rows that it has here, and zero the padding rows.

    Rows of `out` that are neither padding nor of a token are not written.

    Args:
        sources: [M, H] of each rank: its tokens, 16- or 32-bit.
        table: the rows of each token here.
        out: [R, H] of the same dtype, contiguous.
        groups: from group_rows; the groups of `out`.
        most_padding: an upper bound of the padding rows of a group; 0: no padding is zeroed.
        keep: a new table is copied there, and the two following are given as well; default: no weights are stored.
        numbers: float32 [R], contiguous: the weight of each row, 0 for padding.
        error: int64 [1]; if it is not 0, the table is taken as empty.
        launch: default: RowLaunch.for_rows.
    """
    slots, k = table.row.shape
    most, hidden = sources.shape
    if not runs_on(out.device):
        spread_rows_cpu(sources, table, out, groups, most_padding, keep, numbers, error)
        return
    launch = launch or RowLaunch.for_rows(hidden, out.element_size())
    each = min(power_of_two(most_padding), MOST_PADDING) if most_padding else 1
    blocks = (slots + len(groups.offsets) * each * (most_padding > 0)) * cdiv(hidden, launch.columns)
    if not blocks:
        return
    addresses, bits = sources.table()
    address = out.data_ptr()
    kept, values, failed = keep or table, table.weight if numbers is None else numbers, addresses
    if keep is not None:
        assert numbers is not None and error is not None
        failed = error
    align = row_alignment(out.dtype, hidden, bits | address)
    _launches(
        (blocks, 1, 1), out.device,
        (addresses, *table, failed, *kept, values, groups.offsets, groups.counts, groups.padded_counts),
        (address, slots, most, blocks),
        _constants(out.dtype, k, hidden, align, launch, each, keep is not None),
    )  # fmt: skip


_launches = Launches(spread_rows_kernel)


@cache
def _constants(
    dtype: torch.dtype, k: int, hidden: int, align: int, launch: RowLaunch, padding: int, new: bool
) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"K": k, "KP": power_of_two(k), "COLS": launch.columns}
    return Constants(spread_rows_kernel, constants | {"PADDING": padding, "NEW": new}, num_warps=launch.num_warps)


def spread_rows_cpu(
    sources: Buffers,
    table: OwnRows,
    out: torch.Tensor,
    groups: Groups,
    most_padding: int,
    keep: OwnRows | None,
    numbers: torch.Tensor | None,
    error: torch.Tensor | None,
) -> None:
    """spread_rows in torch operations."""
    row, weight = table
    most, padding = sources.shape[0], padding_rows(groups) if most_padding else torch.empty(0, dtype=torch.int64)
    if keep is not None:
        assert numbers is not None and error is not None
        row = row if int(error) == 0 else torch.full_like(row, -1)
        weight = torch.where(row >= 0, weight, 0)
        keep.row.copy_(row)
        keep.weight.copy_(weight)
        numbers[row[row >= 0].long()] = weight[row >= 0]
        numbers[padding] = 0
    for source, tokens in enumerate(sources.tensors):
        token, kth = (row[source * most : (source + 1) * most] >= 0).nonzero(as_tuple=True)
        out[row[source * most + token, kth].long()] = tokens[token]
    out[padding] = 0
