"""route_rows: group_rows and locate_rows in one launch, from the matrix of counts as peers wrote it.

Every program lays out the buffers for itself, which costs less than a launch that does it once for all.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, runs_on
from .count_pairs import CountedPairs
from .group_rows import (
    Groups,
    PhysicalExperts,
    check_capacities,
    group_rows_cpu,
    group_warps,
    lay_out,
    new_groups,
    rank_rows,
    store_groups,
)
from .locate_rows import check_top_k, locate_rows, store_located, tokens_at_a_time
from .rows import TokenRows, cdiv, power_of_two
from .rows_cpu import host_tensor

MOST_PROGRAMS = 64  # more would read the matrix too often


@triton.jit(
    do_not_specialize=[
        "pitch", "ranks", "physical_experts", "me", "low", "high", "align", "capacity", "expert_capacity", "tokens",
        "programs",
    ]
)  # fmt: skip
def route_rows_kernel(
    matrix,  # int32 [ranks, pitch]
    error,  # int64 [1]
    first_table,  # int32 [physical_experts]
    destination_in,  # int32 [physical_experts]
    expert_in,  # int32 [tokens, K]
    place_in,  # int32 [tokens, K]
    matrix_out,  # int32 [ranks, physical_experts + 1]
    start_out,
    limit_out,
    offsets_out,
    counts_out,
    padded_out,
    num_rows_out,
    overflow_out,
    key_out,  # int32 [tokens, K]
    row_out,  # int32 [tokens, K]
    pitch: tl.int32,
    ranks: tl.int32,
    physical_experts: tl.int32,
    me: tl.int32,
    low: tl.int32,  # bounds of this rank's physical experts
    high: tl.int32,
    align: tl.int32,
    capacity: tl.int32,
    expert_capacity: tl.int32,
    tokens: tl.int32,
    programs: tl.int32,
    EXPERTS: tl.constexpr,  # a power of two
    RANKS: tl.constexpr,  # rows of the matrix at a time
    BATCHED: tl.constexpr,
    CHECKED: tl.constexpr,  # whether an error makes the counts invalid
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    TOKENS: tl.constexpr,
):
    """Program i locates the pairs of blocks i, i + programs, ... of TOKENS tokens; the first stores the groups."""
    valid = tl.full((), True, tl.int1)
    if CHECKED:
        valid = tl.load(error) == 0
    first = tl.program_id(0) == 0
    if first:
        start, limit, begins, ends, fits, dropped, bad = lay_out(
            matrix, first_table, matrix_out, valid, pitch, ranks, physical_experts, me, align, capacity,
            expert_capacity, EXPERTS, RANKS, BATCHED, True,
        )  # fmt: skip
        store_groups(
            start_out, limit_out, offsets_out, counts_out, padded_out, num_rows_out, overflow_out,
            start, limit, begins, ends, fits, dropped, bad, physical_experts, low, high, EXPERTS,
        )  # fmt: skip
    else:
        start, limit, begins, ends, fits, dropped, bad = lay_out(
            matrix, first_table, matrix_out, valid, pitch, ranks, physical_experts, me, align, capacity,
            expert_capacity, EXPERTS, RANKS, BATCHED, False,
        )  # fmt: skip
    k = tl.arange(0, KP)
    for block in range(tl.program_id(0), (tokens + TOKENS - 1) // TOKENS, programs):
        t = tl.arange(0, TOKENS).to(tl.int64) + block * TOKENS
        inside = (t < tokens)[:, None] & (k < K)[None, :]
        at = t[:, None] * K + k[None, :]
        physical_expert = tl.load(expert_in + at, mask=inside, other=-1)
        place = tl.load(place_in + at, mask=inside, other=-1)
        picked = tl.reshape(tl.where(physical_expert >= 0, physical_expert, 0), [TOKENS * KP])
        kept = (physical_expert >= 0) & (place < tl.reshape(tl.gather(limit, picked, 0), [TOKENS, KP]))
        row = tl.reshape(tl.gather(start, picked, 0), [TOKENS, KP]) + place
        store_located(t, k, inside, physical_expert, row, kept, destination_in, key_out, row_out, ranks, K)


def route_rows(
    counted: CountedPairs,
    matrix: torch.Tensor,
    physical_experts: PhysicalExperts,
    me: int,
    capacity: int,
    align: int = 1,
    expert_capacity: int | None = None,
    batched: bool = False,
    error: torch.Tensor | None = None,
) -> tuple[Groups, TokenRows, torch.Tensor]:
    """Return the results of group_rows and locate_rows, and a copy of the counts, int32 [W, S + 1].

    Args:
        counted: from count_pairs on this rank; K up to 32.
        matrix: int32 [W, C] with C above S, contiguous: the counts of all ranks in the first S + 1 columns.
        physical_experts, me, capacity, align, expert_capacity, batched: as for group_rows.
        error: int64 [1]; if it is not 0, all counts are taken as 0.

    Raises:
        ArgumentError: unsupported shape, dtype or number.
    """
    ranks, width = len(physical_experts.bounds) - 1, physical_experts.count + 1
    if matrix.dim() != 2 or matrix.dtype is not torch.int32 or not matrix.is_contiguous():
        raise ArgumentError(f"matrix: {matrix.dtype} of shape {tuple(matrix.shape)}; allowed: contiguous int32 [W, C]")
    pitch = matrix.shape[1]
    if matrix.shape[0] != ranks or pitch < width:
        raise ArgumentError(f"matrix: of shape {tuple(matrix.shape)}; allowed: ({ranks}, {width}), or more columns")
    most = check_capacities(capacity, align, expert_capacity, batched)
    expert = counted.physical_expert
    tokens, k = expert.shape
    check_top_k(k, ranks)
    if not runs_on(matrix.device):
        valid = error is None or not int(error)
        counts = host_tensor(matrix.numpy()[:, :width].copy()) if valid else matrix.new_zeros(ranks, width)
        groups = group_rows_cpu(counts, physical_experts, me, capacity, align, most, batched)
        return groups, locate_rows(expert, counted.place, groups, physical_experts), counts
    counts = torch.empty((ranks, width), dtype=torch.int32, device=matrix.device)
    groups = new_groups(physical_experts, me, matrix.device)
    rows = TokenRows(torch.empty_like(expert), torch.empty_like(expert))
    constants = _constants(max(32, power_of_two(physical_experts.count)), batched, error is not None, k)
    programs = max(1, min(MOST_PROGRAMS, cdiv(tokens, tokens_at_a_time(power_of_two(k)))))
    _launches(
        (programs, 1, 1), matrix.device,
        (
            matrix, groups.overflow if error is None else error, physical_experts.first, physical_experts.destination,
            expert, counted.place, counts, *groups, rows.key, rows.row,
        ),
        (
            pitch, ranks, physical_experts.count, me, *physical_experts.bounds[me : me + 2], align, capacity, most,
            tokens, programs,
        ),
        constants,
    )  # fmt: skip
    return groups, rows, counts


_launches = Launches(route_rows_kernel)


@cache
def _constants(padded: int, batched: bool, checked: bool, k: int) -> Constants:
    width = power_of_two(max(k, 1))
    constants = {"EXPERTS": padded, "RANKS": rank_rows(padded), "BATCHED": batched, "CHECKED": checked}
    constants |= {"K": k, "KP": width, "TOKENS": tokens_at_a_time(width)}
    return Constants(route_rows_kernel, constants, num_warps=group_warps(padded))
