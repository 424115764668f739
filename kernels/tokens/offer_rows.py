"""offer_rows: copy rows to a buffer that peers read, unless they lie in one, and tell all ranks which buffer it is.

Rows may be quantized on the way, to what quantize_rows would have written. With a barrier every program waits, before
it writes, until peers have read what they were offered before.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..fused_signals import is_last_program
from ..launch import Constants, Launches, registers_of_sm, runs_on
from .copy_rows import BLOCK, check_buffer, copy_rows_cpu
from .quantize_rows import STEP, QuantizedRows, check_payload, quantize_blocks, quantize_rows_cpu
from .rows import PROGRAMS_OF_SM, Buffers, cdiv, check_rows, programs_of, row_alignment, row_constants
from .window_signals import (
    WindowBarrier,
    acquire_window,
    barrier_of_ranks,
    count_acquired,
    finished_of,
    signal_constants,
)

# Times `BLOCK` and the warps of a program that waits, since there are few: as many bytes are under way on each SM.
_WIDER = 4
_NOT_QUANTIZED = {"GROUP": 0, "POWERS": False, "DTYPE": None, "ROW_BYTES": 0, "SCALES_AT": 0}


@triton.jit(do_not_specialize=["source", "target", "stride", "place", "word", "ranks", "programs", "fingerprint"])
def offer_rows_kernel(
    num_rows,  # int32 [1]
    words,  # int64 [ranks], addresses of int32 tensors
    signals,  # int64 [8]
    source: tl.int64,  # address
    target: tl.int64,  # address
    stride: tl.int64,  # elements, of rows that are quantized
    place: tl.int64,  # in each tensor of words
    word: tl.int32,
    ranks: tl.int32,
    programs: tl.int32,
    fingerprint: tl.int64,
    H: tl.constexpr,
    COLS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes
    COPY: tl.constexpr,
    VEC: tl.constexpr,  # elements
    GROUP: tl.constexpr,  # elements of a scale; 0: rows are copied as they are
    POWERS: tl.constexpr,  # whether scales are powers of two, of 8 bits
    DTYPE: tl.constexpr,  # of rows that are quantized
    ROW_BYTES: tl.constexpr,  # of a quantized row
    SCALES_AT: tl.constexpr,  # the byte of a quantized row in which its scales begin
    PEERS: tl.constexpr,  # 0: neither a wait nor a barrier
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program i writes the word of ranks i, i + programs, ... and copies these blocks of the rows below num_rows. The
    last one to finish has a barrier with the peers."""
    if PEERS > 0:
        failed = acquire_window(signals, PEERS, TIMED, PTX, WIDTH)
        if not failed:
            offer(
                num_rows, words, source, target, stride, place, word, ranks, programs, H, COLS, WORD, ALIGN, COPY, VEC,
                GROUP, POWERS, DTYPE, ROW_BYTES, SCALES_AT,
            )  # fmt: skip
        if is_last_program(finished_of(signals)):
            count_acquired(signals, PEERS, WIDTH)
            barrier_of_ranks(signals, fingerprint, PEERS, TIMED, PTX, WIDTH)
    else:
        offer(
            num_rows, words, source, target, stride, place, word, ranks, programs, H, COLS, WORD, ALIGN, COPY, VEC,
            GROUP, POWERS, DTYPE, ROW_BYTES, SCALES_AT,
        )  # fmt: skip


@triton.jit
def offer(
    num_rows, words, source, target, stride, place, word, ranks, programs,
    H: tl.constexpr, COLS: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr, COPY: tl.constexpr,
    VEC: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr, DTYPE: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
):  # fmt: skip
    """The part of a program that writes."""
    for rank in range(tl.program_id(0), ranks, programs):
        tl.store(tl.load(words + rank).to(tl.pointer_type(tl.int32)) + place, word)
    if GROUP > 0:
        quantize_blocks(
            source, target, stride, ROW_BYTES, SCALES_AT, tl.load(num_rows).to(tl.int64), programs, H, GROUP, COLS,
            POWERS, DTYPE, WORD, ALIGN, VEC,
        )  # fmt: skip
    elif COPY:
        here = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        there = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
        end = tl.load(num_rows).to(tl.int64) * H
        step = programs.to(tl.int64) * COLS
        for start in range(tl.program_id(0).to(tl.int64) * COLS, end, step):
            at = start + tl.arange(0, COLS)
            tl.store(there + at, tl.load(here + at, mask=at < end, other=0), mask=at < end)


