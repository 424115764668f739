"""count_pairs: count the (token, k) pairs of each physical expert and number them.

A physical expert is an expert or one of its replicas. Pairs of one physical expert are numbered in order of (token, k).
The first launch counts each block's pairs with a histogram. In the second, each block adds the counts of the blocks
before it and ranks its own ids by pairwise comparison in chunks, whose cost does not depend on the number of experts.
Up to 1,024 ids, as in decoding, take one program. The program that has the totals can also write them to all ranks
through a window, between a wait for the peers and a barrier.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..launch import Constants, Launches, registers_of_sm, runs_on
from .count_pairs_cpu import count_pairs_cpu
from .rows import Buffers, cdiv, power_of_two
from .window_signals import WindowBarrier, acquire_window, barrier_of_ranks, count_acquired, signal_constants

BLOCK = tl.constexpr(256)  # ids ranked at a time
CHUNK = tl.constexpr(32)  # ids that they are compared with at a time
FEW_CHUNK = tl.constexpr(16)  # likewise, with one program
MOST_BLOCKS = 128  # more blocks would read too many counts of earlier blocks: beyond, each ranks several times BLOCK
MOST_SINGLE = 1024  # ids of one program
MOST_PHYSICAL_EXPERTS = 2048


class CountShare(NamedTuple):
    """Where count_pairs writes its counts, too."""

    matrices: Buffers
    """int32 [W, S + 1] of each destination, contiguous; with `word`, [W, S + 2]."""
    me: int
    """The row that is written: this rank, 0 to W - 1."""
    word: int | None = None
    """A number of 31 bits, written after the counts."""
    barrier: WindowBarrier | None = None
    """Before writing wait until the window with the matrices may be written, and have a barrier afterwards; needs
    `word`. Only where kernels run. None: neither."""


class CountedPairs(NamedTuple):
    """The result of count_pairs."""

    physical_expert: torch.Tensor
    """int32 [T, K]: the physical expert of each pair, -1 for none."""
    place: torch.Tensor
    """int32 [T, K]: the number of earlier pairs of the same physical expert; -1 for none."""
    counts: torch.Tensor
    """int32 [S + 1]: pairs of each physical expert; the last element counts bad ids."""


@triton.jit
def physical_experts_of(ids, expert_table, index, inside, experts, HAS_TABLE: tl.constexpr):
    """The physical experts of the ids at `index`, -1 for none, and whether each id is bad."""
    expert = tl.load(ids + index, mask=inside, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < experts)
    bad = inside & ~valid & (expert != -1)
    if HAS_TABLE:
        physical_expert = tl.load(expert_table + expert, mask=valid, other=-1)
    else:
        physical_expert = tl.where(valid, expert, -1).to(tl.int32)
    return physical_expert, bad


@triton.jit(do_not_specialize=["pairs", "experts", "rounds"])
def count_pairs_kernel(
    ids,  # [pairs]
    expert_table,  # int32 [experts]
    expert_out,  # int32 [pairs]
    block_counts,  # int32 [blocks, EXPERTS]
    block_bad,  # int32 [blocks]
    pairs: tl.int32,
    experts: tl.int32,
    rounds: tl.int32,  # blocks of ids per program
    EXPERTS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Program i looks up and counts the pairs of block i."""
    block = tl.program_id(0)
    counts = tl.zeros([EXPERTS], tl.int32)
    bad_ids = tl.zeros([BLOCK], tl.int32)
    for i in range(rounds):
        index = (block * rounds + i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < pairs
        physical_expert, bad = physical_experts_of(ids, expert_table, index, inside, experts, HAS_TABLE)
        tl.store(expert_out + index, physical_expert, mask=inside)
        counts += tl.histogram(tl.where(physical_expert >= 0, physical_expert, 0), EXPERTS, mask=physical_expert >= 0)
        bad_ids += bad.to(tl.int32)
    tl.store(block_counts + block * EXPERTS + tl.arange(0, EXPERTS), counts)
    tl.store(block_bad + block, tl.sum(bad_ids, 0))


@triton.jit
def share_in_window(
    counts,  # int32 [EXPERTS]
    bad,
    matrices,  # int64 [ranks], addresses
    signals,  # int64 [8]
    first,
    word,
    fingerprint,
    physical_experts,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,  # matrices at a time
    PEERS: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """For one program: write the counts, the number of bad ids and the word to all ranks, between a wait until the
    window may be written and a barrier."""
    failed = acquire_window(signals, PEERS, TIMED, PTX, WIDTH)
    count_acquired(signals, PEERS, WIDTH)
    if not failed:
        s = tl.arange(0, EXPERTS)
        for base in range(0, PEERS + 1, RANKS):
            r = base + tl.arange(0, RANKS)
            known = r <= PEERS
            row = tl.load(matrices + r, mask=known, other=0).to(tl.pointer_type(tl.int32)) + first
            inside = known[:, None] & (s < physical_experts)[None, :]
            tl.store(row[:, None] + s[None, :], tl.broadcast_to(counts[None, :], [RANKS, EXPERTS]), mask=inside)
            tl.store(row + physical_experts, tl.full([RANKS], 0, tl.int32) + bad, mask=known)
            tl.store(row + physical_experts + 1, tl.full([RANKS], 0, tl.int32) + word.to(tl.int32), mask=known)
    tl.debug_barrier()  # the signal follows the stores of all threads
    barrier_of_ranks(signals, fingerprint, PEERS, TIMED, PTX, WIDTH)


@triton.jit(do_not_specialize=["pairs", "physical_experts", "rounds", "blocks", "first", "word", "fingerprint"])
def place_rows_kernel(
    expert_in,  # int32 [pairs]
    place_out,  # int32 [pairs]
    block_counts,  # int32 [blocks, EXPERTS]
    block_bad,  # int32 [blocks]
    counts_out,  # int32 [physical_experts + 1]
    matrices,  # int64 [ranks], addresses
    signals,  # int64 [8]
    pairs: tl.int32,
    physical_experts: tl.int32,
    rounds: tl.int32,
    blocks: tl.int32,
    first: tl.int32,  # this rank's row in a matrix, in elements
    word: tl.int32,
    fingerprint: tl.int64,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two, no less than blocks
    ROWS: tl.constexpr,  # rows of block_counts summed at a time
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,  # 0: the totals are not shared
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i numbers the pairs of block i; the last program also writes the totals, and shares them."""
    block = tl.program_id(0)
    s = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, block, ROWS):
        r = first + tl.arange(0, ROWS)[:, None]
        before += tl.sum(tl.load(block_counts + r * EXPERTS + s[None, :], mask=r < block, other=0), 0)
    for i in range(rounds):
        start = (block * rounds + i).to(tl.int64) * BLOCK
        p = tl.arange(0, BLOCK)
        physical_expert = tl.load(expert_in + start + p, mask=start + p < pairs, other=-1)
        place = tl.gather(before, tl.where(physical_expert >= 0, physical_expert, 0), 0)
        for chunk in range(0, BLOCK, CHUNK):
            q = chunk + tl.arange(0, CHUNK)
            other = tl.load(expert_in + start + q, mask=start + q < pairs, other=-1)
            place += tl.sum(((physical_expert[:, None] == other[None, :]) & (q[None, :] < p[:, None])).to(tl.int32), 1)
        tl.store(place_out + start + p, tl.where(physical_expert >= 0, place, -1), mask=start + p < pairs)
        before += tl.histogram(tl.where(physical_expert >= 0, physical_expert, 0), EXPERTS, mask=physical_expert >= 0)
    if block == blocks - 1:
        tl.store(counts_out + s, before, mask=s < physical_experts)
        b = tl.arange(0, BLOCKS)
        bad = tl.sum(tl.load(block_bad + b, mask=b < blocks, other=0), 0)
        tl.store(counts_out + physical_experts, bad)
        if PEERS > 0:
            share_in_window(
                before, bad, matrices, signals, first, word, fingerprint, physical_experts, EXPERTS, RANKS, PEERS,
                TIMED, PTX, WIDTH,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "experts", "physical_experts", "first", "word", "fingerprint"])
def count_few_pairs_kernel(
    ids,  # [pairs]
    expert_table,  # int32 [experts]
    expert_out,  # int32 [pairs]
    place_out,  # int32 [pairs]
    counts_out,  # int32 [physical_experts + 1]
    matrices,  # int64 [ranks], addresses
    signals,  # int64 [8]
    pairs: tl.int32,
    experts: tl.int32,
    physical_experts: tl.int32,
    first: tl.int32,  # this rank's row in a matrix, in elements
    word: tl.int32,
    fingerprint: tl.int64,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,  # a power of two, no less than pairs
    HAS_TABLE: tl.constexpr,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,  # 0: the counts are not shared
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program counts and numbers all pairs, and shares the counts."""
    p = tl.arange(0, PAIRS)
    physical_expert, bad = physical_experts_of(ids, expert_table, p, p < pairs, experts, HAS_TABLE)
    place = tl.zeros([PAIRS], tl.int32)
    # Look the ids up again: stores of this program are not yet visible to all of its threads.
    for chunk in range(0, PAIRS, FEW_CHUNK):
        q = chunk + tl.arange(0, FEW_CHUNK)
        other, _ = physical_experts_of(ids, expert_table, q, q < pairs, experts, HAS_TABLE)
        place += tl.sum(((physical_expert[:, None] == other[None, :]) & (q[None, :] < p[:, None])).to(tl.int32), 1)
    tl.store(expert_out + p, physical_expert, mask=p < pairs)
    tl.store(place_out + p, tl.where(physical_expert >= 0, place, -1), mask=p < pairs)
    counts = tl.histogram(tl.where(physical_expert >= 0, physical_expert, 0), EXPERTS, mask=physical_expert >= 0)
    s = tl.arange(0, EXPERTS)
    tl.store(counts_out + s, counts, mask=s < physical_experts)
    number = tl.sum(bad.to(tl.int32), 0)
    tl.store(counts_out + physical_experts, number)
    if PEERS > 0:
        share_in_window(
            counts, number, matrices, signals, first, word, fingerprint, physical_experts, EXPERTS, RANKS, PEERS,
            TIMED, PTX, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "word", "width"])
def share_counts_kernel(
    counts,  # int32 [width]
    matrices,  # int64 [ranks], addresses
    first: tl.int32,  # this rank's row in a matrix, in elements
    word: tl.int32,
    width: tl.int32,
    LENGTH: tl.constexpr,  # a power of two above width
    HAS_WORD: tl.constexpr,
):
    """Program i writes to matrix i."""
    i = tl.arange(0, LENGTH)
    values = tl.load(counts + i, mask=i < width, other=0)
    if HAS_WORD:
        values = tl.where(i < width, values, word)
    matrix = tl.load(matrices + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.store(matrix + first + i, values, mask=i < width + HAS_WORD)


def count_pairs(
    ids: torch.Tensor,
    num_experts: int,
    physical_expert_of: torch.Tensor | None = None,
    num_physical_experts: int | None = None,
    share: CountShare | None = None,
) -> CountedPairs:
    """Count and number the (token, k) pairs of this rank's tokens, and write the counts to all ranks.

    Args:
        ids: int32 or int64 [T, K], the experts of each token; -1: none. T may be 0; an expert may repeat in a token.
        num_experts: E. Ids outside -1 to E - 1 are bad: they count as bad and act as -1.
        physical_expert_of: int32 [E], the physical expert that this rank uses for each expert; default: e for e.
        num_physical_experts: S; only with `physical_expert_of`.
        share: where the counts are written, besides the result; None: nowhere.

    Raises:
        ArgumentError: unsupported shape, dtype or number.
    """
    physical_experts = num_experts if num_physical_experts is None else num_physical_experts
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"ids: {ids.dtype} of shape {tuple(ids.shape)}; allowed: int32 or int64 of shape [T, K]")
    if not 1 <= physical_experts <= MOST_PHYSICAL_EXPERTS:
        raise ArgumentError(f"num_physical_experts: {physical_experts}; allowed: 1 to {MOST_PHYSICAL_EXPERTS}")
    if physical_expert_of is None and physical_experts != num_experts:
        raise ArgumentError(
            f"num_physical_experts: {physical_experts}; without physical_expert_of allowed: num_experts, {num_experts}"
        )
    if physical_expert_of is not None and (
        physical_expert_of.shape != (num_experts,) or physical_expert_of.dtype is not torch.int32
    ):
        raise ArgumentError(
            f"physical_expert_of: {physical_expert_of.dtype} of shape {tuple(physical_expert_of.shape)}; allowed: "
            f"int32 of shape ({num_experts},)"
        )
    if ids.numel() >= 1 << 31:
        raise ArgumentError(f"ids: {ids.numel()} of them; allowed: below 2**31")
    width = physical_experts + 1 + (share is not None and share.word is not None)
    if share is not None and (share.matrices.dtype is not torch.int32 or share.matrices.shape[1:] != (width,)):
        raise ArgumentError(
            f"share.matrices: {share.matrices.dtype} of shape {tuple(share.matrices.shape)}; allowed: int32 of shape "
            f"[W, {width}]"
        )
    if not runs_on(ids.device):
        counted = CountedPairs(*count_pairs_cpu(ids, num_experts, physical_expert_of, physical_experts))
        if share is not None:
            share_counts_cpu(counted.counts, share)
        return counted
    ids, pairs = ids.contiguous(), ids.numel()
    physical_expert = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    place = torch.empty_like(physical_expert)
    counts = torch.empty(physical_experts + 1, dtype=torch.int32, device=ids.device)
    table, has_table = (physical_expert, False) if physical_expert_of is None else (physical_expert_of, True)
    padded = max(32, power_of_two(physical_experts))
    matrices = signals = physical_expert  # not read
    numbers, peers = (0, 0, 0), 0
    watched: AbstractContextManager[object] = nullcontext()
    if share is not None and share.barrier is not None:
        window, fingerprint = share.barrier
        matrices, signals, peers = share.matrices.table()[0], window.words, window.peers
        numbers, watched = (share.me * width, share.word or 0, fingerprint), window.watched(acquires=True)
    if pairs <= MOST_SINGLE:
        most = max(CHUNK.value, power_of_two(pairs))
        with watched:
            _fews(
                (1, 1, 1), ids.device, (ids, table, physical_expert, place, counts, matrices, signals),
                (pairs, num_experts, physical_experts, *numbers),
                _few_constants(ids.dtype, padded, most, has_table, peers),
            )  # fmt: skip
    else:
        rounds = cdiv(pairs, BLOCK.value * MOST_BLOCKS)
        blocks = cdiv(pairs, BLOCK.value * rounds)
        # Each block's count of bad ids follows the counts of all blocks.
        scratch = torch.empty(blocks * (padded + 1), dtype=torch.int32, device=ids.device)
        bad = scratch[blocks * padded :]
        _counts(
            (blocks, 1, 1), ids.device, (ids, table, physical_expert, scratch, bad), (pairs, num_experts, rounds),
            _count_constants(ids.dtype, padded, has_table),
        )  # fmt: skip
        with watched:
            _places(
                (blocks, 1, 1), ids.device, (physical_expert, place, scratch, bad, counts, matrices, signals),
                (pairs, physical_experts, rounds, blocks, *numbers),
                _place_constants(padded, power_of_two(blocks), peers),
            )  # fmt: skip
    if share is not None and share.barrier is None:
        constants = _share_constants(power_of_two(width), share.word is not None)
        shared = share.me * width, share.word or 0, physical_experts + 1
        _shares((len(share.matrices), 1, 1), ids.device, (counts, share.matrices.table()[0]), shared, constants)
    return CountedPairs(physical_expert, place, counts)


_counts, _places, _fews, _shares = map(
    Launches, (count_pairs_kernel, place_rows_kernel, count_few_pairs_kernel, share_counts_kernel)
)


@cache
def _count_constants(ids: torch.dtype, padded: int, has_table: bool) -> Constants:
    """`ids`: their dtype, which a kernel is compiled for."""
    return Constants(count_pairs_kernel, {"EXPERTS": padded, "HAS_TABLE": has_table}, num_warps=4)


@cache
def _place_constants(padded: int, blocks: int, peers: int) -> Constants:
    constants = {"EXPERTS": padded, "BLOCKS": blocks, "ROWS": count_rows(padded), "RANKS": shared_rows(padded, 16)}
    warps = place_warps(peers)
    return Constants(place_rows_kernel, constants | signal_constants(peers, warps), num_warps=warps)


@cache
def _share_constants(length: int, has_word: bool) -> Constants:
    return Constants(share_counts_kernel, {"LENGTH": length, "HAS_WORD": has_word}, num_warps=4)


@cache
def _few_constants(ids: torch.dtype, padded: int, pairs: int, has_table: bool, peers: int) -> Constants:
    warps = few_warps(pairs, padded)
    constants = {"EXPERTS": padded, "PAIRS": pairs, "HAS_TABLE": has_table, "RANKS": shared_rows(padded, warps)}
    constants |= signal_constants(peers, warps)
    return Constants(count_few_pairs_kernel, constants, num_warps=warps, **registers_of_sm(warps))


def place_warps(peers: int) -> int:
    """Warps of place_rows_kernel: with 8, if it shares counts, registers spill on gfx942."""
    return 16 if peers else 8


def few_warps(pairs: int, padded_experts: int) -> int:
    """Warps of count_few_pairs_kernel: the comparisons of a chunk take 32 registers per thread. With one warp for 2048
    experts, which share counts, registers spill on gfx942."""
    return max(1, min(16, pairs // 64), padded_experts // 512)


def shared_rows(padded_experts: int, num_warps: int) -> int:
    """Matrices that a program writes its counts to at a time: 16 registers per thread."""
    return max(1, min(16, 512 * num_warps // padded_experts))


def count_rows(padded_experts: int) -> int:
    """Rows of counts that place_rows_kernel sums at a time: 32 registers per thread."""
    return max(1, 8192 // padded_experts)


def share_counts_cpu(counts: torch.Tensor, share: CountShare) -> None:
    """What count_pairs does with `share`, on the CPU."""
    row = counts.numpy() if share.word is None else np.append(counts.numpy(), np.int32(share.word))
    for matrix in share.matrices.host_arrays():
        matrix[share.me, : len(row)] = row
