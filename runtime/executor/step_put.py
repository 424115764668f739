"""A step on a transport whose ranks write into each other's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...planner import FILL, Exchange, Row
from ..transports.base import Address, Barrier, HierarchicalExchange, Transfer
from ..transports.receive_buffers import LARGEST_KEPT
from ..transports.shared_allocator import block_size
from .copies import Copies, Move, contiguous_strides
from .step import BoundStep, Run, Terms


class PutStep(BoundStep):
    """Ranks push into each other's buffers and meet: the outputs themselves, or slabs of contributions.

    Where contributions are reduced, a rank's buffer is [slabs, *output shape], as many as contributions of peers to one
    value: where a box goes follows from the senders of its row and its place in the output, so senders need nothing
    that the plan does not say. What is one contribution alone, or the one that a rank's own is added to, lands in the
    output itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        step, reduce = self.step, self.step.reduce
        # Of more terms than two the reduction would write over one before it is read.
        self.receives_in_output = step.staged_terms < 2 and bool(reduce is None or self.peers)
        slabs = 1 if self.receives_in_output else min(step.staged_terms, len(self.peers))
        self.receive_shape = self.shape if self.receives_in_output else (slabs, *self.shape)
        shapes = {p: self.shape if p == self.me else self.program.shape_after(step, p) for p in self.members}
        nbytes = {p: math.prod(shape) * slabs * self.dtype.itemsize for p, shape in shapes.items()}
        self.own_nbytes, largest = nbytes[self.me], max(nbytes.values())
        self.largest, self.block = largest, block_size(self.own_nbytes)
        written = self._written(shapes)
        self.pushes: list[tuple[int, int, Copies]] = []
        for index, peer in enumerate(self.peers):
            if not written[peer].empty:
                self.pushes.append((index, nbytes[peer], written[peer]))
        # Between meshes each rank has peers of its own, so what is kept would not be alike on both sides.
        alike = isinstance(step, Exchange) and step.group is not None
        self.receive_buffers = None
        if alike and self.peers and largest <= LARGEST_KEPT:
            self.receive_buffers = self.transport.receive_buffers(
                tuple(sorted((self.program.mesh.rank_at(self.me), *self.peer_ranks)))
            )
        self.has_run = False
        self.own: Copies | None = None
        if reduce:
            self.bind_reduction()
        else:
            self.own = written[self.me]

    def _written(self, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Copies]:
        """What this rank writes into the buffer of each member, by position: of its own, what it keeps and what is
        filled, unless values are reduced. `shapes`: of what members end with."""
        me, reduce, ndim = self.me, self.step.reduce, len(self.program.shape)
        strides = {p: contiguous_strides(shape)[:ndim] for p, shape in shapes.items()}
        moves: dict[int, list[Move]] = {p: [] for p in shapes}
        for row in self.rows:
            receiver, senders = row.receiver, row.senders
            fills = receiver == me and not reduce and senders[0] == FILL
            if receiver not in shapes or not (fills or me in senders) or (receiver == me and reduce):
                continue
            base = self.slabs_of(row)[senders.index(me)] * math.prod(shapes[receiver]) if reduce else 0
            there = 0, self.target(row, strides[receiver], base)
            moves[receiver].append(Move(there, [] if fills else [(0, self.source(row))]))
        return {p: Copies(parts, self.step.fill, self.dtype, self.device) for p, parts in moves.items()}

    def bind_reduction(self) -> None:
        self.reduce = self.reduction(self.staged())

    def staged(self) -> Terms:
        """Where contributions that are pushed lie, in the slabs (source 1)."""
        found: Terms = {}
        elements = math.prod(self.shape)
        for number, row in enumerate(self.incoming):
            for i, slab in self.slabs_of(row).items():
                found[number, i] = 1, self.target(row, base=slab * elements)
        return found

    def slabs_of(self, row: Row) -> dict[int, int]:
        """Which slab of the receiver of a row each contribution to it goes to that is pushed, by its number."""
        pushed = [i for i, p in enumerate(row.senders) if p in self.members and p != row.receiver]
        return {i: slab for slab, i in enumerate(pushed)}

    def new_receive_buffer(self) -> torch.Tensor:
        """A buffer for what peers push."""
        return self.transport.empty(self.receive_shape, self.dtype, self.device)

    def push(self, x: torch.Tensor, copies: Copies, address: Address, nbytes: int) -> None:
        """Copy boxes of `x` into the buffer at an address, this rank's own included."""
        key = address if self.transport.recycles else None
        copies([x], () if copies.knows(key) else [self.transport.open(address, nbytes).view(self.dtype)], key)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        if self.peers:
            receive_buffer, out = yield from self.exchange(x, fingerprint)
            return self.finish(x, receive_buffer, out)
        if self.own:
            receive_buffer = self.new_receive_buffer()
            self.push(x, self.own, self.transport.address(receive_buffer), self.own_nbytes)
        else:
            receive_buffer = x  # nothing comes from anyone else
        return self.finish(x, receive_buffer, self.output(receive_buffer))

    def output(self, receive_buffer: torch.Tensor) -> torch.Tensor:
        """What the step ends with: the buffer that everything lands in, or another."""
        return receive_buffer if self.own or self.receives_in_output else self.empty()

    def finish(
        self, x: torch.Tensor, receive_buffer: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output, when everything has landed. `received`: what came otherwise."""
        if not self.own:
            self.reduce([x, receive_buffer], [out])
        return out

    def exchange(
        self, x: torch.Tensor, fingerprint: int, messages: Callable[[torch.Tensor], Transfer] | None = None
    ) -> Run:
        """Push to peers and be pushed to, while what `messages` makes for an output goes to others."""
        transport, receive_buffers = self.transport, self.receive_buffers
        kept = receive_buffers.take(fingerprint) if receive_buffers else None
        if kept is None:
            receive_buffer = self.new_receive_buffer()
            address = transport.address(receive_buffer)
            addresses = yield Barrier(self.peer_ranks, fingerprint, address)
        else:
            receive_buffer, address, addresses = kept[:3]
        own = partial(self.push, x, self.own, address, self.own_nbytes) if self.own else None
        out = self.output(receive_buffer)
        given = out if self.last else None
        following = offer = None
        if receive_buffers and self.has_run and receive_buffers.have_room(0 if kept else self.block):
            following = self.new_receive_buffer()
            offer = transport.address(following)
        meet = Barrier(self.peer_ranks, fingerprint + 1, offer, own, given)
        if messages is None:
            self.push_all(x, addresses)
            addresses = yield meet
        else:
            addresses = yield HierarchicalExchange(messages(out), partial(self.push_all, x, addresses), meet, given)
        if receive_buffers:
            if following is not None and None not in addresses:
                receive_buffers.keep(
                    fingerprint, following, offer, addresses, self.block, self.largest, kept is not None
                )
            elif kept is not None:
                receive_buffers.let_go(self.block, self.largest)
        self.has_run = True
        return receive_buffer, out

    def push_all(self, x: torch.Tensor, addresses: Sequence[Address]) -> None:
        for index, nbytes, copies in self.pushes:
            self.push(x, copies, addresses[index], nbytes)
