"""Merge the axes of boxes as far as strides allow, and classify boxes by access pattern."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .boxes import StridedBoxes, permute, take


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
