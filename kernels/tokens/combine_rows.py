"""combine_rows and gather_values: fetch each token's rows, or one number per row, from their destinations.

combine_rows sums the rows of a token in a fixed order:

    y[t] = sum over destinations ascending of round(sum over the token's pairs there, k ascending, of weight * row)

plus `add`. Sums and products are float32, start at zero and are not fused. `round` is to the rows' dtype, as if the
destination had sent its sum. The result is rounded once. Pairs without a row contribute nothing.

With destinations on several nodes the outer sum is over nodes ascending, of the rounded sums of each node's
destinations, as if one rank of each node had sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import ArgumentError
from ..dtypes import ELEMENTS, decode, encode, poison_word
from ..fused_signals import is_last_program, overwrite
from ..launch import Constants, Launches, interpreted, registers_of_sm, runs_on
from .combine_rows_cpu import combine_rows_cpu, gather_values_cpu
from .quantize_rows import QuantizedRows
from .rows import (
    PAYLOADS,
    Buffers,
    RowLaunch,
    TokenRows,
    address_of,
    cdiv,
    check_rows,
    row_alignment,
    row_constants,
)
from .window_signals import WindowSignals, finished_of, rank_has_failed, release_window, signal_constants

PAIRS = tl.constexpr(256)  # values gathered by a program


@triton.jit
def rounded(value, DTYPE: tl.constexpr, SOFT: tl.constexpr):
    return decode(encode(value, DTYPE, SOFT), DTYPE, SOFT)


@triton.jit
def scale_of(scales, group, present, POWERS: tl.constexpr):
    """The scales of groups, float32; `scales`: the address of those of a row."""
    if POWERS:
        exponent = tl.load(scales.to(tl.pointer_type(tl.uint8)) + group, mask=present, other=0)
        return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return tl.load(scales.to(tl.pointer_type(tl.float32)) + group, mask=present, other=0.0)


@triton.jit
def row_values(
    base, row, c, present, H: tl.constexpr, DTYPE: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr,
    GROUP: tl.constexpr, POWERS: tl.constexpr, ROW_BYTES: tl.constexpr, SCALES_AT: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The elements c of a row of the buffer at the address `base`, float32, multiplied out if it is quantized."""
    # An address that was an integer has lost its alignment.
    if GROUP > 0:
        quantized = tl.multiple_of(base.to(tl.pointer_type(tl.int8)), 16) + row.to(tl.int64) * ROW_BYTES
        value = decode(tl.load(quantized + c, mask=present, other=0), tl.float8e4nv, True)
        scales = base + (row.to(tl.int64) * ROW_BYTES + SCALES_AT)
        return value * scale_of(scales, c // GROUP, present, POWERS)
    else:
        source = tl.multiple_of(base.to(tl.pointer_type(WORD)), ALIGN) + row.to(tl.int64) * H
        return decode(tl.load(source + c, mask=present, other=0), DTYPE, SOFT)


@triton.jit(do_not_specialize=["out", "out_stride", "add", "add_stride", "weight_stride", "choice_stride", "blocks"])
def combine_rows_kernel(
    key_in,  # int32 [tokens, K]
    row_in,  # int32 [tokens, K]
    buffers,  # int64 [W], addresses
    weights,  # float32 [tokens, K]
    choice,  # int32 [W]
    error,  # int64 [1]
    signals,  # int64 [8]
    nodes,  # int32 [W]
    out: tl.int64,  # address
    out_stride: tl.int64,  # elements
    add: tl.int64,  # address
    add_stride: tl.int64,
    weight_stride: tl.int64,
    choice_stride: tl.int64,
    blocks: tl.int64,
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    VEC: tl.constexpr,  # elements
    HAS_WEIGHTS: tl.constexpr,
    HAS_ADD: tl.constexpr,
    CHOSEN: tl.constexpr,
    NESTED: tl.constexpr,  # whether destinations are on several nodes
    GROUP: tl.constexpr,  # elements of a scale; 0: rows are not quantized
    POWERS: tl.constexpr,  # whether scales are powers of two, of 8 bits
    ROW_BYTES: tl.constexpr,  # of a quantized row
    SCALES_AT: tl.constexpr,  # the byte of a quantized row in which its scales begin
    SOFT: tl.constexpr,
    POISON: tl.constexpr,  # 8 bytes
    PEERS: tl.constexpr,  # 0: no window is released
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i writes block i of the tokens' rows. The last one to finish overwrites the output, contiguous then, if
    this rank has failed, and releases the window."""
    row_blocks: tl.constexpr = (H + COLS - 1) // COLS
    block = tl.program_id(0).to(tl.int64)
    if block < blocks:
        t = block // row_blocks
        c = block % row_blocks * COLS + tl.arange(0, COLS)
        inside = c < H
        total = tl.zeros([COLS], tl.float32)
        partial = tl.zeros([COLS], tl.float32)
        of_nodes = tl.zeros([COLS], tl.float32)
        last = tl.full((), -1, tl.int32)
        last_node = tl.full((), -1, tl.int32)
        for i in tl.static_range(K):
            key = tl.load(key_in + t * K + i)
            row = tl.load(row_in + t * K + i)
            kept = row >= 0
            destination = key // K
            base = address_of(buffers, choice, error, choice_stride, destination, kept, CHOSEN)
            present = inside & (tl.broadcast_to(row, [COLS]) >= 0)
            value = row_values(base, row, c, present, H, DTYPE, WORD, ALIGN, GROUP, POWERS, ROW_BYTES, SCALES_AT, SOFT)
            if HAS_WEIGHTS:
                value = value * tl.load(weights + t * weight_stride + key % K, mask=kept, other=0.0)
            moved = kept & (destination != last)
            total = tl.where(moved, total + rounded(partial, DTYPE, SOFT), total)
            if NESTED:
                node = tl.load(nodes + destination, mask=kept, other=0)
                left = kept & (node != last_node)
                of_nodes = tl.where(left, of_nodes + rounded(total, DTYPE, SOFT), of_nodes)
                total = tl.where(left, 0.0, total)
                last_node = tl.where(kept, node, last_node)
            partial = tl.where(moved, 0.0, partial)
            partial = tl.where(kept, partial + value, partial)
            last = tl.where(kept, destination, last)
        total += rounded(partial, DTYPE, SOFT)
        if NESTED:
            total = of_nodes + rounded(total, DTYPE, SOFT)
        if HAS_ADD:
            source = tl.multiple_of(add.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
            words = tl.load(source + tl.multiple_of(t * add_stride, VEC) + c, mask=inside, other=0)
            total += decode(words, DTYPE, SOFT)
        target = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        words = encode(total, DTYPE, SOFT).to(WORD)
        tl.store(target + tl.multiple_of(t * out_stride, VEC) + c, words, mask=inside)
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            failed = rank_has_failed(signals)
            if failed:
                overwrite(out, blocks // row_blocks * H, POISON, WORD)
            release_window(signals, failed, PEERS, PTX, WIDTH)


def combine_rows(
    rows: TokenRows,
    buffers: Buffers,
    out: torch.Tensor,
    weights: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    launch: RowLaunch | None = None,
    release: WindowSignals | None = None,
    nodes: torch.Tensor | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """Write each token's weighted sum over its rows to `out`.

    Args:
        rows: from locate_rows.
        buffers: [R, H] of each destination; float32, bfloat16 or float16.
        out: [T, H] of the same dtype, the elements of a row adjacent.
        weights: float32 [T, K]; default: no multiplication.
        add: as `out`, added last; may be `out` itself.
        launch: default: RowLaunch.for_rows.
        release: the window to release afterwards; if this rank has failed, `out`, which is contiguous, is overwritten
            before. Only where kernels run.
        nodes: int32 [W], the node of each destination, ascending; default: they share one.
        quantized: how rows were quantized; `buffers` are then packed rows, int32, each value an element times its scale
            in float32.

    Raises:
        ArgumentError: unsupported shape or dtype.
    """
    tokens, k = rows.key.shape
    hidden, dtype = (buffers.shape[1], buffers.dtype) if quantized is None else (out.shape[-1], out.dtype)
    if dtype not in PAYLOADS:
        raise ArgumentError(f"buffers: {dtype}; allowed: float32, bfloat16, float16")
    if quantized is not None:
        quantized.check(buffers.dtype, buffers.shape, hidden)
    check_rows("out", out, (tokens, hidden), dtype)
    if add is not None:
        check_rows("add", add, (tokens, hidden), dtype)
    if weights is not None and (weights.shape != (tokens, k) or weights.dtype is not torch.float32):
        raise ArgumentError(
            f"weights: {weights.dtype} of shape {tuple(weights.shape)}; allowed: float32 of shape {(tokens, k)}"
        )
    if nodes is not None and (nodes.shape != (len(buffers),) or nodes.dtype is not torch.int32):
        raise ArgumentError(
            f"nodes: {nodes.dtype} of shape {tuple(nodes.shape)}; allowed: int32 of shape {(len(buffers),)}"
        )
    if not runs_on(out.device):
        combine_rows_cpu(rows, buffers, out, weights, add, nodes, quantized)
        return
    launch = launch or RowLaunch.for_rows(hidden, out.element_size())
    table, bits = buffers.table()
    if weights is not None and weights.stride(1) != 1:
        weights = weights.contiguous()
    added = out if add is None else add
    if tokens or release is not None:
        to, stride, of, of_stride = out.data_ptr(), out.stride(0), added.data_ptr(), added.stride(0)
        bits = bits if quantized is None else 0  # packed rows are aligned
        align = row_alignment(out.dtype, hidden, bits | to | of | (stride | of_stride) * out.element_size())
        given, weight_stride = (rows.key, 0) if weights is None else (weights, weights.stride(0))
        choice = buffers.choice
        index, error = (rows.key, table) if choice is None else choice
        blocks = tokens * cdiv(hidden, launch.columns)
        grid = max(blocks, 1), 1, 1
        peers, signals = (0, table) if release is None else (release.peers, release.words)
        _combines(
            grid, out.device,
            (rows.key, rows.row, table, given, index, error, signals, rows.key if nodes is None else nodes),
            (to, stride, of, of_stride, weight_stride, index.stride(0), blocks),
            _constants(
                out.dtype, k, hidden, align, launch, weights is not None, add is not None, choice is not None,
                nodes is not None, peers, quantized, buffers.shape[1] * 4,
            ),
        )  # fmt: skip


_combines = Launches(combine_rows_kernel)


@cache
def _constants(
    dtype: torch.dtype,
    k: int,
    hidden: int,
    align: int,
    launch: RowLaunch,
    has_weights: bool,
    has_add: bool,
    chosen: bool,
    nested: bool,
    peers: int,
    quantized: QuantizedRows | None,
    row_bytes: int,
) -> Constants:
    constants = row_constants(dtype, hidden, align) | {"K": k, "COLS": launch.columns, "DTYPE": ELEMENTS[dtype]}
    constants |= {"HAS_WEIGHTS": has_weights, "HAS_ADD": has_add, "CHOSEN": chosen, "NESTED": nested}
    constants |= {"SOFT": interpreted(combine_rows_kernel), "POISON": poison_word(dtype)[0]}
    constants |= quantized_constants(quantized, hidden, row_bytes) | signal_constants(peers, launch.num_warps)
    # A fused multiply-add would round once less than the definition.
    options: dict[str, Any] = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    # For narrow loads ptxas would spill to have more programs on an SM; for wide ones it takes what it needs.
    registers = registers_of_sm(launch.num_warps) if align < 16 else {}
    return Constants(combine_rows_kernel, constants, **options, **registers)


def quantized_constants(quantized: QuantizedRows | None, hidden: int, row_bytes: int) -> dict[str, Any]:
    """The constants by which `row_values` reads rows."""
    if quantized is None:
        return {"GROUP": 0, "POWERS": False, "ROW_BYTES": 0, "SCALES_AT": 0}
    group, powers = quantized.how.group or hidden, quantized.how.scale_dtype is not torch.float32
    return {"GROUP": group, "POWERS": powers, **quantized.places(row_bytes)}


def combine_rows_reference(
    rows: TokenRows,
    buffers: Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    add: torch.Tensor | None,
    nodes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the result of combine_rows by its definition, pair by pair. For tests; CPU tensors only."""
    (tokens, k), hidden, dtype = rows.key.shape, buffers[0].shape[1], buffers[0].dtype
    out = torch.empty((tokens, hidden), dtype=dtype, device="cpu")
    for t in range(tokens):
        of_nodes = {node: torch.zeros(hidden, device="cpu") for node in sorted(set(nodes or [0]))}
        for destination, buffer in enumerate(buffers):
            partial = torch.zeros(hidden, device="cpu")
            for key, row in zip(rows.key[t].tolist(), rows.row[t].tolist(), strict=True):
                if row >= 0 and key // k == destination:
                    value = buffer[row].float()
                    partial += value if weights is None else value * weights[t, key % k]
            of_nodes[0 if nodes is None else nodes[destination]] += partial.to(dtype).float()
        total = torch.zeros(hidden, device="cpu")
        for of_node in of_nodes.values():
            total += of_node if nodes is None else of_node.to(dtype).float()
        out[t] = (total if add is None else total + add[t].float()).to(dtype)
    return out


@triton.jit(do_not_specialize=["pairs"])
def gather_values_kernel(
    key_in,  # int32 [pairs]
    row_in,  # int32 [pairs]
    buffers,  # int64 [W], addresses
    out,  # float32 [pairs]
    signals,  # int64 [8]
    pairs: tl.int32,
    K: tl.constexpr,
    POISON: tl.constexpr,
    PEERS: tl.constexpr,  # 0: no window is released
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i fetches the values of PAIRS pairs. The last one to finish releases the window."""
    i = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    key = tl.load(key_in + i, mask=i < pairs, other=0)
    row = tl.load(row_in + i, mask=i < pairs, other=-1)
    kept = row >= 0
    source = tl.load(buffers + key // K, mask=kept, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(source + row, mask=kept, other=0.0)
    tl.store(out + i // K * K + key % K, value, mask=i < pairs)
    if PEERS > 0:
        if is_last_program(finished_of(signals)):
            failed = rank_has_failed(signals)
            if failed:
                overwrite(out, pairs.to(tl.int64), POISON, tl.int32)
            release_window(signals, failed, PEERS, PTX, WIDTH)


def gather_values(rows: TokenRows, buffers: Buffers, release: WindowSignals | None = None) -> torch.Tensor:
    """Return one number for each pair, such as the gradient of its weight, float32 [T, K]; 0 where there is no row.

    Args:
        rows: from locate_rows.
        buffers: float32 [R] of each destination, a number for each row.
        release: the window to release afterwards; if this rank has failed, the result is overwritten before. Only where
            kernels run.

    Raises:
        ArgumentError: unsupported dtype.
    """
    if buffers.dtype is not torch.float32:
        raise ArgumentError(f"buffers: {buffers.dtype}; allowed: float32")
    tokens, k = rows.key.shape
    out = torch.zeros((tokens, k), dtype=torch.float32, device=rows.key.device)
    if not runs_on(out.device):
        gather_values_cpu(rows, buffers, out)
    elif out.numel() or release is not None:
        pairs, (table, _) = out.numel(), buffers.table()
        peers, signals = (0, table) if release is None else (release.peers, release.words)
        _gathers(
            (max(cdiv(pairs, PAIRS.value), 1), 1, 1), out.device, (rows.key, rows.row, table, out, signals), (pairs,),
            _gather_constants(k, peers),
        )  # fmt: skip
    return out


_gathers = Launches(gather_values_kernel)


@cache
def _gather_constants(k: int, peers: int) -> Constants:
    constants = {"K": k, "POISON": poison_word(torch.float32)[0], **signal_constants(peers, 4)}
    return Constants(gather_values_kernel, constants, num_warps=4)
