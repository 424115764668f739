"""A step on a transport whose ranks write into each other's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...planner import FILL, Exchange, Row
from ..transports.base import OneSidedTransport
from ..transports.comm_requests import Address, Barrier
from ..transports.shared_memory.allocator import block_size
from ..transports.shared_memory.receive_buffers import LARGEST_KEPT
from .copies import Copies, Move, contiguous_strides
from .run import Run
from .step import BoundStep, Terms


class Opened(NamedTuple):
    """The receive buffers of one run of a `PutStep`.

    Attributes:
        receive_buffer, address: of this rank.
        addresses: of the peers' buffers.
        kept: whether the buffers were kept from an earlier run.
        out: the output.
    """

    receive_buffer: torch.Tensor
    address: Address
    addresses: Sequence[Address]
    kept: bool
    out: torch.Tensor


class PutStep(BoundStep):
    """Ranks write into each other's receive buffers between two barriers: the buffers may be written, and have been
    written. The first is left out where peers have kept the buffers of an earlier run.

    A receive buffer is the output itself or, where contributions are reduced, a staging buffer of shape
    [staging slots, *output shape], with one slot for each contribution of a peer to the same element. The place of a
    box follows from the senders of its row and from its place in the output, so senders need nothing beyond the plan.
    A single contribution, or one that only this rank's own is added to, is written into the output itself.
    """

    transport: OneSidedTransport

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        step, reduce = self.step, self.step.reduce
        # With more than two terms the reduction would overwrite one of them before it is read.
        self.receives_in_output = step.staged_terms < 2 and bool(reduce is None or self.peers)
        slots = 1 if self.receives_in_output else min(step.staged_terms, len(self.peers))
        self.receive_shape = self.shape if self.receives_in_output else (slots, *self.shape)
        shapes = {p: self.shape if p == self.me else self.program.shape_after(step, p) for p in self.members}
        nbytes = {p: math.prod(shape) * slots * self.dtype.itemsize for p, shape in shapes.items()}
        self.own_nbytes, largest = nbytes[self.me], max(nbytes.values())
        self.largest, self.block = largest, block_size(self.own_nbytes)
        written = self._written(shapes)
        self.pushes = [(i, nbytes[p], written[p]) for i, p in enumerate(self.peers) if not written[p].empty]
        """For each peer that this rank writes to: index in `peers`, bytes of its receive buffer, copies."""
        # Buffers are kept only if all ranks have the same peers, so that they all keep theirs; not between meshes.
        same_peers = isinstance(step, Exchange) and step.group is not None
        self.receive_buffers = None
        if same_peers and self.peers and largest <= LARGEST_KEPT:
            self.receive_buffers = self.transport.receive_buffers(
                tuple(sorted((self.program.mesh.rank_at(self.me), *self.peer_ranks)))
            )
        self.has_run = False
        self.own: Copies | None = None
        if reduce:
            self.bind_reduction()
        else:
            self.own = written[self.me]

    def _written(self, shapes: dict[int, tuple[int, ...]]) -> dict[int, Copies]:
        """The copies that this rank writes into the receive buffer of each member, by position. Those into its own are
        the boxes that it keeps and fills, or none if the step reduces. `shapes`: of the members' outputs."""
        me, reduce, ndim = self.me, self.step.reduce, len(self.program.shape)
        strides = {p: contiguous_strides(shape)[:ndim] for p, shape in shapes.items()}
        moves: dict[int, list[Move]] = {p: [] for p in shapes}
        for row in self.rows:
            receiver, senders = row.receiver, row.senders
            fills = receiver == me and not reduce and senders[0] == FILL
            if receiver not in shapes or not (fills or me in senders) or (receiver == me and reduce):
                continue
            base = self.staging_slots(row)[senders.index(me)] * math.prod(shapes[receiver]) if reduce else 0
            target = 0, self.target(row, strides[receiver], base)
            moves[receiver].append(Move(target, [] if fills else [(0, self.source(row))]))
        return {p: self.copies(of_member) for p, of_member in moves.items()}

    def bind_reduction(self) -> None:
        self.reduce = self.reduction(self.staged())

    def staged(self) -> Terms:
        """Where peers write their contributions, in this rank's receive buffer (source 1)."""
        terms: Terms = {}
        elements = math.prod(self.shape)
        for index, row in enumerate(self.incoming):
            for i, slot in self.staging_slots(row).items():
                terms[index, i] = 1, self.target(row, base=slot * elements)
        return terms

    def staging_slots(self, row: Row) -> dict[int, int]:
        """The receiver's staging slot of each pushed contribution to a row, by index of the contributor."""
        pushed = [i for i, p in enumerate(row.senders) if p in self.members and p != row.receiver]
        return {i: slot for slot, i in enumerate(pushed)}

    def new_receive_buffer(self) -> torch.Tensor:
        return self.transport.empty(self.receive_shape, self.dtype, self.device)

    def push(self, x: torch.Tensor, copies: Copies, address: Address, nbytes: int) -> None:
        """Copy boxes of `x` into the receive buffer at an address, of a peer or of this rank."""
        key = address if self.transport.recycles else None
        copies([x], () if copies.knows(key) else [self.transport.open(address, nbytes).view(self.dtype)], key)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        if self.peers:
            opened = yield from self.open(fingerprint)
            yield from self.push_all(x, opened, fingerprint)
            return self.finish(x, opened.receive_buffer, opened.out)
        if self.own:
            receive_buffer = self.new_receive_buffer()
            self.push(x, self.own, self.transport.address(receive_buffer), self.own_nbytes)
        else:
            receive_buffer = x  # not read: there are no peers
        return self.finish(x, receive_buffer, self.output(receive_buffer))

    def output(self, receive_buffer: torch.Tensor) -> torch.Tensor:
        """The output: the receive buffer, if everything is received in place, or a new tensor."""
        return receive_buffer if self.own or self.receives_in_output else self.empty()

    def finish(
        self, x: torch.Tensor, receive_buffer: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Complete the output once peers have written. `received`: what messages brought."""
        if not self.own:
            self.reduce([x, receive_buffer], [out])
        return out

    def open(self, fingerprint: int) -> Run:
        """Wait until the receive buffers of the peers may be written. Returns `Opened`."""
        receive_buffers = self.receive_buffers
        kept = receive_buffers.take(fingerprint) if receive_buffers else None
        if kept is not None:
            receive_buffer, address, addresses = kept[:3]
            return Opened(receive_buffer, address, addresses, True, self.output(receive_buffer))
        receive_buffer = self.new_receive_buffer()
        address, output = self.transport.address(receive_buffer), self.output(receive_buffer)
        addresses = yield Barrier(self.peer_ranks, fingerprint, address)
        return Opened(receive_buffer, address, addresses, False, output)

    def push_all(self, x: torch.Tensor, opened: Opened, fingerprint: int) -> Run:
        """Push to all peers, then copy what this rank keeps, and wait until the peers have pushed."""
        for index, nbytes, copies in self.pushes:
            self.push(x, copies, opened.addresses[index], nbytes)
        own = partial(self.push, x, self.own, opened.address, self.own_nbytes) if self.own else None
        yield from self._close(opened, fingerprint, own)

    def _close(self, opened: Opened, fingerprint: int, during_wait: Callable[[], None] | None) -> Run:
        """Wait until the peers have pushed."""
        receive_buffers, block = self.receive_buffers, self.block
        next_buffer = next_address = None
        if receive_buffers and self.has_run and receive_buffers.have_room(0 if opened.kept else block):
            next_buffer = self.new_receive_buffer()
            next_address = self.transport.address(next_buffer)
        output = opened.out if self.last else None
        addresses = yield Barrier(self.peer_ranks, fingerprint + 1, next_address, during_wait, output)
        if receive_buffers:
            if next_buffer is not None and None not in addresses:
                receive_buffers.keep(
                    fingerprint, next_buffer, next_address, addresses, block, self.largest, opened.kept
                )
            elif opened.kept:
                receive_buffers.let_go(block, self.largest)
        self.has_run = True
