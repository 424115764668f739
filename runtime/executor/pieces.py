"""Messages cut into pieces, so that data is packed, on the wire and unpacked at the same time.

Sender and receiver of a message cut it alike: by the boxes in it, which both know. The bytes of a message and their
order do not depend on the cuts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from ...kernels import Where
from ...planner import Row
from ..transports.rendezvous.peer_reports import settings
from .copies import Move

K = TypeVar("K")

PIECE_BYTES = 1 << 19
"""Bytes of a piece: several milliseconds at 1 Gbit/s, and long enough that its start costs little at 10."""
settings["bytes of a piece of a message"] = lambda: str(PIECE_BYTES)


class Cut(NamedTuple):
    """A part of a box along its first axis with more than one index."""

    axis: int
    start: int
    stop: int


def is_worth_cutting(nbytes: int) -> bool:
    """Whether messages of so many bytes together are handled in pieces. Messages of fewer are not cut in any case."""
    return nbytes > PIECE_BYTES


def cuts_of(extent: Sequence[int], itemsize: int) -> list[Cut | None]:
    """The parts of a box of at most `PIECE_BYTES` or of one index each; [None] if it is not cut. Packed one after the
    other they are the packed box."""
    elements = math.prod(extent)
    if elements <= 1 or elements * itemsize <= PIECE_BYTES:
        return [None]
    axis = next(i for i, n in enumerate(extent) if n > 1)
    number = max(1, PIECE_BYTES * extent[axis] // (elements * itemsize))
    return [Cut(axis, i, min(i + number, extent[axis])) for i in range(0, extent[axis], number)]


def pieces_of(rows: Iterable[tuple[K, Row]], itemsize: int) -> list[list[tuple[K, Row, Cut | None]]]:
    """The boxes of a message, by pieces of up to `PIECE_BYTES`. Each row has a key, and is a part if it is cut."""
    pieces: list[list[tuple[K, Row, Cut | None]]] = []
    room = 0
    for key, row in rows:
        for cut in cuts_of(row.extent, itemsize):
            part = part_of_row(row, cut)
            nbytes = math.prod(part.extent) * itemsize
            if nbytes > room or not pieces:
                pieces.append([])
                room = PIECE_BYTES
            pieces[-1].append((key, part, cut))
            room -= nbytes
    return pieces


def part_of_row(row: Row, cut: Cut | None) -> Row:
    """A part of a row whose axes are the tensor dims, with step 1."""
    if cut is None:
        return row
    axis, start, stop = cut
    source, target, extent = list(row.source_start), list(row.target_start), list(row.extent)
    source[axis] += start
    target[axis] += start
    extent[axis] = stop - start
    return row._replace(source_start=source, target_start=target, extent=extent)


def part_of_move(move: Move, cut: Cut | None) -> Move:
    """A part of the copy or of the reduction of a box."""
    if cut is None:
        return move
    (target, where), sources = move
    return Move((target, _part(where, cut)), [(source, _part(at, cut)) for source, at in sources])


def _part(where: Where, cut: Cut) -> Where:
    extent, strides, offset = where
    axis, start, stop = cut
    return (*extent[:axis], stop - start, *extent[axis + 1 :]), strides, offset + start * strides[axis]
