"""Pushes of a step inside a node in two parts: first what the receivers send to other nodes first, then the rest.

A receiver starts to send when it has the first part; the second is pushed and reduced while that is on the wire. Ranks
of a node synchronise after each part, so all of them have to agree on it: what is computed here depends on what they
all know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

from ...planner import ITEMSIZE, Exchange, Program, Step
from ..transports.base import Capabilities
from . import pieces
from .boxes import Box, box_at_source, common_box, without
from .step_sendrecv import SendRecvStep

_PIECES = 2
"""Pieces of messages that a rank gets first: long enough on the wire to push and to reduce the rest meanwhile."""
_MOST_PEERS = 64  # binding takes time for each of them


def pushed_first(
    program: Program, index: int, position: int, transport: Capabilities
) -> Mapping[int, Sequence[Box]] | None:
    """What peers push first into the output of each member of a step inside a node, as boxes in its shard; all other
    boxes come later. None: everything is pushed at once. The same on all members.

    Args:
        index: of the step.
        position: of this rank in the mesh.
    """
    step, *rest = program.steps[index:]
    following = rest[0] if rest else None
    if transport.one_sided or not isinstance(step, Exchange) or step.group is None or step.reduce is None:
        return None
    if not isinstance(following, Exchange) or following.group is None:
        return None
    if any(layout.strided_dims for layout in (step.target, following.target)):
        return None
    members, piece = program.members(step, position), pieces.PIECE_BYTES // ITEMSIZE[program.dtype]
    if max(math.prod(program.shape_after(step, member)) for member in members) <= 2 * _PIECES * piece:
        return None
    if len(program.members(following, position)) > _MOST_PEERS:
        return None
    first = {member: _sent_first(program, step, following, member, transport, piece) for member in members}
    return first if any(first.values()) else None


def sends_of(second: SendRecvStep, first: Sequence[Box]) -> int:
    """The number of sends, from the first one on, that need only what is in the boxes `first` of the input."""
    for number, rows in enumerate(second.sent_rows):
        for row in rows:
            if list(without(box_at_source(row), first)):
                return number
    return len(second.sent_rows)


def _sent_first(
    program: Program, step: Step, following: Step, position: int, transport: Capabilities, piece: int
) -> list[Box]:
    """The beginnings of what a rank may send to other nodes in `following`, `_PIECES` of `piece` elements together, as
    boxes in its shard after `step`."""
    node = transport.node_of(program.mesh.rank_at(position))
    held: list[tuple[Box, tuple[int, ...]]] = program.boxes_after(step, position)
    group = program.members(following, position)
    start, sent = group.index(position), []
    for peer in group[start:] + group[:start]:  # as `BoundStep.peers`
        if transport.node_of(program.mesh.rank_at(peer)) != node:
            for (box, at), (wanted, _) in product(held, program.boxes_after(following, peer)):
                common = common_box(box, wanted)
                if common is not None:
                    ends = zip(common, box, at, strict=True)
                    sent.append(tuple((a - low + first, b - low + first) for (a, b), (low, _), first in ends))
    sent = list(dict.fromkeys(sent))
    return [_beginning(box, -(-_PIECES // len(sent)) * piece) for box in sent[:_PIECES]]


def _beginning(box: Box, room: int) -> Box:
    """The part of a box that comes first along its first axis with more than one index, of up to `room` elements or of
    one index."""
    elements = math.prod(stop - start for start, stop in box)
    if elements <= room:
        return box
    for d, (start, stop) in enumerate(box):
        if stop - start > 1:
            number = max(1, room * (stop - start) // elements)
            return (*box[:d], (start, start + number), *box[d + 1 :])
    return box
