"""A redistribution as one all-to-all of packed messages, as COSTA does it over MPI and as one would write it by hand.

Each rank packs the intersections of its box with a peer's target box into one message of exactly that size. The
messages are computed once, and both buffers are kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

Box = Sequence[slice]  # a part of a tensor, dim by dim


class PackedAllToAll:
    """Redistribute from one box of each rank to another one; without partial sums.

    Args:
        before, after: the boxes of the ranks of the default group, in rank order. Replicas take turns as senders, and a
            rank that holds a piece itself receives it from nobody.
    """

    def __init__(self, before: Sequence[Box], after: Sequence[Box], dtype: torch.dtype) -> None:
        me, ranks = dist.get_rank(), range(len(before))
        pieces = [_pieces(before, after[receiver], receiver) for receiver in ranks]
        own = pieces[me][me]
        for rank in ranks:
            pieces[rank][rank] = []
        to_send, to_receive = [pieces[receiver][me] for receiver in ranks], pieces[me]
        self._send_sizes, self._receive_sizes = (list(map(_elements, of)) for of in (to_send, to_receive))
        self._sent, self._received = (torch.empty(sum(n), dtype=dtype) for n in (self._send_sizes, self._receive_sizes))
        self._pack = _places(self._sent, before[me], to_send)
        self._unpack = _places(self._received, after[me], to_receive)
        self._own = [(_within(box, before[me]), _within(box, after[me])) for box in own]
        self._shape = _extent(after[me])
        self._anything_moves = any(_elements(boxes) for of in pieces for boxes in of)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as a new tensor; a collective."""
        out = x.new_empty(self._shape)
        for place, at in self._pack:
            place.copy_(x[at])
        if self._anything_moves:
            dist.all_to_all_single(self._received, self._sent, self._receive_sizes, self._send_sizes)
        for source, target in self._own:
            out[target].copy_(x[source])
        for place, at in self._unpack:
            out[at].copy_(place)
        return out


def _pieces(before: Sequence[Box], wanted: Box, receiver: int) -> list[list[Box]]:
    """The boxes that each rank sends to a receiver. Any two ranks hold equal or disjoint boxes."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, box in enumerate(before):
        holders.setdefault(tuple((part.start, part.stop) for part in box), []).append(rank)
    pieces: list[list[Box]] = [[] for _ in before]
    for bounds, ranks in holders.items():
        common = [slice(max(a, p.start), min(b, p.stop)) for (a, b), p in zip(bounds, wanted, strict=True)]
        if all(part.start < part.stop for part in common):
            pieces[receiver if receiver in ranks else ranks[receiver % len(ranks)]].append(common)
    return pieces


def _extent(box: Box) -> list[int]:
    return [part.stop - part.start for part in box]


def _elements(boxes: Iterable[Box]) -> int:
    return sum(math.prod(_extent(box)) for box in boxes)


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(p.start - q.start, p.stop - q.start) for p, q in zip(box, whole, strict=True))


def _places(
    buffer: torch.Tensor, held: Box, by_rank: Iterable[Iterable[Box]]
) -> list[tuple[torch.Tensor, tuple[slice, ...]]]:
    """Each box's part of a buffer, in which boxes adjoin, and its place in the box that this rank holds."""
    boxes = [box for boxes in by_rank for box in boxes]
    parts = buffer.split([math.prod(_extent(box)) for box in boxes]) if boxes else ()
    return [(part.view(_extent(box)), _within(box, held)) for part, box in zip(parts, boxes, strict=True)]
