"""locate_rows: the destination and row of each (token, k) pair, in the order in which rows are summed."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, runs_on
from .group_rows import Groups, PhysicalExperts
from .locate_rows_cpu import locate_rows_cpu
from .rows import TokenRows, cdiv, power_of_two

MOST_K = 32


@triton.jit
def store_located(
    t, k, inside, physical_expert, row, kept, destination_in, key_out, row_out, destinations, K: tl.constexpr
):
    """Store the keys and rows of the pairs [tokens t, k] in order of key, found by counting the pairs before each."""
    known = physical_expert >= 0
    row = tl.where(kept, row, -1)
    destination = tl.where(kept, tl.load(destination_in + physical_expert, mask=known, other=0), destinations)
    key = destination * K + k[None, :]
    # Lanes beyond K get the largest keys, so that they precede no pair.
    key = tl.where((k < K)[None, :], key, (destinations + 1) * K + k[None, :])
    order = tl.sum((key[:, None, :] < key[:, :, None]).to(tl.int32), 2)
    to = t[:, None] * K + order
    tl.store(key_out + to, key, mask=inside)
    tl.store(row_out + to, row, mask=inside)


@triton.jit(do_not_specialize=["tokens", "destinations"])
def locate_rows_kernel(
    expert_in,  # int32 [tokens, K]
    place_in,  # int32 [tokens, K]
    start_in,  # int32 [physical_experts]
    limit_in,  # int32 [physical_experts]
    destination_in,  # int32 [physical_experts]
    key_out,  # int32 [tokens, K]
    row_out,  # int32 [tokens, K]
    tokens: tl.int32,
    destinations: tl.int32,
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    TOKENS: tl.constexpr,
):
    """Program i locates the pairs of TOKENS tokens."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, KP)
    inside = (t < tokens)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    physical_expert = tl.load(expert_in + at, mask=inside, other=-1)
    place = tl.load(place_in + at, mask=inside, other=-1)
    known = physical_expert >= 0
    kept = known & (place < tl.load(limit_in + physical_expert, mask=known, other=0))
    row = tl.load(start_in + physical_expert, mask=known, other=0) + place
    store_located(t, k, inside, physical_expert, row, kept, destination_in, key_out, row_out, destinations, K)


def locate_rows(
    physical_expert: torch.Tensor, place: torch.Tensor, groups: Groups, physical_experts: PhysicalExperts
) -> TokenRows:
    """Return each pair's destination and row there, sorted by destination and k within each token.

    Args:
        physical_expert, place: int32 [T, K], contiguous, from count_pairs; K up to 32.
        groups: from group_rows on this rank; only `start` and `limit` are read.
        physical_experts: the ranks of the physical experts.

    Raises:
        ArgumentError: K is too large.
    """
    tokens, k = physical_expert.shape
    destinations = len(physical_experts.bounds) - 1
    check_top_k(k, destinations)
    if not runs_on(physical_expert.device):
        of_experts = groups.start, groups.limit, physical_experts.destination
        return locate_rows_cpu(physical_expert, place, *of_experts, destinations)
    rows = TokenRows(torch.empty_like(physical_expert), torch.empty_like(physical_expert))
    if physical_expert.numel():
        tensors = physical_expert, place, groups.start, groups.limit, physical_experts.destination, *rows[:2]
        grid = cdiv(tokens, tokens_at_a_time(power_of_two(k))), 1, 1
        _launches(grid, physical_expert.device, tensors, (tokens, destinations), _constants(k))
    return rows


_launches = Launches(locate_rows_kernel)


@cache
def _constants(k: int) -> Constants:
    width = power_of_two(k)
    return Constants(locate_rows_kernel, {"K": k, "KP": width, "TOKENS": tokens_at_a_time(width)}, num_warps=4)


def check_top_k(k: int, destinations: int) -> None:
    """
    Raises:
        ArgumentError: K is too large.
    """
    if k > MOST_K or (destinations + 2) * MOST_K >= 1 << 31:
        raise ArgumentError(f"top_k: {k}; allowed: 0 to {MOST_K}")


def tokens_at_a_time(width: int) -> int:
    """Tokens of a program: 2,048 comparisons, 16 per thread."""
    return max(1, min(128, 2048 // (width * width)))
