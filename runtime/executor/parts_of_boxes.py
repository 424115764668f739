"""Boxes of a shard: what two have in common, what is left of one without others, and the part of a copy in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...kernels import Where
from ...planner import Row
from .copies import Move, place

Box = tuple[tuple[int, int], ...]
"""Start and stop along each tensor dim."""


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


def part_in(move: Move, row: Row, box: Box) -> Move:
    """The part in `box` of a copy or reduction of a row; `box` is in the row's box at its target."""
    extent = [stop - start for start, stop in box]
    start = [a - b for (a, _), b in zip(box, row.target_start, strict=True)]

    def part(where: Where) -> Where:
        return place(extent, start, where[1], where[2])

    (target, where), sources = move
    return Move((target, part(where)), [(source, part(at)) for source, at in sources])
