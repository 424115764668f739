"""Strided N-D boxes between flat buffers, the unit of all data movement: their views, merged axes, access patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ..errors import ArgumentError

Where = tuple[tuple[int, ...], tuple[int, ...], int]
"""Extent, strides and offset, in elements."""
TargetRows = list[tuple[int, Where]]
SourceRows = list[list[tuple[int, Where]]]


@dataclass(frozen=True, eq=False)
class StridedBoxes:
    """n strided N-D boxes over `axes` axes.

    Offsets and strides count elements, relative to the buffer tensor's first element (its data_ptr). The targets of
    the boxes of one call overlap neither each other nor any source; a source may be read any number of times.

    Raises:
        ArgumentError: shapes or dtypes of the arrays do not match.
    """

    source: np.ndarray  # int64 [n, contributors]; index into the call's `sources`; -1 = fill (no source is read)
    target: np.ndarray  # int64 [n]; index into `targets`
    source_offset: np.ndarray  # int64 [n, contributors]
    target_offset: np.ndarray  # int64 [n]
    extent: np.ndarray  # int64 [n, axes]
    source_stride: np.ndarray  # int64 [n, contributors, axes]
    target_stride: np.ndarray  # int64 [n, axes]
    fill: float | int | bool = 0  # written by boxes with source -1, such as the identity of a reduction

    def __post_init__(self) -> None:
        if np.ndim(self.source) != 2 or np.ndim(self.extent) != 2:
            raise ArgumentError(
                "boxes: source must be [n, contributors] and extent [n, axes], "
                f"got shapes {np.shape(self.source)} and {np.shape(self.extent)}"
            )
        (n, contributors), axes = np.shape(self.source), np.shape(self.extent)[1]
        if contributors < 1:
            raise ArgumentError("boxes: source has 0 contributors; at least 1 is needed (-1 in it means fill)")
        shapes = {
            "source": (n, contributors),
            "target": (n,),
            "source_offset": (n, contributors),
            "target_offset": (n,),
            "extent": (n, axes),
            "source_stride": (n, contributors, axes),
            "target_stride": (n, axes),
        }
        for name, shape in shapes.items():
            array = np.asarray(getattr(self, name))
            if array.shape != shape:
                raise ArgumentError(f"boxes: {name} has shape {array.shape}, {shape} is needed")
            if array.size and not np.issubdtype(array.dtype, np.integer):
                raise ArgumentError(f"boxes: {name} has dtype {array.dtype}, int64 is needed")
            object.__setattr__(self, name, np.ascontiguousarray(array, dtype=np.int64))
        filled = (self.source == -1).sum(axis=1)
        if (self.source < -1).any() or (self.target < 0).any():
            raise ArgumentError("boxes: source ids must be >= -1 and target ids >= 0")
        if ((filled > 0) & (filled < contributors)).any():
            raise ArgumentError("boxes: a fill row must have source -1 for all of its contributors")
        read = (filled == 0) & (self.extent > 0).all(axis=1)
        for name, array, used in (
            ("extent", self.extent, slice(None)),
            ("source_offset", self.source_offset, read),
            ("target_offset", self.target_offset, slice(None)),
            ("source_stride", self.source_stride, read),
            ("target_stride", self.target_stride, slice(None)),
        ):
            if (array[used] < 0).any():
                raise ArgumentError(f"boxes: {name} has negative entries; all must be >= 0")
        if ((self.target_stride == 0) & (self.extent > 1)).any():
            raise ArgumentError(
                "boxes: target_stride is 0 along an axis of extent > 1: elements would be written twice"
            )

    @classmethod
    def of_rows(cls, targets: TargetRows, sources: SourceRows, fill: float | int | bool) -> StridedBoxes:
        """Make boxes from their `target_rows` and `source_rows`."""
        if not targets:
            one, row = np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
            return cls(one, row, one, row, one, np.zeros((0, 1, 1), np.int64), one, fill)
        axes, contributors = len(targets[0][1][0]), max(1, max(map(len, sources)))
        nothing = [(-1, ((0,) * axes, (0,) * axes, 0))] * contributors
        read = [row or nothing for row in sources]
        return cls(
            source=np.array([[number for number, _ in row] for row in read]),
            target=np.array([number for number, _ in targets]),
            source_offset=np.array([[offset for _, (_, _, offset) in row] for row in read]),
            target_offset=np.array([offset for _, (_, _, offset) in targets]),
            extent=np.array([extent for _, (extent, _, _) in targets], dtype=np.int64),
            source_stride=np.array([[stride for _, (_, stride, _) in row] for row in read], dtype=np.int64),
            target_stride=np.array([stride for _, (_, stride, _) in targets], dtype=np.int64),
            fill=fill,
        )

    def __len__(self) -> int:
        return len(self.target)

    @property
    def contributors(self) -> int:
        return self.source.shape[1]

    @property
    def axes(self) -> int:
        return self.extent.shape[1]

    @property
    def numel(self) -> int:
        """The number of elements written by all boxes."""
        return int(self.extent.prod(axis=1).sum())

    @cached_property
    def target_rows(self) -> TargetRows:
        """Each box's target, and extent, strides and offset there, as Python numbers."""
        extents, strides = map(tuple, self.extent.tolist()), map(tuple, self.target_stride.tolist())
        where = zip(extents, strides, self.target_offset.tolist(), strict=True)
        return list(zip(self.target.tolist(), where, strict=True))

    @cached_property
    def source_rows(self) -> SourceRows:
        """Each box's sources, and extent, strides and offset there, as Python numbers; empty for a fill."""
        return [
            [(i, (tuple(extent), tuple(stride), offset)) for i, offset, stride in zip(*row, strict=True) if i >= 0]
            for extent, row in zip(
                self.extent.tolist(),
                zip(self.source.tolist(), self.source_offset.tolist(), self.source_stride.tolist(), strict=True),
                strict=True,
            )
        ]

    @property
    def has_fill(self) -> bool:
        return bool((self.source[:, 0] < 0).any())


