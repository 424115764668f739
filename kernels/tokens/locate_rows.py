"""locate_rows: the destination and row of each (token, k) pair, in the order in which rows are summed."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, runs_on
from .count_pairs import CountedPairs
from .group_rows import Groups, PhysicalExperts
from .pairs_cpu import Ints, LocatedPairs, Pairs, stable_order
from .rows import TokenRows, cdiv, power_of_two
from .rows_cpu import host_tensor

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
        return locate_rows_cpu(physical_expert, place, groups, physical_experts)
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


def locate_rows_cpu(
    physical_expert: torch.Tensor, place: torch.Tensor, groups: Groups, physical_experts: PhysicalExperts
) -> TokenRows:
    """locate_rows on the CPU; sorts the pairs as well."""
    expert, at, start, limit = (x.numpy() for x in (physical_expert, place, groups.start, groups.limit))
    kept = (expert >= 0) & (at < limit.take(expert))  # without an expert: the last one's limit, to no effect
    row, expert = np.where(kept, start.take(expert) + at, -1), np.where(kept, expert, -1)
    key, by_token = _by_token(expert, row.astype(np.int64), physical_experts)
    located = by_token.kept()
    # The pairs of an expert have ascending rows.
    (tokens, k), numbers = expert.shape, physical_experts.by_destination
    order = stable_order(numbers.take(expert).take(located.pair), len(numbers))
    pairs = Pairs.sorted_by(order, tokens, k, len(physical_experts.bounds) - 1, located)
    return _token_rows(key, by_token, pairs)


def locate_counted_pairs(
    counted: CountedPairs,
    start: npt.NDArray[np.integer] | None,
    limit: npt.NDArray[np.integer] | None,
    physical_experts: PhysicalExperts,
) -> TokenRows:
    """locate_rows of what count_pairs returned, which has sorted the pairs. On the CPU.

    Args:
        start: `Groups.start`; None: all destinations have the same buffer, in which rows are in order of physical
            expert, token and k.
        limit: `Groups.limit`; None: no pair is dropped.
        physical_experts: those of each rank are consecutive, as `divided` makes them.
    """
    expert, number, pair = counted.physical_expert.numpy(), counted.counts.numpy()[:-1], counted.by_expert
    assert pair is not None
    ends = np.zeros(len(number) + 1, np.int64)
    number.cumsum(out=ends[1:])
    without = len(pair) - int(ends[-1])
    of_pair = np.full_like(pair, -1) if without else np.empty_like(pair)
    pair = pair[without:]
    numbers = np.arange(len(pair))
    row = numbers if start is None else numbers + (start - ends[:-1]).repeat(number)
    if limit is not None and np.logical_or.reduce(number > limit):
        kept = numbers < (ends[:-1] + limit).repeat(number)
        dropped, pair, row = pair[~kept], pair[kept], row[kept]
        without += len(dropped)
        expert = expert.copy()
        expert.reshape(-1)[dropped] = of_pair[dropped] = -1
        np.minimum(number, limit).cumsum(out=ends[1:])
    of_pair[pair] = row
    key, by_token = _by_token(expert, of_pair, physical_experts)
    (tokens, k), bounds = expert.shape, ends.take(physical_experts.bounds).tolist()
    pairs = Pairs(tokens, k, by_token.kept() if without else by_token, pair, row, bounds)
    return _token_rows(key, by_token, pairs)


def _by_token(
    expert: npt.NDArray[np.int32], row: Ints, physical_experts: PhysicalExperts
) -> tuple[npt.NDArray[np.int32], LocatedPairs]:
    """Sort the pairs of each token by destination and k, those without an expert last; return `TokenRows.key` and all
    pairs.

    Args:
        expert: [T, K].
        row: as many; -1 for a pair without one.
    """
    tokens, k = expert.shape
    key = physical_experts.destination_array.take(expert) * k + np.arange(k, dtype=np.int32)
    if k > 1:
        key.sort(axis=1)
    destination = key // max(k, 1)
    pair = (key - destination * k + np.arange(0, expert.size, k or 1)[:, None]).reshape(-1)
    return key, LocatedPairs(pair, row.take(pair), destination.reshape(-1))


def _token_rows(key: npt.NDArray[np.int32], by_token: LocatedPairs, pairs: Pairs) -> TokenRows:
    """The result of locating rows on the CPU; `by_token`: all pairs."""
    row = by_token.row.astype(np.int32).reshape(key.shape)
    return TokenRows(host_tensor(key), host_tensor(row), pairs)
