"""A step whose ranks write into each other's memory inside a node, and send and receive across nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ...planner import Exchange, Program, Row, Step
from ..transports.base import Transport
from ..transports.comm_requests import AwaitTransfer, Barrier, StartTransfer, Transfer
from .choose_algorithm import Algorithm, window_members
from .copies import Copies, Move, Part, Reduction
from .pieces import is_worth_cutting
from .run import Run
from .step import Terms
from .step_put import PutStep, Unreduced
from .step_sendrecv import Arriving, SendRecvStep, SharedBuffers, start_in_two
from .step_window import WindowStep

_RECEIVED = 2  # index of the receive buffer of messages, after the input and the buffer that peers of the node write


class _RemoteMessages(SendRecvStep):
    """The messages of a step with other nodes: packed and sent; received in the output or in a buffer."""

    def bind_finish(self, unpack: list[tuple[Row, Part]]) -> None:
        self.unpack = [] if self.step.reduce else unpack

    def unpacked_from(self, source: int) -> list[Move]:
        """Copies into the output from a receive buffer with the index `source`."""
        return [Move((0, self.target(row)), [(source, where)]) for row, (_, where) in self.unpack]

    def staged_in(self, source: int) -> Terms:
        """`staged`, with the index `source` for the receive buffer."""
        return {key: (source, where) for key, (_, where) in self.staged.items()}

    def transfer(
        self,
        x: torch.Tensor,
        received: torch.Tensor,
        fingerprint: int,
        out: torch.Tensor,
        unreduced: Unreduced | None = None,
    ) -> Transfer:
        return cast("Transfer", self.messages([x], out, received, fingerprint, unreduced))


def _split_by_node(
    program: Program, step: Step, me: int, members: Sequence[int], transport: Transport
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The members on other nodes and those on this rank's node; both include this rank."""
    node = {p: transport.node_of(program.mesh.rank_at(p)) for p in members}
    remote = tuple(p for p in members if p == me or node[p] != node[me])
    return remote, tuple(p for p in members if node[p] == node[me])


