"""A step inside a node that passes on what the step before it receives from other nodes, as it arrives."""

from __future__ import annotations

import math
from functools import partial
from typing import TypeGuard

import torch

from ...planner import FILL
from ..transports.comm_requests import Address
from .boxes import box_at_source, box_at_target, common_box, row_at
from .copies import Copies, Move, contiguous_strides, is_plain
from .pieces import part_of_row
from .run import Run
from .step_hierarchical import HierarchicalStep
from .step_put import Opened, PutStep
from .step_sendrecv import Arriving, SendRecvStep

FirstStep = SendRecvStep | HierarchicalStep


def can_forward(first: object, second: object) -> TypeGuard[FirstStep]:
    """Whether `ForwardStep` can carry out `second` after `first`: messages of `first` arrive in several pieces."""
    if not isinstance(first, FirstStep) or type(second) is not PutStep or second.step.reduce or not second.peers:
        return False
    messages = first.remote if isinstance(first, HierarchicalStep) else first
    return messages.in_pieces and len(messages.receives) > 1 and is_plain(first.boxes) and is_plain(second.boxes)


class ForwardStep:
    """Carries out `second`, a `PutStep`, in pieces: what ranks push is pushed as soon as `first` has received it.

    Ranks synchronise as if the two steps ran one after the other, so each rank decides by itself.
    """

    def __init__(self, first: FirstStep, second: PutStep) -> None:
        first.is_forwarded = True
        self.first, self.second, self.launches, self.last = first, second, second.launches, True
        self.shape = second.shape
        messages = first.remote if isinstance(first, HierarchicalStep) else first
        with_messages = {i for i, _ in messages.arrives_with}
        brought = [(-1, row) for i, row in enumerate(first.incoming) if i not in with_messages]
        brought += [(k, part_of_row(first.incoming[i], cut)) for (i, cut), k in messages.arrives_with.items()]
        boxes = [(k, box_at_target(row)) for k, row in brought]
        moves: dict[tuple[int, int], list[Move]] = {}  # by receive (-1: none) and receiver
        for row in second.rows:
            if row.receiver not in second.members or row.senders[0] not in (second.me, FILL):
                continue
            shape = second.program.shape_after(second.step, row.receiver)
            strides = contiguous_strides(shape)[: len(second.program.shape)]
            if row.senders[0] == FILL:
                if row.receiver == second.me:
                    moves.setdefault((-1, second.me), []).append(Move((0, second.target(row)), []))
                continue
            wanted = box_at_source(row)
            for k, box in boxes:
                common = common_box(wanted, box)
                if common is not None:
                    part = row_at(row, common)
                    move = Move((0, second.target(part, strides)), [(0, second.source(part))])
                    moves.setdefault((k, row.receiver), []).append(move)
        self._pushes: dict[int, list[tuple[int, Copies]]] = {}
        """For each receive, -1 for what no message brings: position of the receiver, copies."""
        for (k, receiver), of_receiver in moves.items():
            self._pushes.setdefault(k, []).append((receiver, second.copies(of_receiver)))
        self._places = {second.me: (-1, second.own_nbytes)}
        for index, peer in enumerate(second.peers):
            elements = math.prod(second.program.shape_after(second.step, peer))
            self._places[peer] = index, elements * second.dtype.itemsize

    def run(self, arriving: Arriving, fingerprint: int) -> Run:
        second = self.second
        second.last = self.last
        opened = yield from second.open(fingerprint)
        push = partial(self._push, arriving.out, opened)
        push(-1)
        yield from self.first.arrive(arriving, push)
        yield from second.close(opened, fingerprint)
        return opened.out

    def _push(self, x: torch.Tensor, opened: Opened, receive: int) -> None:
        """Push what a receive has brought."""
        for receiver, copies in self._pushes.get(receive, ()):
            index, nbytes = self._places[receiver]
            address: Address = opened.address if index < 0 else opened.addresses[index]
            self.second.push(x, copies, address, nbytes)
