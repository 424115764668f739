"""push_rows: store each token's row in its destinations' buffers; each row is read once and stored up to K times.

Rows may be quantized on the way, to what quantize_rows would have written: a program casts whole groups of a row. A row
with one scale is one program's, which reads it twice, the second time from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..fused_signals import is_last_program
from ..launch import Constants, Launches, registers_of_sm, runs_on
from .group_rows import Groups
from .push_rows_cpu import push_rows_cpu
from .quantize_rows import (
    QuantizedRows,
    cast_group,
    check_payload,
    load_group,
    quantized_groups,
    row_scale,
    store_scales,
)
from .rows import (
    Buffers,
    RowLaunch,
    TokenRows,
    address_of,
    cdiv,
    check_rows,
    power_of_two,
    row_alignment,
    row_constants,
)
from .window_signals import WindowBarrier, barrier_of_ranks, finished_of, signal_constants

MOST_PADDING = 64  # parts that share the padding of one group
NOT_QUANTIZED = {"GROUP": 0, "POWERS": False, "DTYPE": None, "ROW_BYTES": 0, "SCALES_AT": 0}


@triton.jit(
    do_not_specialize=[
        "x", "x_stride", "weight_stride", "choice_stride", "tokens", "own", "blocks", "fingerprint",
    ]
)  # fmt: skip
def push_rows_kernel(
    key_in,  # int32 [tokens, K]
    row_in,  # int32 [tokens, K]
    buffers,  # int64 [W], addresses
    weights,  # float32 [tokens, K]
    weight_buffers,  # int64 [W], addresses
    offsets,  # int32 [groups]
    counts,  # int64 [groups]
    padded_counts,  # int64 [groups]
    choice,  # int32 [W]
    error,  # int64 [1]
    signals,  # int64 [8]
    x: tl.int64,  # address
    x_stride: tl.int64,  # elements
    weight_stride: tl.int64,
    choice_stride: tl.int64,
    tokens: tl.int32,
    own: tl.int32,  # the buffer whose padding is zeroed
    blocks: tl.int64,
    fingerprint: tl.int64,
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    GROUP: tl.constexpr,  # elements of a scale; 0: rows are not quantized
    POWERS: tl.constexpr,  # whether scales are powers of two, of 8 bits
    DTYPE: tl.constexpr,  # of rows that are quantized
    ROW_BYTES: tl.constexpr,  # of a quantized row
    SCALES_AT: tl.constexpr,  # the byte of a quantized row in which its scales begin
    PADDING: tl.constexpr,  # parts of each group's padding
    HAS_WEIGHTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PEERS: tl.constexpr,  # 0: no barrier
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i processes block i: first those of tokens' rows, then those of the own groups' padding. The last one to
    finish has a barrier with the peers."""
    WHOLE: tl.constexpr = GROUP > 0 and GROUP >= H  # a row has one scale, and one program
    row_blocks: tl.constexpr = 1 if WHOLE else (H + COLS - 1) // COLS
    block = tl.program_id(0).to(tl.int64)
    if block < blocks:
        t = block // row_blocks
        part = block % row_blocks
        first = part == 0
        column = part * COLS + tl.arange(0, COLS)
        inside = column < H
        if t < tokens:
            source = tl.multiple_of(x.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN) + tl.multiple_of(t * x_stride, VEC)
            if GROUP == 0:
                words = tl.load(source + column, mask=inside, other=0)
                push_piece(
                    key_in, row_in, buffers, weights, weight_buffers, choice, error, weight_stride, choice_stride, t,
                    words, column, inside, 0, 0, False, first, K, H, WORD, ALIGN, 0, False, HAS_WEIGHTS, CHOSEN,
                )  # fmt: skip
            elif WHOLE:
                c = tl.arange(0, COLS)[None, :]
                scale, bits, bad = row_scale(source, H, COLS, POWERS, DTYPE)
                zero = tl.zeros([1, 1], tl.int32)
                for start in range(0, H, COLS):
                    value = load_group(source, start + c, H, DTYPE)
                    elements, begins = cast_group(value, scale, bad, POWERS), start == 0
                    push_piece(
                        key_in, row_in, buffers, weights, weight_buffers, choice, error, weight_stride, choice_stride,
                        t, elements, start + c, start + c < H, bits, zero, zero + start == 0, begins, K, ROW_BYTES,
                        tl.int8, 16, SCALES_AT, POWERS, HAS_WEIGHTS, CHOSEN,
                    )  # fmt: skip
            else:
                GROUPS: tl.constexpr = COLS // GROUP
                group = part * GROUPS + tl.arange(0, GROUPS)[:, None]
                c = group * GROUP + tl.arange(0, GROUP)[None, :]
                elements, bits = quantized_groups(source, c, H, POWERS, DTYPE)
                push_piece(
                    key_in, row_in, buffers, weights, weight_buffers, choice, error, weight_stride, choice_stride, t,
                    elements, c, c < H, bits, group, group * GROUP < H, first, K, ROW_BYTES, tl.int8, 16,
                    SCALES_AT, POWERS, HAS_WEIGHTS, CHOSEN,
                )  # fmt: skip
        else:
            own_group = (t - tokens) // PADDING
            end = tl.load(offsets + own_group).to(tl.int64)
            begin = end - (tl.load(padded_counts + own_group) - tl.load(counts + own_group))
            base = address_of(buffers, choice, error, choice_stride, own, True, CHOSEN)
            for pad in range(begin + (t - tokens) % PADDING, end, PADDING):
                if GROUP == 0:
                    target = tl.multiple_of(base.to(tl.pointer_type(WORD)), ALIGN)
                    tl.store(target + pad * H + column, tl.zeros([COLS], tl.int32).to(WORD), mask=inside)
                else:  # in words, however many columns these are
                    words = tl.multiple_of(base.to(tl.pointer_type(tl.int32)), 16) + pad * (ROW_BYTES // 4)
                    for start in range(part * COLS, ROW_BYTES // 4, row_blocks * COLS):
                        at = start + tl.arange(0, COLS)
                        tl.store(words + at, tl.zeros([COLS], tl.int32), mask=at < ROW_BYTES // 4)
                if HAS_WEIGHTS:
                    if first:
                        tl.store(tl.load(weight_buffers + own).to(tl.pointer_type(tl.float32)) + pad, 0.0)
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            barrier_of_ranks(signals, fingerprint, PEERS, TIMED, PTX, WIDTH)


@triton.jit
def push_piece(
    key_in, row_in, buffers, weights, weight_buffers, choice, error, weight_stride, choice_stride, t,
    words, c, inside,
    scales, group, there,
    first,  # whether this piece is the row's first: its weight goes along
    K: tl.constexpr,
    ROW: tl.constexpr,  # words
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    SCALES_AT: tl.constexpr,  # 0: there are no scales
    POWERS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Store words c of token t's row at its destinations; `scales`: the bits of those of groups."""
    for i in tl.static_range(K):
        row = tl.load(row_in + t * K + i)
        key = tl.load(key_in + t * K + i)
        if row >= 0:
            destination = key // K
            # An address that was an integer has lost its alignment.
            base = address_of(buffers, choice, error, choice_stride, destination, True, CHOSEN)
            target = tl.multiple_of(base.to(tl.pointer_type(WORD)), ALIGN) + row.to(tl.int64) * ROW
            tl.store(target + c, words, mask=inside)
            if SCALES_AT > 0:
                of_row = base.to(tl.pointer_type(tl.int8)) + (row.to(tl.int64) * ROW + SCALES_AT)
                store_scales(of_row, group, scales, there, POWERS)
            if HAS_WEIGHTS:
                if first:
                    weight = tl.load(weights + t * weight_stride + key % K)
                    numbers = tl.load(weight_buffers + destination).to(tl.pointer_type(tl.float32))
                    tl.store(numbers + row, weight)


_launches = Launches(push_rows_kernel)


@cache
def _constants(
    dtype: torch.dtype,
    k: int,
    hidden: int,
    align: int,
    launch: RowLaunch,
    padding: int,
    has_weights: bool,
    chosen: bool,
    quantized: QuantizedRows | None,
    row_bytes: int,
    peers: int,
) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"K": k, "PADDING": padding}
    if quantized is None:
        constants |= {"COLS": launch.columns, **NOT_QUANTIZED}
    else:
        constants |= quantized.how.constants(dtype, hidden, launch.columns) | quantized.places(row_bytes)
    constants |= {"HAS_WEIGHTS": has_weights, "CHOSEN": chosen, **signal_constants(peers, launch.num_warps)}
    # 128 registers of a thread: enough for all rows, and few enough for four programs of four warps on an SM.
    registers = registers_of_sm(max(launch.num_warps, 16))
    return Constants(push_rows_kernel, constants, num_warps=launch.num_warps, **registers)


def push_rows(
    x: torch.Tensor,
    rows: TokenRows,
    buffers: Buffers,
    groups: Groups,
    own: int,
    weights: torch.Tensor | None = None,
    weight_buffers: Buffers | None = None,
    most_padding: int = MOST_PADDING,
    launch: RowLaunch | None = None,
    barrier: WindowBarrier | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """Store every row of `x` in each of its destinations and zero the padding rows of the own buffer.

    Rows of the buffers that are neither padding nor written by a rank are not initialised.

    Args:
        x: [T, H], 16- or 32-bit, floats to be quantized, the elements of a row adjacent, any stride between rows.
        rows: from locate_rows.
        buffers: [R, H] of x's dtype, of each destination; packed rows, int32, at multiples of 16 bytes, if quantized.
        groups: from group_rows; the groups of the own buffer.
        own: index of this rank's buffer.
        weights: float32 [T, K], stored at the same rows of `weight_buffers`, float32 [R] each.
        most_padding: an upper bound of the padding rows of a group; 0: no padding is zeroed.
        launch: default: RowLaunch.for_rows.
        barrier: of the ranks, when all rows have been stored; only where kernels run.
        quantized: how rows are cast on the way, as by quantize_rows; None: they are stored as they are.

    Raises:
        ArgumentError: unsupported shape, dtype or address.
    """
    tokens, k = rows.key.shape
    hidden, dtype = (buffers.shape[1], buffers.dtype) if quantized is None else (x.shape[-1], x.dtype)
    check_rows("x", x, (tokens, hidden), dtype)
    if quantized is not None:
        check_payload(dtype)
        quantized.check(buffers.dtype, buffers.shape, hidden)
    if weights is not None and (weights.shape != (tokens, k) or weights.dtype is not torch.float32):
        raise ArgumentError(
            f"weights: {weights.dtype} of shape {tuple(weights.shape)}; allowed: float32 of shape {(tokens, k)}"
        )
    if (weights is None) != (weight_buffers is None):
        raise ArgumentError("weights and weight_buffers: one was given; both or neither are allowed")
    if weight_buffers is not None and weight_buffers.dtype is not torch.float32:
        raise ArgumentError(f"weight_buffers: {weight_buffers.dtype}; allowed: float32")
    if not runs_on(x.device):
        if quantized is not None:
            x = quantized.rows_of(x, buffers.shape[1])
        push_rows_cpu(x, rows, buffers, groups, own, weights, weight_buffers, most_padding > 0)
        return
    launch = launch or RowLaunch.for_rows(hidden, x.element_size())
    table, bits = buffers.table()
    if quantized is not None:
        if bits % 16:
            raise ArgumentError("buffers: not at multiples of 16 bytes; allowed: packed rows at multiples of 16 bytes")
        # As many as of a 16-bit row, of which a thread then stores 16 at once; addresses of x alone are of x's dtype.
        launch, bits = replace(launch, columns=launch.columns * x.element_size() // 2), 0
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    weight_table = table if weight_buffers is None else weight_buffers.table()[0]
    each = min(power_of_two(most_padding), MOST_PADDING) if most_padding else 1
    rows_and_padding = tokens + len(groups.offsets) * each * (most_padding > 0)
    if rows_and_padding or barrier is not None:
        address, stride = x.data_ptr(), x.stride(0)
        align = row_alignment(x.dtype, hidden, bits | address | stride * x.element_size())
        given, weight_stride = (rows.key, 0) if weights is None else (weights, weights.stride(0))
        choice = buffers.choice
        index, error = (rows.key, table) if choice is None else choice
        if quantized is None:
            blocks = rows_and_padding * cdiv(hidden, launch.columns)
        else:
            blocks = rows_and_padding * quantized.how.blocks(hidden, quantized.how.columns(hidden, launch.columns))
        grid = max(blocks, 1), 1, 1
        constants = (
            x.dtype, k, hidden, align, launch, each, weights is not None, choice is not None, quantized,
            buffers.shape[1] * 4,
        )  # fmt: skip
        tensors = (
            rows.key, rows.row, table, given, weight_table, groups.offsets, groups.counts, groups.padded_counts,
            index, error,
        )  # fmt: skip
        numbers = address, stride, weight_stride, index.stride(0), tokens, own, blocks
        if barrier is None:
            _launches(grid, x.device, (*tensors, table), (*numbers, 0), _constants(*constants, 0))
        else:
            signals, fingerprint = barrier
            with signals.watched(acquires=False):
                _launches(
                    grid, x.device, (*tensors, signals.words), (*numbers, fingerprint),
                    _constants(*constants, signals.peers),
                )  # fmt: skip


def push_rows_reference(
    x: torch.Tensor,
    rows: TokenRows,
    buffers: Sequence[torch.Tensor],
    groups: Groups,
    own: int,
    weights: torch.Tensor,
    weight_buffers: Sequence[torch.Tensor],
) -> None:
    """push_rows by its definition, pair by pair. For tests; CPU tensors only."""
    tokens, k = rows.key.shape
    for t in range(tokens):
        for key, row in zip(rows.key[t].tolist(), rows.row[t].tolist(), strict=True):
            if row >= 0:
                buffers[key // k][row] = x[t]
                weight_buffers[key // k][row] = weights[t, key % k]
    for end, padded, count in zip(
        groups.offsets.tolist(), groups.padded_counts.tolist(), groups.counts.tolist(), strict=True
    ):
        buffers[own][end - padded + count : end] = 0
        weight_buffers[own][end - padded + count : end] = 0
