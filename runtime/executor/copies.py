"""Copies and reductions of boxes, with views or kernel tables made once, so that a call only executes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any, NamedTuple

import torch

from ...kernels import (
    DirectTable,
    DirectUse,
    SourceRows,
    StridedBoxes,
    TargetRows,
    Turn,
    Where,
    WindowUse,
    copy_boxes,
    copy_boxes_kernel,
    copy_table,
    interpreted,
    reduce_boxes,
    reduce_table,
    reduce_views,
    run_in_window,
    source_views,
    target_views,
    window_table,
)
from ...planner import Reduce
from ..transports.comm_requests import Address

_CACHED_ADDRESSES = 64


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_plain_memory(device: torch.device) -> bool:
    """Whether boxes on this device are copied by torch operations: on the CPU, unless kernels are interpreted."""
    return device.type == "cpu" and not interpreted(copy_boxes_kernel)


Part = tuple[int, Where]
"""The index of a buffer, and a place in it."""


class Move(NamedTuple):
    """A box to write and its sources: one box to copy, terms to reduce in order, or none to fill it."""

    target: Part
    sources: list[Part]


def packed(extent: Sequence[int], base: int) -> Where:
    """The place of a contiguous box that begins at element `base` of a buffer."""
    return tuple(extent), contiguous_strides(extent), base


def place(extent: Sequence[int], start: Sequence[int], strides: Sequence[int], base: int = 0) -> Where:
    """The place of a box of adjacent elements in a tensor with these strides that begins at element `base`."""
    return tuple(extent), tuple(strides), base + sum(map(mul, start, strides))


def box_at(
    extent: Sequence[int],
    start: Sequence[int],
    step: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[int],
    base: int = 0,
) -> Where:
    """The place of a row's box in a tensor with these strides that begins at element `base` of a buffer."""
    offset = base + sum(map(mul, start, strides))
    return tuple(extent), tuple([n * strides[d] for n, d in zip(step, axes, strict=True)]), offset


def contiguous_start(boxes: Iterable[Where]) -> int | None:
    """The first element of boxes that are contiguous and adjacent in memory, as if packed; None if they are not."""
    first = end = None
    for extent, strides, offset in boxes:
        if first is None:
            first = offset
        elif offset != end:
            return None
        size = 1
        for n, stride in zip(reversed(extent), reversed(strides), strict=True):
            if n > 1 and stride != size:
                return None
            size *= n
        end = offset + size
    return first


class _BoundBoxes(ABC):
    """What `Copies` and `Reduction` have in common: a kernel table, and calls within a use of a window.

    Attributes:
        table: of the kernel; None in plain memory, where torch operations do the same.
    """

    table: Any = None
    use: WindowUse | None

    def build(self, aligned: int) -> None:
        """Compile and upload the launch for sources whose addresses are multiples of `aligned` bytes."""
        if self.table is not None and not self.table.cpu_path:
            self.table.variant(aligned, 16)

    def fix(self, sources: Sequence[torch.Tensor | None] = (), targets: Sequence[torch.Tensor | None] = ()) -> None:
        """Set buffers that are the same in every call; None for those that are not."""
        if self.table is not None and not self.table.cpu_path:
            stride = 0 if self.use is None else self.use.stride
            self.table.sources.fix(sources, stride)
            self.table.targets.fix(targets, stride)

    def in_window(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], turn: Turn) -> None:
        """Execute in one turn of the use: wait for the peers before the first box, signal them after the last one."""
        if self.table is not None:
            run_in_window(self.table, sources, targets, turn)
            return
        assert self.use is not None
        if self.use.begin_cpu(turn):
            self._in_plain_memory(sources, targets)
        self.use.end_cpu(turn)

    @abstractmethod
    def _in_plain_memory(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Execute by torch operations."""


class Copies(_BoundBoxes):
    """Copies boxes from source tensors into target tensors, or fills them.

    Args:
        use: of a window; such copies are executed by `in_window`, others by a call.
        pieces: boxes are contiguous in the targets, begin at multiples of 16 bytes, and are followed by unused bytes up
            to the next one. For copies with a use.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        fill: float | int | bool,
        dtype: torch.dtype,
        device: torch.device,
        use: WindowUse | None = None,
        pieces: bool = False,
    ) -> None:
        self.empty, self.fill, self.use = not moves, fill, use
        self._views: dict[Address, list[torch.Tensor]] = {}
        self._targets: TargetRows = [target for target, _ in moves]
        self._sources: SourceRows = [sources for _, sources in moves]
        if is_plain_memory(device) or not (moves or use):
            return
        boxes = StridedBoxes.of_rows(self._targets, self._sources, fill)
        if use is None:
            self.table = copy_table(boxes, dtype, device)
        elif isinstance(use, DirectUse):
            self.table = DirectTable(boxes, dtype, device, use)
        else:
            self.table = window_table(boxes, dtype, device, use, pieces=pieces)

    def knows(self, key: Address) -> bool:
        """Whether views for `key` are cached, so that a call needs no targets."""
        return key is not None and not self.empty and key in self._views

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], key: Address = None) -> None:
        """Execute the copies. `key` identifies the targets' memory, of which views are cached for the next calls."""
        if self.table is not None:
            copy_boxes(self.table, sources, targets)
        elif not self.empty:
            self._in_plain_memory(sources, targets, key)

    def _in_plain_memory(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], key: Address = None
    ) -> None:
        views = None if key is None else self._views.get(key)
        if views is None:
            views = target_views(self._targets, targets)
            if key is not None:
                if len(self._views) >= _CACHED_ADDRESSES:
                    self._views.pop(next(iter(self._views)))
                self._views[key] = views
        for target, source in zip(views, source_views(self._sources, sources), strict=True):
            if source:
                target.copy_(source[0])
            else:
                target.fill_(self.fill)


class Reduction(_BoundBoxes):
    """Reduces the terms of boxes in a fixed order into target tensors, or fills them. `use`: as in `Copies`."""

    def __init__(
        self,
        moves: Sequence[Move],
        reduce: Reduce,
        fill: float | int | bool,
        dtype: torch.dtype,
        device: torch.device,
        use: WindowUse | None = None,
    ) -> None:
        self.empty, self.reduce, self.fill, self.use = not moves, reduce, fill, use
        self.divisor = None if reduce.divisor == 1 else reduce.divisor
        self._targets: TargetRows = [target for target, _ in moves]
        self._sources: SourceRows = [sources for _, sources in moves]
        if is_plain_memory(device) or not (moves or use):
            return
        boxes = StridedBoxes.of_rows(self._targets, self._sources, fill)
        if use is None:
            self.table = reduce_table(boxes, dtype, reduce.op, divisor=self.divisor, device=device)
        else:
            self.table = window_table(boxes, dtype, device, use, reduce.op, self.divisor)

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Execute the reduction."""
        if self.table is not None:
            reduce_boxes(self.table, sources, targets)
        else:
            self._in_plain_memory(sources, targets)

    def _in_plain_memory(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for target, contributors in zip(
            target_views(self._targets, targets), source_views(self._sources, sources), strict=True
        ):
            if contributors:
                reduce_views(target, contributors, self.reduce.op, self.divisor)
            else:
                target.fill_(self.fill)
