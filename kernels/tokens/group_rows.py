"""group_rows: lay out all destinations' buffers from the matrix of all ranks' counts.

The rows of a physical expert form a group in its rank's buffer, in order of (source rank, token, k). Groups are in
order of physical expert, each padded to a multiple of `align`, or all of one length if batched. The rows of a group
after the first `expert_capacity` are dropped, then those that would lie at or beyond `capacity`. All ranks compute the
same layout, in one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, runs_on
from .rows import power_of_two
from .rows_cpu import host_tensor

NO_LIMIT = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class PhysicalExperts:
    """The physical experts of each rank: rank w has bounds[w] to bounds[w + 1] (exclusive). Made by `divided`."""

    bounds: tuple[int, ...]
    destination: torch.Tensor
    """int32 [S]: the rank of each physical expert."""
    first: torch.Tensor
    """int32 [S]: the first physical expert of the same rank."""

    @classmethod
    def divided(cls, bounds: tuple[int, ...], device: torch.device) -> PhysicalExperts:
        if bounds[0] != 0 or any(b < a for a, b in zip(bounds, bounds[1:], strict=False)):
            raise ArgumentError(f"bounds: {bounds}; allowed: ascending from 0")
        lengths = torch.tensor(bounds[1:], device="cpu") - torch.tensor(bounds[:-1], device="cpu")
        destination = torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(lengths)
        first = torch.tensor(bounds[:-1], dtype=torch.int32, device="cpu").repeat_interleave(lengths)
        return cls(bounds, destination.to(device), first.to(device))

    @property
    def count(self) -> int:
        return self.bounds[-1]


class Groups(NamedTuple):
    """The result of group_rows. `start` and `limit` are of this rank as a sender, the others as a destination."""

    start: torch.Tensor
    """int32 [S]: the row of this rank's first pair of each physical expert, in the destination's buffer."""
    limit: torch.Tensor
    """int32 [S]: how many of this rank's pairs of each physical expert are kept; later ones are dropped."""
    offsets: torch.Tensor
    """int32 [S_local]: the end of each group, padding included, as torch._grouped_mm takes them; at most capacity."""
    counts: torch.Tensor
    """int64 [S_local]: rows of each group."""
    padded_counts: torch.Tensor
    """int64 [S_local]: rows of each group, padding included."""
    num_rows: torch.Tensor
    """int32 [1]: the end of the last group."""
    overflow: torch.Tensor
    """int64 [2]: dropped rows and bad ids of all ranks together; equal on all ranks."""


@triton.jit
def lay_out(
    matrix,  # int32 [ranks, pitch], of which physical_experts + 1 columns are counts
    first_table,  # int32 [physical_experts]
    matrix_out,  # int32 [ranks, physical_experts + 1]
    valid,  # whether the counts are; otherwise they are taken as 0
    pitch,
    ranks,
    physical_experts,
    me,
    align,
    capacity,
    expert_capacity,
    EXPERTS: tl.constexpr,  # a power of two
    RANKS: tl.constexpr,  # rows of the matrix at a time
    BATCHED: tl.constexpr,
    COPY: tl.constexpr,  # whether the counts are copied to matrix_out
):
    """Return, for each physical expert: `Groups.start`, `Groups.limit`, where its group begins and ends, the rows kept;
    and the numbers of dropped rows and of bad ids."""
    s = tl.arange(0, EXPERTS)
    there = s < physical_experts
    width = physical_experts + 1
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    bad = tl.zeros([RANKS], tl.int64)
    for base in range(0, ranks, RANKS):
        r = base + tl.arange(0, RANKS)
        known = r < tl.where(valid, ranks, 0)  # `&` of a vector and a number is no mask to Triton 3.9's interpreter
        block = tl.load(matrix + r[:, None] * pitch + s[None, :], mask=known[:, None] & there[None, :], other=0)
        total += tl.sum(block, 0)
        before += tl.sum(tl.where((r < me)[:, None], block, 0), 0)
        of_bad = tl.load(matrix + r * pitch + physical_experts, mask=known, other=0)
        bad += of_bad.to(tl.int64)
        if COPY:
            tl.store(matrix_out + r[:, None] * width + s[None, :], block, mask=(r < ranks)[:, None] & there[None, :])
            tl.store(matrix_out + r * width + physical_experts, of_bad, mask=r < ranks)
    mine = tl.load(matrix + me * pitch + s, mask=s < tl.where(valid, physical_experts, 0), other=0)
    kept = tl.minimum(total, expert_capacity)
    if BATCHED:
        padded = tl.where(there, expert_capacity, 0)
    else:
        padded = (kept + align - 1) // align * align
    ends = tl.cumsum(padded, 0)
    first = tl.load(first_table + s, mask=there, other=0)
    ends -= tl.gather(ends - padded, first, 0)
    begins = tl.minimum(ends - padded, capacity)
    ends = tl.minimum(ends, capacity)
    fits = tl.minimum(kept, ends - begins)
    limit = tl.minimum(tl.maximum(fits - before, 0), mine)
    return begins + before, limit, begins, ends, fits, tl.sum((total - fits).to(tl.int64), 0), tl.sum(bad, 0)