class HierarchicalStep(PutStep):
    """A `PutStep` among the ranks of a node, with messages (`remote`) to and from other nodes at the same time.

    How two ranks exchange depends on their nodes only, so both know. Messages are received in the output if possible,
    and otherwise unpacked. A reduction reads its terms from the staging buffer and from the receive buffer of the
    messages, in the order of contributors as everywhere.

    Attributes:
        is_forwarded: `run` returns `Arriving`, for a `ForwardStep`.
        receives_first: large messages are sent once all ranks of the node have started to receive. What a receive
            announces to its sender would wait behind the data that other ranks of the node send.
    """

    is_forwarded = False

    def __init__(
        self,
        program: Program,
        step: Step,
        me: int,
        *args: Any,
        algorithm: Algorithm,
        shared: SharedBuffers | None = None,
    ) -> None:
        remote, local = _split_by_node(program, step, me, program.members(step, me), args[1])
        self.remote = _RemoteMessages(program, step, me, *args, algorithm=algorithm, shared=shared, members=remote)
        super().__init__(program, step, me, *args, members=local)
        if not step.reduce:
            staged = self.remote.staged_in(_RECEIVED).items()
            self.remote.bind_arrivals(
                {i: Move((0, self.target(self.incoming[i])), [place]) for (i, _), place in staged}, self.copies
            )
        self.launches += self.remote.launches
        # The same on all members of the node, which meet once more. Not between meshes, where they differ.
        in_a_group = isinstance(step, Exchange) and step.group is not None
        self.receives_first = in_a_group and bool(self.peers) and is_worth_cutting(self.largest)

    def bind_reduction(self) -> None:
        moves = self.reduction_moves({**self.remote.staged_in(_RECEIVED), **self.staged()})
        self.remote.bind_arrivals(dict(enumerate(moves)), self.reducing)

    def run(self, x: torch.Tensor | Unreduced, fingerprint: int) -> Run:
        arriving = yield from self.start(x, fingerprint)
        return arriving if self.is_forwarded else (yield from self.arrive(arriving))

    def start(self, x: torch.Tensor | Unreduced, fingerprint: int) -> Run:
        """As `SendRecvStep.start`; the ranks of the node have exchanged afterwards."""
        unreduced = x if isinstance(x, Unreduced) else None
        x = x.out if isinstance(x, Unreduced) else x
        opened = self.buffers(fingerprint)
        received = self.transport.empty((self.remote.receive_elements,), self.dtype, self.device)
        transfer = self.remote.transfer(x, received, fingerprint, opened.out, unreduced)
        if unreduced is None or unreduced.later is None:
            opened = yield from self.exchange_addresses(opened, fingerprint)
            started, more = yield from self._start(transfer, fingerprint)
        else:
            started, more = yield from start_in_two(transfer, self.remote.sends_first, unreduced.later)
            opened = yield from self.exchange_addresses(opened, fingerprint)
        if unreduced:
            self.remote.reductions[-1](unreduced.buffers, [x])
        self.push_all(x, opened.addresses)
        own = partial(self.push, x, self.own, opened.address, self.own_nbytes) if self.own else None
        yield from self.close(opened, fingerprint, own)
        buffers = [x, opened.receive_buffer, received]
        if self.remote.in_pieces:
            self.remote.finish(buffers, [opened.out])
        return Arriving(started, buffers, opened.out, more)

    def _start(self, transfer: Transfer, fingerprint: int) -> Run:
        """Start the messages. Returns one transfer, or those of the receives and of the sends."""
        if not self.receives_first:
            return (yield StartTransfer(transfer)), None
        receives = yield StartTransfer(transfer.receives_only())
        yield Barrier(self.peer_ranks, fingerprint, None)
        return receives, (yield StartTransfer(transfer.sends_only()))

    def arrive(self, arriving: Arriving, then: Callable[[int], None] | None = None) -> Run:
        """As `SendRecvStep.arrive`."""
        self.remote.last = self.last
        return (yield from self.remote.arrive(arriving, then))

    def finish(
        self, x: torch.Tensor, receive_buffer: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert received is not None
        self.remote.finish([x, receive_buffer, received], [out])
        return out


class HierarchicalWindowStep(WindowStep):
    """A `WindowStep` that pushes among the ranks of a node, with messages (`remote`) to and from other nodes at the
    same time.

    The host waits for no device: on GPUs it is the stream that waits for the messages.
    """

    remote: _RemoteMessages

    def __init__(self, program: Program, step: Step, me: int, *args: Any, algorithm: Algorithm) -> None:
        remote, _ = _split_by_node(program, step, me, program.members(step, me), args[1])
        _, local = _split_by_node(program, step, me, window_members(program, step, me), args[1])
        self.remote = _RemoteMessages(program, step, me, *args, algorithm=algorithm, members=remote)
        super().__init__(program, step, me, *args, algorithm=algorithm, members=local)
        self.launches += self.remote.launches

    def _unpacking(self) -> Copies | Reduction:
        """Copies or reduction from the input, the own window and the receive buffer (sources 0 to 2)."""
        if self.step.reduce:
            return self.reduction({**self.remote.staged_in(_RECEIVED), **self.staged()}, self.reading)
        return self.output_copies([*self.pushed(), *self.remote.unpacked_from(_RECEIVED)])

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        out, remote, window = self.empty(), self.remote, self.window
        received = self.transport.empty((remote.receive_elements,), self.dtype, self.device)
        started = yield StartTransfer(remote.transfer(x, received, fingerprint, out))
        turn = self.transport.turn(fingerprint, out=out)
        if window is not None:
            self.fill_windows(x, turn)
        yield AwaitTransfer(started, output=out if self.last else None)
        if window is None:
            self.finish([x, received, received], [out])
            return out
        self.read_windows(x, out, turn, received)
        self.transport.check()
        return out