def source_views(rows: SourceRows, sources: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return each box's source views, one per contributor; empty for a fill."""
    return [[_view(sources[i], *where) for i, where in row] for row in rows]


def target_views(rows: TargetRows, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each box's target view."""
    return [_view(targets[i], *where) for i, where in rows]


def _view(buffer: torch.Tensor, extent: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    if not offset and buffer.shape == extent and buffer.stride() == stride:
        return buffer
    if 0 in extent:
        offset = 0  # an empty view; the offset may lie beyond the buffer's end
    return buffer.as_strided(extent, stride, buffer.storage_offset() + offset)


def split_elements(boxes: StridedBoxes, parts: int) -> StridedBoxes:
    """Return the boxes over elements split into `parts` equal ones, such as complex numbers into reals."""
    n, contributors = boxes.source.shape
    return StridedBoxes(
        source=boxes.source,
        target=boxes.target,
        source_offset=boxes.source_offset * parts,
        target_offset=boxes.target_offset * parts,
        extent=np.concatenate([boxes.extent, np.full((n, 1), parts)], axis=1),
        source_stride=np.concatenate([boxes.source_stride * parts, np.ones((n, contributors, 1), np.int64)], axis=2),
        target_stride=np.concatenate([boxes.target_stride * parts, np.ones((n, 1), np.int64)], axis=1),
        fill=boxes.fill,
    )


def take(boxes: StridedBoxes, index: np.ndarray) -> StridedBoxes:
    """Return the boxes at `index`, an integer array."""
    return StridedBoxes(
        boxes.source[index],
        boxes.target[index],
        boxes.source_offset[index],
        boxes.target_offset[index],
        boxes.extent[index],
        boxes.source_stride[index],
        boxes.target_stride[index],
        boxes.fill,
    )


def permute(boxes: StridedBoxes, order: np.ndarray) -> StridedBoxes:
    """Return the boxes with axes reordered by the rows of `order`, [n, axes]."""
    return replace(
        boxes,
        extent=np.take_along_axis(boxes.extent, order, axis=1),
        source_stride=np.take_along_axis(boxes.source_stride, order[:, None, :], axis=2),
        target_stride=np.take_along_axis(boxes.target_stride, order, axis=1),
    )


def coalesce(boxes: StridedBoxes) -> StridedBoxes:
    """Drop empty boxes, sort axes by target stride, innermost first, and merge axes where all buffers allow it.

    Axes of extent 1 are removed; at least two of extent 1 and stride 0 follow the last remaining axis. Fills get
    source strides of 0.
    """
    boxes = take(boxes, np.flatnonzero((boxes.extent > 0).all(axis=1)))
    n, contributors, axes = boxes.source_stride.shape
    fill = boxes.source[:, 0] < 0
    order = np.argsort(np.where(boxes.extent > 1, boxes.target_stride, np.iinfo(np.int64).max), axis=1, kind="stable")
    boxes = permute(boxes, order)
    extent = np.ones((n, axes + 2), np.int64)
    source_stride = np.zeros((n, contributors, axes + 2), np.int64)
    target_stride = np.zeros((n, axes + 2), np.int64)
    box = np.arange(n)
    last = np.full(n, -1)  # [n], the last axis of the result so far
    for axis in range(axes):
        e, s, t = boxes.extent[:, axis], boxes.source_stride[:, :, axis], boxes.target_stride[:, axis]
        at = np.maximum(last, 0)
        grown = extent[box, at]
        merges = (s == source_stride[box, :, at] * grown[:, None]).all(axis=1) | fill
        merges &= (last >= 0) & (e > 1) & (t == target_stride[box, at] * grown)
        extent[box[merges], at[merges]] *= e[merges]
        opens = (e > 1) & ~merges
        last[opens] += 1
        i, at = box[opens], last[opens]
        extent[i, at], target_stride[i, at] = e[opens], t[opens]
        source_stride[i, :, at] = s[opens]
    source_stride[fill] = 0
    used = int(last.max(initial=-1)) + 3
    return replace(
        boxes,
        source_offset=np.where(fill[:, None], 0, boxes.source_offset),
        extent=extent[:, :used],
        source_stride=source_stride[:, :, :used],
        target_stride=target_stride[:, :used],
    )


def classify(boxes: StridedBoxes) -> tuple[np.ndarray, StridedBoxes]:
    """Return the kind of each coalesced box (0 straight, 1 strided, 2 transposed), and the boxes with columns as axis 0
    and rows as axis 1.

    Straight: columns are adjacent in every buffer. Transposed: columns are adjacent in every source, rows in the
    target. Strided: neither; there is one column.
    """
    n, axes = boxes.extent.shape
    box, pad = np.arange(n), np.full(n, axes - 1)
    long = boxes.extent > 1
    fill = boxes.source[:, :1] < 0
    in_target = (boxes.target_stride == 1) & long
    in_source = (boxes.source_stride == 1).all(axis=1) & long | in_target & fill
    in_both = in_source & in_target
    straight = in_both.any(axis=1) | ~long.any(axis=1)
    transposed = ~straight & in_source.any(axis=1) & in_target.any(axis=1)
    column = np.where(straight & long.any(axis=1), in_both.argmax(axis=1), pad)
    column = np.where(transposed, in_source.argmax(axis=1), column)
    # Rows: the innermost other axis that fills a tile, else the longest, which gives the fewest tiles.
    kind = np.where(straight, 0, np.where(transposed, 2, 1))
    full = np.where(kind == 1, 1024, 64)
    length = np.minimum(boxes.extent, full[:, None])
    length[box, column] = 0
    row = np.where(transposed, in_target.argmax(axis=1), length.argmax(axis=1))
    key = np.tile(np.arange(axes), (n, 1))
    key[box, row], key[box, column] = -1, -2
    return kind, permute(boxes, np.argsort(key, axis=1, kind="stable"))
