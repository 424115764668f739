"""Reduces the output of a step inside a node in the order in which the next step sends it to other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from ...planner import Row
from .boxes import Box, box_at_source, box_at_target, common_box, without
from .copies import Move, is_plain, part_in
from .push_ahead import sends_of
from .step_hierarchical import HierarchicalStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep

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
    if first.first_boxes is not None:
        messages.sends_first = sends_of(messages, first.first_boxes[first.me])
    rows = list(zip(first.incoming, first.reduction_moves(first.staged()), strict=True))
    done: list[Box] = []
    for sent in messages.sent_rows:
        wanted = [box_at_source(row) for row in sent]
        messages.reductions.append(first.reducing(_moves(rows, wanted, done)))
        done += wanted
    whole = [box_at_target(row) for row, _ in rows]
    messages.reductions.append(first.reducing(_moves(rows, whole, done)))


def _moves(rows: Sequence[tuple[Row, Move]], wanted: Sequence[Box], done: Sequence[Box]) -> list[Move]:
    """The parts of the reductions of rows that are in one of the boxes `wanted` and in none of `done`."""
    moves, done = [], list(done)
    for box in wanted:
        for row, move in rows:
            common = common_box(box_at_target(row), box)
            for part in () if common is None else without(common, done):
                moves.append(part_in(move, row, part))
        done.append(box)
    return moves
