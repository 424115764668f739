"""Boxes bound to buffers: views or kernel tables made once, so that a call only copies or reduces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, lt, mul, sub
from typing import NamedTuple

import torch

from ...kernels import (
    CopyTable,
    ReduceTable,
    SourceRows,
    StridedBoxes,
    TargetRows,
    Where,
    copy_boxes,
    copy_boxes_kernel,
    copy_table,
    interpreted,
    reduce_boxes,
    reduce_table,
    reduce_views,
    source_views,
    target_views,
)
from ...planner import Boxes, Reduce, Row
from ..transports.base import Address

_CACHED_ADDRESSES = 64


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_plain_memory(device: torch.device) -> bool:
    """Whether torch's own operations move boxes there: on the CPU, except where kernels are interpreted."""
    return device.type == "cpu" and not interpreted(copy_boxes_kernel)


Part = tuple[int, Where]
"""A buffer, by its number, and where in it."""


class Move(NamedTuple):
    """A box that is written, and what from: one box, terms that are reduced in order, or none where it is filled."""

    target: Part
    sources: list[Part]


def packed(extent: Sequence[int], base: int) -> Where:
    """A contiguous box in a buffer, from element `base` on."""
    return tuple(extent), contiguous_strides(extent), base


def place(extent: Sequence[int], start: Sequence[int], strides: Sequence[int], base: int = 0) -> Where:
    """A plain box in a buffer with strides."""
    return tuple(extent), tuple(strides), base + sum(map(mul, start, strides))


class Piece(NamedTuple):
    """The part of a box that lies in one buffer.

    `into`: how far into the box it begins, along each axis; None where it is all of it.
    """

    part: Part
    into: tuple[int, ...] | None

    def of(self, where: Where) -> Where:
        """The same part of the box, where that lies as a whole."""
        return where if self.into is None else place(self.part[1][0], self.into, where[1], where[2])

    def row(self, row: Row) -> Row:
        """The row of this part of the box of a row."""
        if self.into is None:
            return row
        starts = [list(map(add, start, self.into)) for start in (row.source_start, row.target_start)]
        return row._replace(source_start=starts[0], target_start=starts[1], extent=list(self.part[1][0]))


class Whole:
    """A tensor that lies in one buffer, with its strides."""

    def __init__(self, buffer: int, strides: Sequence[int]) -> None:
        self.buffer, self.strides = buffer, strides

    def pieces(self, row: Row, axes: Sequence[int]) -> list[Piece]:
        """Where the box of a row that is read from the tensor lies; `axes`: as of `Boxes`."""
        where = box_at(row.extent, row.source_start, row.source_step, self.strides, axes)
        return [Piece((self.buffer, where), None)]


class Patchwork:
    """A tensor that was never put together: boxes of it, by their places in the tensor (`target_start`), in buffers.

    What would be copied into it and out again is copied once. All boxes are plain (`is_plain`).
    """

    def __init__(self, parts: Sequence[tuple[Row, Part]]) -> None:
        self.parts = parts

    def pieces(self, row: Row, axes: Sequence[int]) -> list[Piece]:
        """As of `Whole`; the box is cut where the tensor's parts end."""
        found = []
        for there, (buffer, (_, strides, offset)) in self.parts:
            low = list(map(max, row.source_start, there.target_start))
            high = [
                min(a + n, b + k)
                for a, n, b, k in zip(row.source_start, row.extent, there.target_start, there.extent, strict=True)
            ]
            if all(map(lt, low, high)):
                into, at = map(sub, low, row.source_start), map(sub, low, there.target_start)
                found.append(Piece((buffer, place(list(map(sub, high, low)), list(at), strides, offset)), tuple(into)))
        return found


def box_at(
    extent: Sequence[int],
    start: Sequence[int],
    step: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[int],
    base: int = 0,
) -> Where:
    """A box of a row in a buffer with strides, as kernels say it."""
    offset = base + sum(map(mul, start, strides))
    return tuple(extent), tuple([n * strides[d] for n, d in zip(step, axes, strict=True)]), offset


def is_plain(boxes: Boxes) -> bool:
    """Whether each axis of boxes runs along a tensor dim of its own, without steps."""
    return boxes.axes == tuple(range(boxes.source_start.shape[1])) and bool(
        (boxes.source_step == 1).all() and (boxes.target_step == 1).all()
    )


def run_of(boxes: Iterable[Where]) -> int | None:
    """Where boxes begin that lie in memory one after the other, each contiguous, as if packed; None if they do not."""
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


class Copies:
    """Boxes copied from some tensors into others, or filled."""

    table: CopyTable | None = None

    def __init__(
        self, moves: Sequence[Move], fill: float | int | bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.empty, self.fill = not moves, fill
        self._views: dict[Address, list[torch.Tensor]] = {}
        self._targets: TargetRows = [target for target, _ in moves]
        self._sources: SourceRows = [sources for _, sources in moves]
        if moves and not is_plain_memory(device):
            self.table = copy_table(StridedBoxes.of_rows(self._targets, self._sources, fill), dtype, device)

    def build(self, aligned: int) -> None:
        """Compile and upload what is launched for sources at multiples of so many bytes."""
        if not self.empty and self.table is not None and not self.table.cpu_path:
            self.table.variant(aligned, 16)

    def fix(self, sources: Sequence[torch.Tensor | None] = (), targets: Sequence[torch.Tensor | None] = ()) -> None:
        """Buffers that every call is given; None for the others."""
        if not self.empty and self.table is not None:
            _fix(self.table, sources, targets)

    def knows(self, key: Address) -> bool:
        """Whether views on the memory that `key` names are kept, so that a call needs no targets."""
        return key is not None and not self.empty and key in self._views

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], key: Address = None) -> None:
        """`key` names the targets' memory: views on it are kept for the next call with the same key."""
        if self.empty:
            return
        if self.table is not None:
            copy_boxes(self.table, sources, targets)
            return
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


class Reduction:
    """Boxes written with their terms reduced in order, or filled."""

    table: ReduceTable | None = None

    def __init__(
        self, moves: Sequence[Move], reduce: Reduce, fill: float | int | bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.empty, self.reduce, self.fill = not moves, reduce, fill
        self.divisor = None if reduce.divisor == 1 else reduce.divisor
        self._targets: TargetRows = [target for target, _ in moves]
        self._sources: SourceRows = [sources for _, sources in moves]
        if moves and not is_plain_memory(device):
            boxes = StridedBoxes.of_rows(self._targets, self._sources, fill)
            self.table = reduce_table(boxes, dtype, reduce.op, divisor=self.divisor, device=device)

    def fix(self, sources: Sequence[torch.Tensor | None] = (), targets: Sequence[torch.Tensor | None] = ()) -> None:
        """As of `Copies`."""
        if self.table is not None:
            _fix(self.table, sources, targets)

    def build(self, aligned: int) -> None:
        """As of `Copies`."""
        if self.table is not None and not self.table.cpu_path:
            self.table.variant(aligned, 16)

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if self.table is not None:
            reduce_boxes(self.table, sources, targets)
            return
        for target, contributors in zip(
            target_views(self._targets, targets), source_views(self._sources, sources), strict=True
        ):
            if contributors:
                reduce_views(target, contributors, self.reduce.op, self.divisor)
            else:
                target.fill_(self.fill)


def _fix(
    table: CopyTable | ReduceTable, sources: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]
) -> None:
    if not table.cpu_path:
        table.sources.fix(sources)
        table.targets.fix(targets)
