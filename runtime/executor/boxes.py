"""Boxes of a shard: what two have in common, what is left of one without others, the part of a row in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...planner import Row

Box = tuple[tuple[int, int], ...]
"""Start and stop along each tensor dim."""


def extent_of(box: Box) -> list[int]:
    """The size of a box along each tensor dim."""
    return [stop - start for start, stop in box]


def box_at_target(row: Row) -> Box:
    """The box of a row in its receiver's output."""
    return tuple((a, a + n) for a, n in zip(row.target_start, row.extent, strict=True))


def box_at_source(row: Row) -> Box:
    """The box of a row in its sender's input."""
    return tuple((a, a + n) for a, n in zip(row.source_start, row.extent, strict=True))


def common_box(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None: nothing."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def without(box: Box, others: Sequence[Box]) -> Iterator[Box]:
    """Boxes that cover `box` except for what is in one of `others`."""
    for i, other in enumerate(others):
        common = common_box(box, other)
        if common is None:
            continue
        for d, (start, stop) in enumerate(common):
            for outside in ((box[d][0], start), (stop, box[d][1])):
                if outside[0] < outside[1]:
                    yield from without((*box[:d], outside, *box[d + 1 :]), others[i + 1 :])
            box = (*box[:d], (start, stop), *box[d + 1 :])
        return
    yield box


def row_at(row: Row, box: Box) -> Row:
    """The part of a plain row (`is_plain`) whose source is `box`, which is in the row's box at its source."""
    start = [a for a, _ in box]
    target = [t + a - s for t, a, s in zip(row.target_start, start, row.source_start, strict=True)]
    return row._replace(source_start=start, target_start=target, extent=extent_of(box))
