"""push_sums: sum the rows that each token has on this rank, and store the sum in a buffer of the token's rank.

A sum is what combine_rows adds for one destination: products and sums in float32, in order of k, rounded once. So a
token's rank that adds up such sums gets the bits of combine_rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..dtypes import ELEMENTS, encode
from ..fused_signals import is_last_program
from ..launch import Constants, Launches, interpreted, registers_of_sm, runs_on
from .combine_rows import quantized_constants, row_values
from .combine_rows_cpu import combine_rows_cpu
from .quantize_rows import QuantizedRows
from .rows import Buffers, RowLaunch, TokenRows, cdiv, power_of_two, row_alignment, row_constants
from .window_signals import WindowBarrier, barrier_of_ranks, finished_of, signal_constants


@triton.jit(do_not_specialize=["values", "most", "blocks", "fingerprint"])
def push_sums_kernel(
    row_in,  # int32 [slots, K]
    weights,  # float32 [slots, K]
    targets,  # int64 [W], addresses
    signals,  # int64 [8]
    values: tl.int64,  # address
    most: tl.int32,  # slots of a source
    blocks: tl.int64,
    fingerprint: tl.int64,
    K: tl.constexpr,
    KP: tl.constexpr,  # a power of two, no less than K
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    HAS_WEIGHTS: tl.constexpr,
    GROUP: tl.constexpr,  # elements of a scale; 0: rows are not quantized
    POWERS: tl.constexpr,  # whether scales are powers of two, of 8 bits
    ROW_BYTES: tl.constexpr,  # of a quantized row
    SCALES_AT: tl.constexpr,  # the byte of a quantized row in which its scales begin
    SOFT: tl.constexpr,
    PEERS: tl.constexpr,  # 0: no barrier
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i processes block i of the slots. The last one to finish has a barrier with the peers."""
    row_blocks: tl.constexpr = (H + COLS - 1) // COLS
    block = tl.program_id(0).to(tl.int64)
    if block < blocks:
        slot = block // row_blocks
        c = block % row_blocks * COLS + tl.arange(0, COLS)
        inside = c < H
        k = tl.arange(0, KP)
        if tl.max(tl.load(row_in + slot * K + k, mask=k < K, other=-1), 0) >= 0:
            total = tl.zeros([COLS], tl.float32)
            for i in tl.static_range(K):
                row = tl.load(row_in + slot * K + i)
                present = inside & (tl.broadcast_to(row, [COLS]) >= 0)
                base = values.to(tl.int64)
                value = row_values(
                    base, row, c, present, H, DTYPE, WORD, ALIGN, GROUP, POWERS, ROW_BYTES, SCALES_AT, SOFT
                )
                if HAS_WEIGHTS:
                    value = value * tl.load(weights + slot * K + i)
                total = tl.where(row >= 0, total + value, total)
            source = slot.to(tl.int32) // most  # a division of 64 bits takes many instructions
            target = tl.multiple_of(tl.load(targets + source).to(tl.pointer_type(WORD)), ALIGN)
            t = slot - source.to(tl.int64) * most
            tl.store(target + t * H + c, encode(total, DTYPE, SOFT).to(WORD), mask=inside)
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            barrier_of_ranks(signals, fingerprint, PEERS, TIMED, PTX, WIDTH)


def push_sums(
    values: torch.Tensor,
    row: torch.Tensor,
    weights: torch.Tensor | None,
    targets: Buffers,
    quantized: QuantizedRows | None = None,
    launch: RowLaunch | None = None,
    barrier: WindowBarrier | None = None,
) -> None:
    """Store the sum of each token that has rows here at its index in the buffer of its rank. Others are not written.

    Args:
        values: [R, H], contiguous; float32, bfloat16 or float16, or packed rows if `quantized`.
        row: int32 [W * M, K], as `OwnRows.row`.
        weights: float32 [W * M, K]; None: no multiplication.
        targets: [M, H] of each rank: its buffer for the sums of this rank.
        quantized: as for combine_rows.
        launch: default: RowLaunch.for_rows.
        barrier: of the ranks, when all is written; only where kernels run.
    """
    slots, k = row.shape
    most, hidden = targets.shape
    dtype = targets.dtype
    if not runs_on(row.device):
        push_sums_cpu(values, row, weights, targets, quantized)
        return
    launch = launch or RowLaunch.for_rows(hidden, dtype.itemsize)
    blocks = slots * cdiv(hidden, launch.columns)
    if not blocks and barrier is None:
        return
    table, bits = targets.table()
    address, row_bytes = values.data_ptr(), values.shape[1] * values.element_size()
    align = row_alignment(dtype, hidden, bits | (address if quantized is None else 0))
    grid = max(blocks, 1), 1, 1
    given = table if weights is None else weights
    constants = dtype, k, hidden, align, launch, weights is not None, quantized, row_bytes
    numbers = address, most, blocks
    if barrier is None:
        _launches(grid, row.device, (row, given, table, table), (*numbers, 0), _constants(*constants, 0))
        return
    signals, fingerprint = barrier
    with signals.watched(acquires=False):
        _launches(
            grid, row.device, (row, given, table, signals.words), (*numbers, fingerprint),
            _constants(*constants, signals.peers),
        )  # fmt: skip


_launches = Launches(push_sums_kernel)


@cache
def _constants(
    dtype: torch.dtype,
    k: int,
    hidden: int,
    align: int,
    launch: RowLaunch,
    has_weights: bool,
    quantized: QuantizedRows | None,
    row_bytes: int,
    peers: int,
) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"K": k, "KP": power_of_two(k), "COLS": launch.columns}
    constants |= {"DTYPE": ELEMENTS[dtype], "HAS_WEIGHTS": has_weights, "SOFT": interpreted(push_sums_kernel)}
    constants |= quantized_constants(quantized, hidden, row_bytes) | signal_constants(peers, launch.num_warps)
    # A fused multiply-add would round once less than the definition.
    options: dict[str, Any] = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    return Constants(push_sums_kernel, constants, **options, **registers_of_sm(launch.num_warps))


def push_sums_cpu(
    values: torch.Tensor,
    row: torch.Tensor,
    weights: torch.Tensor | None,
    targets: Buffers,
    quantized: QuantizedRows | None,
) -> None:
    """push_sums in torch operations."""
    slots, k = row.shape
    most, hidden = targets.shape
    key = torch.arange(k, dtype=torch.int32, device=row.device).expand(slots, k)
    sums = torch.empty((slots, hidden), dtype=targets.dtype, device=row.device)
    combine_rows_cpu(TokenRows(key, row), Buffers([values]), sums, weights, None, None, quantized)
    for source, target in enumerate(targets.tensors):
        these = slice(source * most, (source + 1) * most)
        there = (row[these] >= 0).any(1)
        target[there] = sums[these][there]
