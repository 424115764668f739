"""The unit of all data movement: strided N-D boxes between flat buffers."""

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
        """Make one or more boxes from their `target_rows` and `source_rows`."""
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