@triton.jit
def store_groups(
    start_out, limit_out, offsets_out, counts_out, padded_out, num_rows_out, overflow_out,
    start, limit, begins, ends, fits, dropped, bad, physical_experts, low, high, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Store `Groups`; low, high: bounds of this rank's physical experts."""
    s = tl.arange(0, EXPERTS)
    there = s < physical_experts
    tl.store(start_out + s, start, mask=there)
    tl.store(limit_out + s, limit, mask=there)
    own = (s >= low) & (s < high)
    tl.store(offsets_out + s - low, ends, mask=own)
    tl.store(counts_out + s - low, fits.to(tl.int64), mask=own)
    tl.store(padded_out + s - low, (ends - begins).to(tl.int64), mask=own)
    tl.store(num_rows_out, tl.max(tl.where(own, ends, 0), 0))
    tl.store(overflow_out, dropped)
    tl.store(overflow_out + 1, bad)


@triton.jit(
    do_not_specialize=["ranks", "physical_experts", "me", "low", "high", "align", "capacity", "expert_capacity"]
)
def group_rows_kernel(
    matrix,  # int32 [ranks, physical_experts + 1]
    first_table,  # int32 [physical_experts]
    start_out,
    limit_out,
    offsets_out,
    counts_out,
    padded_out,
    num_rows_out,
    overflow_out,
    ranks: tl.int32,
    physical_experts: tl.int32,
    me: tl.int32,
    low: tl.int32,  # bounds of this rank's physical experts
    high: tl.int32,
    align: tl.int32,
    capacity: tl.int32,
    expert_capacity: tl.int32,
    EXPERTS: tl.constexpr,  # a power of two
    RANKS: tl.constexpr,  # rows of the matrix at a time
    BATCHED: tl.constexpr,
):
    start, limit, begins, ends, fits, dropped, bad = lay_out(
        matrix, first_table, matrix, tl.full((), True, tl.int1), physical_experts + 1, ranks, physical_experts, me,
        align, capacity, expert_capacity, EXPERTS, RANKS, BATCHED, False,
    )  # fmt: skip
    store_groups(
        start_out, limit_out, offsets_out, counts_out, padded_out, num_rows_out, overflow_out,
        start, limit, begins, ends, fits, dropped, bad, physical_experts, low, high, EXPERTS,
    )  # fmt: skip


def group_rows(
    matrix: torch.Tensor,
    physical_experts: PhysicalExperts,
    me: int,
    capacity: int,
    align: int = 1,
    expert_capacity: int | None = None,
    batched: bool = False,
) -> Groups:
    """Lay out the rows of all destinations' buffers.

    Args:
        matrix: int32 [W, S + 1]; row r holds the counts of count_pairs on rank r.
        me: this rank, 0 to W - 1.
        capacity: rows of each destination's buffer, a multiple of `align`.
        align: alignment of groups, in rows. All padded groups together are below 2**31 rows.
        expert_capacity: maximum rows of a group; None: unlimited.
        batched: every group takes `expert_capacity` rows.

    Raises:
        ArgumentError: unsupported shape, dtype or number.
    """
    ranks = len(physical_experts.bounds) - 1
    if (
        matrix.shape != (ranks, physical_experts.count + 1)
        or matrix.dtype is not torch.int32
        or not matrix.is_contiguous()
    ):
        raise ArgumentError(
            f"matrix: {matrix.dtype} of shape {tuple(matrix.shape)}; allowed: contiguous int32 of shape "
            f"{(ranks, physical_experts.count + 1)}"
        )
    most = check_capacities(capacity, align, expert_capacity, batched)
    if not runs_on(matrix.device):
        return group_rows_cpu(matrix, physical_experts, me, capacity, align, most, batched)
    low, high = physical_experts.bounds[me], physical_experts.bounds[me + 1]
    groups = new_groups(physical_experts, me, matrix.device)
    _groupings(
        (1, 1, 1), matrix.device, (matrix, physical_experts.first, *groups),
        (ranks, physical_experts.count, me, low, high, align, capacity, most),
        _group_constants(max(32, power_of_two(physical_experts.count)), batched),
    )  # fmt: skip
    return groups


def check_capacities(capacity: int, align: int, expert_capacity: int | None, batched: bool) -> int:
    """Check the arguments of group_rows; return `expert_capacity`, or NO_LIMIT for None.

    Raises:
        ArgumentError: a number that is not allowed.
    """
    if align < 1 or capacity < 0 or capacity % align or capacity > NO_LIMIT:
        raise ArgumentError(f"capacity: {capacity}; allowed: a multiple of align, {align}, below 2**31")
    if batched and expert_capacity is None:
        raise ArgumentError("expert_capacity: None; batched groups need a length")
    return NO_LIMIT if expert_capacity is None else expert_capacity


def new_groups(physical_experts: PhysicalExperts, me: int, device: torch.device) -> Groups:
    """Return uninitialised memory for the groups of a rank."""
    count, own = physical_experts.count, physical_experts.bounds[me + 1] - physical_experts.bounds[me]
    ints, longs = ([torch.empty(n, dtype=dtype, device=device) for n in sizes] for dtype, sizes in (
        (torch.int32, (count, count, own, 1)), (torch.int64, (own, own, 2)),
    ))  # fmt: skip
    return Groups(
        start=ints[0], limit=ints[1], offsets=ints[2], counts=longs[0], padded_counts=longs[1], num_rows=ints[3],
        overflow=longs[2],
    )  # fmt: skip


_groupings = Launches(group_rows_kernel)


@cache
def _group_constants(padded: int, batched: bool) -> Constants:
    constants = {"EXPERTS": padded, "RANKS": rank_rows(padded), "BATCHED": batched}
    return Constants(group_rows_kernel, constants, num_warps=group_warps(padded))


def rank_rows(padded_experts: int) -> int:
    """Rows of the matrix that are summed at a time: 16 registers per thread."""
    return max(1, min(16, 4096 // padded_experts))


def group_warps(padded_experts: int) -> int:
    """Warps of `group_rows_kernel`: with 8 for 2048 experts, triton 3.8 spills registers on sm_90."""
    return 8 if padded_experts < 2048 else 16


def group_rows_cpu(
    matrix: torch.Tensor,
    physical_experts: PhysicalExperts,
    me: int,
    capacity: int,
    align: int,
    expert_capacity: int,
    batched: bool,
) -> Groups:
    """group_rows on the CPU."""
    table, low, high = matrix.numpy(), physical_experts.bounds[me], physical_experts.bounds[me + 1]
    add = np.add.reduce  # at less cost than `sum`
    counts = table[:, :-1].astype(np.int64)
    total, before = add(counts), add(counts[:me])
    kept = np.minimum(total, expert_capacity)
    padded = np.full_like(kept, expert_capacity) if batched else (kept + align - 1) // align * align
    ends = padded.cumsum()
    ends -= (ends - padded)[physical_experts.first.numpy()]
    begins, ends = np.minimum(ends - padded, capacity), np.minimum(ends, capacity)
    fits = np.minimum(kept, ends - begins)
    limit = np.minimum(np.maximum(fits - before, 0), counts[me])
    own = ends[low:high].astype(np.int32)
    groups = (
        (begins + before).astype(np.int32), limit.astype(np.int32), own, fits[low:high].copy(),
        (ends - begins)[low:high], np.maximum.reduce(own, initial=0, keepdims=True),
        np.array([add(total - fits), add(table[:, -1])]),
    )  # fmt: skip
    return Groups(*map(host_tensor, groups))


def padding_rows(groups: Groups) -> torch.Tensor:
    """Return the padding rows of the own buffer, int64."""
    number = groups.padded_counts - groups.counts
    begin = groups.offsets.long() - number
    start = (begin - (number.cumsum(0) - number)).repeat_interleave(number)
    return start + torch.arange(len(start), device=start.device)
