"""offer_tokens: copy tokens to a buffer that peers read, and tell each rank which rows of its buffer they have there.

Every rank then copies each token with rows there once (`spread_rows`), however many of its experts the token has.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..fused_signals import is_last_program
from ..launch import Constants, Launches, registers_of_sm, runs_on
from .rows import (
    Buffers,
    RowLaunch,
    TokenRows,
    cdiv,
    check_rows,
    power_of_two,
    row_alignment,
    row_constants,
)
from .window_signals import WindowBarrier, barrier_of_ranks, finished_of, signal_constants

_ENTRIES = 1024  # pairs of a step that writes tables


class RowTables(NamedTuple):
    """For each token of each rank the rows that it has on a rank, written by the token's rank."""

    row: Buffers
    """int32 [W * M, K] of each destination: the rows there of token t of rank s at s * M + t, in order of k; -1 for the
    token's other pairs, and where there is no token."""
    weight: Buffers
    """float32 likewise: the weights of these pairs."""


@triton.jit(
    do_not_specialize=[
        "x", "x_stride", "target", "weight_stride", "tokens", "most", "me", "ranks", "blocks",
        "fingerprint",
    ]
)  # fmt: skip
def offer_tokens_kernel(
    key_in,  # int32 [tokens, K]
    row_in,  # int32 [tokens, K]
    weights,  # float32 [tokens, K]
    once_out,  # int32 [tokens, K]
    row_tables,  # int64 [W], addresses
    weight_tables,  # int64 [W], addresses
    signals,  # int64 [8]
    x: tl.int64,  # address
    x_stride: tl.int64,  # elements
    target: tl.int64,  # address
    weight_stride: tl.int64,
    tokens: tl.int32,
    most: tl.int32,  # tokens of a rank in a table
    me: tl.int32,
    ranks: tl.int32,
    blocks: tl.int64,
    fingerprint: tl.int64,
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    TOKENS: tl.constexpr,  # of a block of a table
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    TABLES: tl.constexpr,  # whether tables are written
    PEERS: tl.constexpr,  # 0: no barrier
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i processes block i: first those of the tokens, then those of the ranks' tables. The last one to finish
    has a barrier with the peers."""
    row_blocks: tl.constexpr = (H + COLS - 1) // COLS
    block = tl.program_id(0).to(tl.int64)
    if block < blocks:
        t = block // row_blocks
        if t < tokens:
            c = block % row_blocks * COLS + tl.arange(0, COLS)
            source = tl.multiple_of(x.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
            words = tl.load(source + tl.multiple_of(t * x_stride, VEC) + c, mask=c < H, other=0)
            there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
            tl.store(there + t * H + c, words, mask=c < H)
        elif TABLES:
            table = (block - tokens.to(tl.int64) * row_blocks).to(tl.int32)
            destination = table % ranks
            u = (table // ranks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
            k = tl.arange(0, KP)
            at = u[:, None] * K + k[None, :]
            inside = (u < most)[:, None] & (k < K)[None, :]
            known = (u < tokens)[:, None] & (k < K)[None, :]
            key = tl.load(key_in + at, mask=known, other=-1)
            row = tl.load(row_in + at, mask=known, other=-1)
            here = (row >= 0) & (key // K == destination)
            weight = tl.load(weights + u[:, None] * weight_stride + key % K, mask=here, other=0.0)
            to = (me.to(tl.int64) * most + u)[:, None] * K + k[None, :]
            of_rows = tl.load(row_tables + destination).to(tl.pointer_type(tl.int32))
            tl.store(of_rows + to, tl.where(here, row, -1), mask=inside)
            of_weights = tl.load(weight_tables + destination).to(tl.pointer_type(tl.float32))
            tl.store(of_weights + to, weight, mask=inside)
            if destination == 0:
                before = tl.load(key_in + at - 1, mask=known & (k > 0)[None, :], other=-K)
                first = (row >= 0) & ((k == 0)[None, :] | (before // K != key // K))
                tl.store(once_out + at, tl.where(first, tl.broadcast_to(u.to(tl.int32)[:, None], [TOKENS, KP]), -1),
                         mask=known)  # fmt: skip
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            barrier_of_ranks(signals, fingerprint, PEERS, TIMED, PTX, WIDTH)


def offer_tokens(
    x: torch.Tensor,
    target: torch.Tensor,
    rows: TokenRows | None = None,
    weights: torch.Tensor | None = None,
    tables: RowTables | None = None,
    once: torch.Tensor | None = None,
    me: int = 0,
    launch: RowLaunch | None = None,
    barrier: WindowBarrier | None = None,
) -> None:
    """Copy the rows of `x` to the first rows of `target`; with `rows`, write what destinations need to know of them.

    Args:
        x: [T, H], 16- or 32-bit, the elements of a row adjacent, any stride between rows.
        target: [M, H] of x's dtype, contiguous; M is at least T.
        rows: from locate_rows; then the following are given as well.
        weights: float32 [T, K], of the pairs.
        tables: of each destination; the rows of this rank are written, all M of them.
        once: int32 [T, K], written: in the order of `rows`, t for the first of the pairs of token t that have a row
            on the same rank; -1 for the others.
        me: the index of this rank.
        launch: default: RowLaunch.for_rows.
        barrier: of the ranks, when all is written; only where kernels run.

    Raises:
        ArgumentError: unsupported shape or dtype.
    """
    tokens, hidden, most = len(x), target.shape[1], len(target)
    check_rows("x", x, (None, hidden), target.dtype)
    if tokens > most:
        raise ArgumentError(f"x: {tokens} rows; allowed: at most {most}, those of target")
    if not runs_on(x.device):
        target[:tokens].copy_(x)
        if rows is not None:
            assert weights is not None and tables is not None and once is not None
            offer_tables_cpu(rows, weights, tables, once, me, most)
        return
    launch = launch or RowLaunch.for_rows(hidden, x.element_size())
    address, stride, there = x.data_ptr(), x.stride(0), target.data_ptr()
    align = row_alignment(x.dtype, hidden, address | there | stride * x.element_size())
    peers, signals, fingerprint = 0, target, 0
    if barrier is not None:
        peers, signals, fingerprint = barrier.signals.peers, barrier.signals.words, barrier.fingerprint
    blocks, k, ranks, weight_stride = tokens * cdiv(hidden, launch.columns), 1, 1, 0
    tensors = (signals,) * 6
    if rows is not None:
        assert weights is not None and tables is not None and once is not None
        if weights.stride(1) != 1:
            weights = weights.contiguous()
        k, ranks, weight_stride = rows.key.shape[1], len(tables.row), weights.stride(0)
        blocks += ranks * cdiv(most, _tokens(k))
        tensors = (rows.key, rows.row, weights, once, tables.row.table()[0], tables.weight.table()[0])
    if not blocks and barrier is None:
        return
    grid = max(blocks, 1), 1, 1
    numbers = address, stride, there, weight_stride, tokens, most, me, ranks, blocks, fingerprint
    constants = _constants(x.dtype, k, hidden, align, launch, rows is not None, peers)
    if barrier is None:
        _launches(grid, x.device, (*tensors, signals), numbers, constants)
    else:
        with barrier.signals.watched(acquires=False):
            _launches(grid, x.device, (*tensors, signals), numbers, constants)


_launches = Launches(offer_tokens_kernel)


@cache
def _constants(
    dtype: torch.dtype, k: int, hidden: int, align: int, launch: RowLaunch, tables: bool, peers: int
) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"K": k, "KP": power_of_two(k), "TOKENS": _tokens(k)}
    constants |= {"COLS": launch.columns, "TABLES": tables, **signal_constants(peers, launch.num_warps)}
    registers = registers_of_sm(launch.num_warps)
    return Constants(offer_tokens_kernel, constants, num_warps=launch.num_warps, **registers)


def _tokens(k: int) -> int:
    return max(1, _ENTRIES // power_of_two(k))


def offer_tables_cpu(
    rows: TokenRows, weights: torch.Tensor, tables: RowTables, once: torch.Tensor, me: int, most: int
) -> None:
    """What offer_tokens writes besides rows, in torch operations."""
    tokens, k = rows.key.shape
    destination, own = rows.key // k, slice(me * most, me * most + tokens)
    weight = weights.gather(1, (rows.key % k).long())
    for rank, (of_rows, of_weights) in enumerate(zip(tables.row.tensors, tables.weight.tensors, strict=True)):
        here = (rows.row >= 0) & (destination == rank)
        of_rows[me * most : (me + 1) * most], of_weights[me * most : (me + 1) * most] = -1, 0
        of_rows[own] = torch.where(here, rows.row, -1)
        of_weights[own] = torch.where(here, weight, 0)
    before = torch.nn.functional.pad(destination[:, :-1], (1, 0), value=-1)
    first = (rows.row >= 0) & (before != destination)
    once.copy_(torch.where(first, torch.arange(tokens, dtype=torch.int32, device=once.device)[:, None], -1))
