"""Copies and reductions of boxes between windows and other memory, in launches that wait for peers and signal them.

A launch has a bounded number of programs (`WindowUse.programs`), each of which copies or reduces every n-th tile. If
the boxes need more than one launch, each of them waits, which takes no time after the first, and the last one signals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .addresses import NO_ADDRESSES
from .boxes import StridedBoxes
from .copy_boxes import CopyTable, copy_constants, copy_tile
from .current_device import is_current, on_device
from .dtypes import real_dtype
from .fused_signals import end_use, half_of_use, is_last_program, wait_for_peers
from .launch import prepared, registers_of_sm, uploaded
from .pack_boxes import pack_tile
from .reduce_boxes import ReduceTable, reduce_tile
from .tiling import DESCRIPTOR, Launch, LaunchConfig
from .window_use import Turn, WindowUse

_INTEGERS = [
    "source0", "source1", "source2", "source3", "target0", "fill", "tiles", "host_error", "fingerprint", "limit",
    "send", "out", "words", "poison", "stride",
]  # fmt: skip

# One tile without rows.
_NO_BOXES = Launch("straight", np.zeros((1, len(DESCRIPTOR)), np.int64), 4, 4, 1, 1, 1, 128, 4, False)


@triton.jit
def in_half(
    half,
    source1,
    source2,
    source3,
    source_table,
    target0,
    target_table,
    stride,  # from half to half of a window, in bytes
    WRITES: tl.constexpr,  # whether the targets are windows, not sources
    PULLS: tl.constexpr,  # whether all sources but the first are windows, not only the second
    SOURCE_TABLE: tl.constexpr,  # addresses in a table of one half
    TARGET_TABLE: tl.constexpr,
):
    """The addresses of windows, and the tables of them, in this half."""
    if WRITES:
        target0 += half * stride
        target_table += half * TARGET_TABLE
    else:
        source1 += half * stride
        if PULLS:
            source2 += half * stride
            source3 += half * stride
            source_table += half * SOURCE_TABLE
    return source1, source2, source3, source_table, target0, target_table


@triton.jit(do_not_specialize=_INTEGERS)
def copy_window_kernel(
    descriptors,  # int64 [tiles, 8]
    source_table,  # int64 [sources], addresses; those that are arguments are not read
    target_table,  # int64 [targets]
    source0: tl.int64,  # address
    source1: tl.int64,
    source2: tl.int64,
    source3: tl.int64,
    target0: tl.int64,
    fill: tl.int64,  # 8 bytes of the fill value
    tiles: tl.int64,
    awaited,  # table of the awaited channel, int64 [4, PEERS]
    pad,  # of the awaited channel, int64 [PEERS, SLOT]
    signalled,  # table of the channel to signal on
    error,  # int64 [1]
    finished,  # int64 [1]
    host_error: tl.int64,  # address of an int64 in host memory
    fingerprint: tl.int64,
    limit: tl.int64,  # of the wait: nanoseconds if TIMED, else polls
    send: tl.int64,  # whether the use ends with this launch
    out: tl.int64,  # address
    words: tl.int64,  # in out
    poison: tl.int64,  # 8 bytes
    stride: tl.int64,  # from half to half of a window, in bytes
    WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_FILL: tl.constexpr,
    PEERS: tl.constexpr,
    CREDIT: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
    POISON: tl.constexpr,
    POISON_WORD: tl.constexpr,
    WRITES: tl.constexpr,
    PULLS: tl.constexpr,
    SOURCE_TABLE: tl.constexpr,
    TARGET_TABLE: tl.constexpr,
    AXES: tl.constexpr,  # of packed boxes; 0: boxes are copied by rows
):
    """`copy_boxes_kernel`, or `pack_tile` for each tile, between a wait and a signal."""
    failed = wait_for_peers(
        awaited, pad, error, host_error, fingerprint, limit, PEERS, CREDIT, TIMED, PTX, WIDTH
    )  # fmt: skip
    half = half_of_use(awaited, signalled, WRITES, PEERS)
    source1, source2, source3, source_table, target0, target_table = in_half(
        half, source1, source2, source3, source_table, target0, target_table, stride, WRITES, PULLS, SOURCE_TABLE,
        TARGET_TABLE,
    )  # fmt: skip
    if not failed:
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            if AXES:
                pack_tile(
                    descriptors + tile * (5 + 3 * AXES),
                    source_table,
                    target_table,
                    source0,
                    source1,
                    source2,
                    source3,
                    target0,
                    WORD,
                    VD,
                    COLS,
                    AXES,
                    ALIGN_S,
                    ALIGN_D,
                    SOURCES,
                    TARGETS,
                )
            else:
                copy_tile(
                    descriptors + tile * 8,
                    source_table,
                    target_table,
                    source0,
                    source1,
                    source2,
                    source3,
                    target0,
                    fill,
                    WORD,
                    VS,
                    VD,
                    ROWS,
                    COLS,
                    TRANSPOSED,
                    ALIGN_S,
                    ALIGN_D,
                    SOURCES,
                    TARGETS,
                    HAS_FILL,
                )
    if is_last_program(finished):
        end_use(
            awaited, signalled, error, fingerprint, send, out, words, poison, PEERS, POISON, POISON_WORD, PTX, WIDTH
        )


@triton.jit(do_not_specialize=[*_INTEGERS, "divisor"])
def reduce_window_kernel(
    descriptors,  # int64 [tiles, 3 * K + 5]
    source_table,
    target_table,
    source0: tl.int64,
    source1: tl.int64,
    source2: tl.int64,
    source3: tl.int64,
    target0: tl.int64,
    fill: tl.int64,
    divisor: tl.int64,  # the bits of a float64
    tiles: tl.int64,
    awaited,
    pad,
    signalled,
    error,
    finished,
    host_error: tl.int64,
    fingerprint: tl.int64,
    limit: tl.int64,
    send: tl.int64,
    out: tl.int64,
    words: tl.int64,
    poison: tl.int64,
    stride: tl.int64,
    K: tl.constexpr,
    OP: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    FROM_WORD: tl.constexpr,
    TO_WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_FILL: tl.constexpr,
    DIVIDE: tl.constexpr,
    SOFT: tl.constexpr,
    PEERS: tl.constexpr,
    CREDIT: tl.constexpr,
    TIMED: tl.constexpr,
    PTX: tl.constexpr,
    WIDTH: tl.constexpr,
    POISON: tl.constexpr,
    POISON_WORD: tl.constexpr,
    WRITES: tl.constexpr,
    PULLS: tl.constexpr,
    SOURCE_TABLE: tl.constexpr,
    TARGET_TABLE: tl.constexpr,
):
    """`reduce_boxes_kernel` between a wait and a signal; arguments as for `copy_window_kernel`."""
    failed = wait_for_peers(
        awaited, pad, error, host_error, fingerprint, limit, PEERS, CREDIT, TIMED, PTX, WIDTH
    )  # fmt: skip
    half = half_of_use(awaited, signalled, WRITES, PEERS)
    source1, source2, source3, source_table, target0, target_table = in_half(
        half, source1, source2, source3, source_table, target0, target_table, stride, WRITES, PULLS, SOURCE_TABLE,
        TARGET_TABLE,
    )  # fmt: skip
    if not failed:
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            reduce_tile(
                descriptors + tile * (3 * K + 5),
                source_table,
                target_table,
                source0,
                source1,
                source2,
                source3,
                target0,
                fill,
                divisor,
                K,
                OP,
                FROM,
                TO,
                FROM_WORD,
                TO_WORD,
                VS,
                VD,
                ROWS,
                COLS,
                TRANSPOSED,
                ALIGN_S,
                ALIGN_D,
                SOURCES,
                TARGETS,
                HAS_FILL,
                DIVIDE,
                SOFT,
            )
    if is_last_program(finished):
        end_use(
            awaited, signalled, error, fingerprint, send, out, words, poison, PEERS, POISON, POISON_WORD, PTX, WIDTH
        )


class WindowLaunch:
    """A launch over boxes of a window, with its descriptors on the device and its kernel loaded."""

    def __init__(
        self,
        kernel: Any,
        launch: Launch,
        use: WindowUse,
        scalars: Sequence[int],
        constants: Mapping[str, Any],
        last: bool,
    ) -> None:
        """
        Args:
            scalars: the kernel's arguments between the addresses and `tiles`.
            last: whether it is the last launch of its boxes.
        """
        self._use, self._last = use, last
        self.descriptors = uploaded(launch.descriptors, use.device)
        tiles = len(self.descriptors)
        self.grid = (max(min(tiles, use.programs), 1), 1, 1)
        self._before = *scalars, tiles, *use.tensors
        self._after = tuple([constants[name] for name in kernel.arg_names if name in constants])
        table = torch.empty(0, dtype=torch.int64, device=use.device)
        arguments = self.descriptors, table, table, *NO_ADDRESSES, *self._before, *(0,) * use.numbers, *self._after
        warps = constants["num_warps"]
        self._start = prepared(kernel, self.grid, use.device, arguments, warps, **registers_of_sm(warps))

    def __call__(
        self,
        source_table: torch.Tensor,
        target_table: torch.Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        turn: Turn,
    ) -> None:
        given = self._use.arguments(turn, self._last)
        self._start(self.descriptors, source_table, target_table, *sources, *targets, *self._before, *given,
                    *self._after)  # fmt: skip


def _halves(table: CopyTable | ReduceTable) -> dict[str, int]:
    """The lengths of the tables of addresses, which are given for both halves."""
    return {"SOURCE_TABLE": table.sources.count, "TARGET_TABLE": table.targets.count}


class WindowCopyTable(CopyTable):
    """Prepared copies of boxes to windows or from them. Boxes may be none: a launch then only waits and signals."""

    def __init__(
        self, boxes: StridedBoxes, dtype: torch.dtype, device: torch.device, use: WindowUse, pieces: bool = False
    ) -> None:
        self.use, self.pieces = use, pieces
        config = LaunchConfig.for_window(boxes.numel * dtype.itemsize, use.programs)
        super().__init__(boxes, dtype, dtype.itemsize, device, config)

    def specialisations(self, source_align: int = 16, target_align: int = 16) -> list[tuple[Launch, dict[str, Any]]]:
        launches = super().specialisations(source_align, target_align)
        launches = launches or [(_NO_BOXES, copy_constants(_NO_BOXES, (source_align, target_align)))]
        return [
            (launch, {**known, **self.use.constants(launch.num_warps), **_halves(self), "AXES": launch.axes})
            for launch, known in launches
        ]

    def prepare(self, launch: Launch, scalars: Sequence[int], constants: Mapping[str, Any], last: bool) -> WindowLaunch:
        return WindowLaunch(copy_window_kernel, launch, self.use, scalars, constants, last)


class WindowReduceTable(ReduceTable):
    """Prepared reductions of boxes of which some contributors are in windows."""

    def __init__(
        self,
        boxes: StridedBoxes,
        dtype: torch.dtype,
        op: str,
        divisor: float | None,
        device: torch.device,
        use: WindowUse,
    ) -> None:
        self.use = use
        nbytes, size = boxes.numel * dtype.itemsize, real_dtype(dtype).itemsize
        config = LaunchConfig.for_reduction(nbytes, boxes.contributors, size, max(use.programs // 2, 1))
        super().__init__(boxes, dtype, op, divisor, dtype, device, config)

    def specialisations(self, source_align: int = 16, target_align: int = 16) -> list[tuple[Launch, dict[str, Any]]]:
        launches = super().specialisations(source_align, target_align)
        return [
            (launch, {**known, **self.use.constants(launch.num_warps), **_halves(self)}) for launch, known in launches
        ]

    def prepare(self, launch: Launch, scalars: Sequence[int], constants: Mapping[str, Any], last: bool) -> WindowLaunch:
        return WindowLaunch(reduce_window_kernel, launch, self.use, scalars, constants, last)


def window_table(
    boxes: StridedBoxes,
    dtype: torch.dtype,
    device: torch.device,
    use: WindowUse,
    op: str | None = None,
    divisor: float | None = None,
    pieces: bool = False,
) -> WindowCopyTable | WindowReduceTable:
    """The table of copies, or of reductions if there is an `op`; arguments as for `copy_table` and `reduce_table`.
    `pieces`: as for `tile_launches`."""
    if op is None or not boxes.numel:
        return WindowCopyTable(boxes, dtype, device, use, pieces)
    return WindowReduceTable(boxes, dtype, op, divisor, device, use)


def run_in_window(
    table: WindowCopyTable | WindowReduceTable,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    turn: Turn,
) -> None:
    """Wait for the peers, copy or reduce each box, and signal the peers."""
    if not is_current(table.device):
        with on_device(table.device):
            run_in_window(table, sources, targets, turn)
        return
    first_sources, source_table, source_align = table.sources.resolve(sources)
    first_targets, target_table, target_align = table.targets.resolve(targets)
    with table.use.watched:
        for launch in table.variant(source_align, target_align):
            launch(source_table, target_table, first_sources, first_targets, turn)