def offer_rows(
    source: torch.Tensor,
    target: torch.Tensor | None,
    num_rows: torch.Tensor,
    words: Buffers | None,
    place: int,
    word: int,
    barrier: WindowBarrier | None = None,
    quantized: QuantizedRows | None = None,
) -> None:
    """Copy the rows of `source` below `num_rows` to `target`, and write `word` to all ranks.

    Args:
        source, target: [R, ...] as for copy_rows; target None: nothing is copied. With `quantized` the source is
            [R, H] as for quantize_rows, and the target packed rows, int32 [R, W].
        num_rows: int32 [1], at most R; read on the device.
        words: int32, contiguous, of each destination; the element at index `place` of their memory is written. None,
            only with a barrier: nothing is written there.
        word: a number of 32 bits.
        barrier: wait first until the window with target and words may be written, and have a barrier of the ranks
            afterwards. Only where kernels run.
        quantized: how rows are cast on the way, as by quantize_rows; None: they are copied as they are.

    Raises:
        ArgumentError: unsupported shape, dtype or stride.
    """
    if quantized is None:
        check_buffer("source", source, None if target is None else target.shape)
    else:
        assert target is not None, "what is quantized is written"
        check_payload(source.dtype)
        check_rows("source", source, (len(target), source.shape[-1]), source.dtype)
        quantized.check(target.dtype, target.shape, source.shape[1])
    if target is not None:
        check_buffer("target", target)
    if not runs_on(source.device):
        for tensor in () if words is None else words.tensors:
            tensor.view(-1)[place] = word
        if target is None:
            return
        if quantized is None:
            copy_rows_cpu(source, target, num_rows)
        else:
            number = int(num_rows)
            quantize_rows_cpu(source[:number], target[:number], quantized.scales_at, quantized.how)
        return
    copied = target is not None and source.numel() > 0
    quantized = quantized if copied else None
    length, here, there = source.numel() // max(source.shape[0], 1), source.data_ptr(), 0
    if words is not None:
        ranks, table = len(words), words.table()[0]
    else:
        assert barrier is not None, "without words and without a barrier, copy_rows does the same"
        ranks, table = 0, barrier.signals.words  # not read
    programs, wider = max(ranks, 1), 1 if barrier is None or not copied else _WIDER
    stride, row_bytes, blocks, bits = 0, 0, cdiv(source.numel() * source.itemsize, BLOCK * wider), here
    if target is not None and copied:
        there = target.data_ptr()
        if quantized is None:
            bits |= there
        else:
            stride, row_bytes = source.stride(0), target.shape[1] * 4
            bits |= stride * source.itemsize
            blocks = len(source) * quantized.how.blocks(length, quantized.how.columns(length, STEP * wider))
        programs = programs_of(source.device, blocks)
    align, numbers = row_alignment(source.dtype, length, bits), (here, there, stride, place, word, ranks)
    given = source.dtype, length, align, copied, wider
    if barrier is None:
        constants = _constants(*given, 0, quantized, row_bytes)
        _launches((programs, 1, 1), source.device, (num_rows, table, table), (*numbers, programs, 0), constants)
        return
    signals, fingerprint = barrier
    programs = min(programs, signals.programs)
    constants = _constants(*given, signals.peers, quantized, row_bytes)
    with signals.watched(acquires=True):
        _launches(
            (programs, 1, 1), source.device, (num_rows, table, signals.words),
            (*numbers, programs, fingerprint), constants,
        )  # fmt: skip


_launches = Launches(offer_rows_kernel)


@cache
def _constants(
    dtype: torch.dtype,
    length: int,
    align: int,
    copied: bool,
    wider: int,
    peers: int,
    quantized: QuantizedRows | None = None,
    row_bytes: int = 0,
) -> Constants:
    constants = row_constants(dtype, length, align) | {"COPY": copied}
    if quantized is None:
        constants |= {"COLS": BLOCK * wider // dtype.itemsize, **_NOT_QUANTIZED}
    else:
        constants |= quantized.how.constants(dtype, length, STEP * wider) | quantized.places(row_bytes)
    constants |= signal_constants(peers, 4 * wider)
    registers = registers_of_sm(4 * wider, PROGRAMS_OF_SM if wider == 1 and quantized is None else 1)
    return Constants(offer_rows_kernel, constants, num_warps=4 * wider, **registers)
