"""Reduces the output of a step inside a node in the order in which the next step sends it to other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

from ...kernels import Where
from ...planner import Row
from .copies import Move, is_plain, place
from .step_hierarchical import HierarchicalStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep

Box = tuple[tuple[int, int], ...]
"""Start and stop along each tensor dim."""
_MOST_PIECES = 64  # binding takes time that grows with their square


def can_reduce_ahead(first: object, second: object) -> TypeGuard[PutStep]:
    """Whether `reduce_ahead` applies: `first` reduces, and `second` sends that in several pieces."""
    if type(first) is not PutStep or not first.step.reduce or not first.peers:
        return False
    if not isinstance(second, SendRecvStep | HierarchicalStep):
        return False
    messages = second.remote if isinstance(second, HierarchicalStep) else second
    is_cut = messages.in_pieces and 1 < len(messages.sends) <= _MOST_PIECES
    return is_cut and not messages.keep_scattered and is_plain(first.boxes) and is_plain(second.boxes)


def reduce_ahead(first: PutStep, second: SendRecvStep | HierarchicalStep) -> None:
    """Leave the reduction of `first` to `second`, which reduces what a piece needs before it sends the piece, and the
    rest while the pieces are on the wire."""
    messages = second.remote if isinstance(second, HierarchicalStep) else second
    first.leaves_reduction = True
    rows = list(zip(first.incoming, first.reduction_moves(first.staged()), strict=True))
    done: list[Box] = []
    for sent in messages.sent_rows:
        wanted = [tuple(zip(row.source_start, _stops(row), strict=True)) for row in sent]
        messages.reductions.append(first.reducing(_moves(rows, wanted, done)))
        done += wanted
    whole = [_target_box(row) for row, _ in rows]
    messages.reductions.append(first.reducing(_moves(rows, whole, done)))


def _moves(rows: Sequence[tuple[Row, Move]], wanted: Sequence[Box], done: Sequence[Box]) -> list[Move]:
    """The parts of the reductions of rows that are in one of the boxes `wanted` and in none of `done`."""
    moves, done = [], list(done)
    for box in wanted:
        for row, move in rows:
            common = _common(_target_box(row), box)
            for part in () if common is None else _without(common, done):
                moves.append(_part(move, part, row.target_start))
        done.append(box)
    return moves


def _stops(row: Row) -> list[int]:
    return [a + n for a, n in zip(row.source_start, row.extent, strict=True)]


def _target_box(row: Row) -> Box:
    return tuple((a, a + n) for a, n in zip(row.target_start, row.extent, strict=True))


def _common(a: Box, b: Box) -> Box | None:
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _without(box: Box, others: Sequence[Box]) -> Iterator[Box]:
    """Boxes that cover `box` except for what is in one of `others`."""
    for i, other in enumerate(others):
        common = _common(box, other)
        if common is None:
            continue
        for d, (start, stop) in enumerate(common):
            for outside in ((box[d][0], start), (stop, box[d][1])):
                if outside[0] < outside[1]:
                    yield from _without((*box[:d], outside, *box[d + 1 :]), others[i + 1 :])
            box = (*box[:d], (start, stop), *box[d + 1 :])
        return
    yield box


def _part(move: Move, box: Box, target_start: Sequence[int]) -> Move:
    extent = [stop - start for start, stop in box]
    start = [a - b for (a, _), b in zip(box, target_start, strict=True)]

    def part(where: Where) -> Where:
        return place(extent, start, where[1], where[2])

    (target, where), sources = move
    return Move((target, part(where)), [(source, part(at)) for source, at in sources])
