"""Boxes bound to buffers: views or kernel tables made once, so that a call only copies or reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import Boxes as StridedBoxes
from ..kernels import (
    CopyTable,
    ReduceTable,
    SourceRows,
    TargetRows,
    copy_boxes,
    copy_table,
    reduce_boxes,
    reduce_table,
    reduce_views,
    source_views,
    target_views,
)
from ..kernels.copy_boxes import copy_boxes_kernel
from ..kernels.pointers import interpreted
from ..planner import Boxes, Reduce
from .meeting import Address

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


class Side:
    """Where boxes lie in one buffer: offsets [n] and strides [n, axes], in elements."""

    def __init__(
        self, boxes: Boxes, start: np.ndarray, step: np.ndarray, strides: Sequence[int], base: np.ndarray | int = 0
    ) -> None:
        per_dim = np.array(strides, dtype=np.int64)
        self.offset = start @ per_dim + base
        # An axis for each tensor dim, or more.
        self.stride = step * (per_dim if len(boxes.axes) == len(per_dim) else per_dim[list(boxes.axes)])

    @classmethod
    def source(cls, boxes: Boxes, strides: Sequence[int]) -> Side:
        return cls(boxes, boxes.source_start, boxes.source_step, strides)

    @classmethod
    def target(cls, boxes: Boxes, strides: Sequence[int], base: np.ndarray | int = 0) -> Side:
        return cls(boxes, boxes.target_start, boxes.target_step, strides, base)

    @classmethod
    def packed(cls, boxes: Boxes) -> Side:
        """Boxes one after the other, each contiguous."""
        side = cls.__new__(cls)
        if len(boxes) == 1:
            side.offset = np.zeros(1, np.int64)
            side.stride = np.array([contiguous_strides(boxes.extent[0].tolist())], dtype=np.int64)
            return side
        sizes = boxes.elements
        side.offset = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if len(sizes) else sizes
        tail = np.cumprod(np.maximum(boxes.extent[:, :0:-1], 1), axis=1)[:, ::-1]
        axes = boxes.extent.shape[1]
        side.stride = np.concatenate([tail, np.ones((len(boxes), min(axes, 1)), np.int64)], axis=1)
        return side

    def part(self, piece: Piece) -> Side:
        """Where a piece of the boxes lies."""
        side = Side.__new__(Side)
        side.offset = self.offset[piece.rows]
        if piece.into is not None:
            side.offset = side.offset + (piece.into * self.stride[piece.rows]).sum(axis=1)
        side.stride = self.stride[piece.rows]
        return side


class Terms:
    """Where the terms of boxes lie: offsets [n, contributors] and strides [n, contributors, axes], in elements.

    `bases`: [n, contributors], what is added to where boxes lie by `side`.
    """

    def __init__(self, side: Side, bases: np.ndarray) -> None:
        self.offset = side.offset[:, None] + bases
        self.stride = side.stride[:, None].repeat(bases.shape[1], axis=1)

    def put(self, rows: np.ndarray, contributor: int, side: Side) -> None:
        """Some boxes have a term elsewhere."""
        self.offset[rows, contributor], self.stride[rows, contributor] = side.offset, side.stride

    def put_all(self, terms: np.ndarray, other: Terms) -> None:
        """Some terms, by a mask [n, contributors], lie where `other` says."""
        self.offset[terms], self.stride[terms] = other.offset[terms], other.stride[terms]


class Piece(NamedTuple):
    """Parts of some boxes that lie in one buffer.

    `rows`: of which box each is, [n]; `into`: how far into that box it begins, [n, axes], None where it is all of it.
    """

    buffer: int
    rows: np.ndarray
    into: np.ndarray | None
    boxes: Boxes
    side: Side


class Whole:
    """A tensor that lies in one buffer, with its strides."""

    def __init__(self, buffer: int, strides: Sequence[int]) -> None:
        self.buffer, self.strides = buffer, strides

    def pieces(self, boxes: Boxes) -> list[Piece]:
        """Where boxes that are read from the tensor lie."""
        if not len(boxes):
            return []
        return [Piece(self.buffer, np.arange(len(boxes)), None, boxes, Side.source(boxes, self.strides))]


class Patchwork:
    """A tensor that was never put together: boxes of it, by their places in the tensor (`target_start`), in buffers.

    What would be copied into it and out again is copied once. All boxes are plain (`is_plain`).
    """

    def __init__(self, parts: Sequence[tuple[int, Boxes, Side]]) -> None:
        self.parts = [part for part in parts if len(part[1])]

    def pieces(self, boxes: Boxes) -> list[Piece]:
        """Where boxes that are read from the tensor lie, cut where its parts end."""
        found = []
        for buffer, there, side in self.parts:
            stop, end = boxes.source_start + boxes.extent, there.target_start + there.extent
            low = np.maximum(boxes.source_start[:, None], there.target_start)
            extent = np.minimum(stop[:, None], end) - low
            rows, which = np.nonzero((extent > 0).all(axis=2))
            low, extent = low[rows, which], extent[rows, which]
            into, at = low - boxes.source_start[rows], low - there.target_start[which]
            cut = replace(
                boxes.select(rows), source_start=low, target_start=boxes.target_start[rows] + into, extent=extent
            )
            place = side.part(Piece(buffer, which, at, there, side))
            found.append(Piece(buffer, rows, into, cut, place))
        return found


def is_plain(boxes: Boxes) -> bool:
    """Whether each axis of boxes runs along a tensor dim of its own, without steps."""
    return boxes.axes == tuple(range(boxes.source_start.shape[1])) and bool(
        (boxes.source_step == 1).all() and (boxes.target_step == 1).all()
    )


def run_of(boxes: Boxes, side: Side) -> int | None:
    """Where boxes begin that lie in memory one after the other, each contiguous, as if packed; None if they do not."""
    offsets, end = side.offset.tolist(), None
    for offset, extent, strides in zip(offsets, boxes.extent.tolist(), side.stride.tolist(), strict=True):
        if end is not None and offset != end:
            return None
        size = 1
        for n, stride in zip(reversed(extent), reversed(strides), strict=True):
            if n > 1 and stride != size:
                return None
            size *= n
        end = offset + size
    return offsets[0] if offsets else None


class Copies:
    """Boxes copied from some tensors into others; a part is (source, target, boxes, source side, target side)."""

    table: CopyTable | None = None
    fill: float | int | bool
    _targets: TargetRows
    _sources: SourceRows
    _views: dict[Address, list[torch.Tensor]]

    def __init__(
        self, parts: Sequence[tuple[int, int, Boxes, Side, Side]], fill: float | int | bool, dtype: torch.dtype,
        device: torch.device
    ) -> None:  # fmt: skip
        parts = [part for part in parts if len(part[2])]
        self.empty = not parts
        if self.empty:
            return
        boxes = StridedBoxes.unchecked(
            fill,
            source=_joined([np.full(len(b), s) for s, _, b, _, _ in parts])[:, None],
            target=_joined([np.full(len(b), t) for _, t, b, _, _ in parts]),
            source_offset=_joined([s.offset for _, _, _, s, _ in parts])[:, None],
            target_offset=_joined([t.offset for _, _, _, _, t in parts]),
            extent=_joined([b.extent for _, _, b, _, _ in parts]),
            source_stride=_joined([s.stride for _, _, _, s, _ in parts])[:, None],
            target_stride=_joined([t.stride for _, _, _, _, t in parts]),
        )
        self.fill, self._views = fill, {}
        if is_plain_memory(device):
            self._targets, self._sources = boxes.target_rows, boxes.source_rows
        else:
            self.table = copy_table(boxes, dtype, device)

    @classmethod
    def of_rows(
        cls, targets: TargetRows, sources: SourceRows, fill: float | int | bool, dtype: torch.dtype,
        device: torch.device
    ) -> Copies:  # fmt: skip
        """Of boxes that are few, by where each lies."""
        copies = cls.__new__(cls)
        copies.empty = not targets
        copies.fill, copies._views = fill, {}
        if is_plain_memory(device):
            copies._targets, copies._sources = targets, sources
        elif targets:
            copies.table = copy_table(StridedBoxes.of_rows(targets, sources, fill), dtype, device)
        return copies

    def build(self, aligned: int) -> None:
        """Compile and upload what is launched for sources at multiples of so many bytes."""
        if not self.empty and self.table is not None and not self.table.by_reference:
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
    """Boxes of `sources` reduced into boxes of `targets`: the contributor axis of `boxes` is reduced in order."""

    def __init__(self, boxes: StridedBoxes, reduce: Reduce, dtype: torch.dtype, device: torch.device) -> None:
        self.boxes, self.reduce = boxes, reduce
        divisor = None if reduce.divisor == 1 else reduce.divisor
        self.divisor = divisor
        plain = is_plain_memory(device)
        self.table = None if plain else reduce_table(boxes, dtype, reduce.op, divisor=divisor, device=device)

    def fix(self, sources: Sequence[torch.Tensor | None] = (), targets: Sequence[torch.Tensor | None] = ()) -> None:
        """As of `Copies`."""
        if self.table is not None:
            _fix(self.table, sources, targets)

    def build(self, aligned: int) -> None:
        """As of `Copies`."""
        if self.table is not None and not self.table.by_reference:
            self.table.variant(aligned, 16)

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if self.table is not None:
            reduce_boxes(self.table, sources, targets)
            return
        for target, contributors in zip(
            target_views(self.boxes.target_rows, targets), source_views(self.boxes.source_rows, sources), strict=True
        ):
            if contributors:
                reduce_views(target, contributors, self.reduce.op, self.divisor)
            else:
                target.fill_(self.boxes.fill)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _fix(
    table: CopyTable | ReduceTable, sources: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]
) -> None:
    if not table.by_reference:
        table.sources.fix(sources)
        table.targets.fix(targets)
