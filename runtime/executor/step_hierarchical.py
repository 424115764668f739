"""A step whose ranks write into each other's memory inside a node, and send and receive across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...planner import Program, Row, Step
from ..transports.base import Transport
from ..transports.comm_requests import AwaitTransfer, StartTransfer, Transfer
from .choose_algorithm import Algorithm, window_members
from .copies import Copies, Move, Part, Reduction
from .run import Run
from .step import Terms
from .step_put import PutStep
from .step_sendrecv import SendRecvStep, SharedBuffers
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

    def transfer(self, x: torch.Tensor, received: torch.Tensor, fingerprint: int, out: torch.Tensor) -> Transfer:
        return cast("Transfer", self.messages(x, out, received, fingerprint))


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
    """

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

    def bind_reduction(self) -> None:
        moves = self.reduction_moves({**self.remote.staged_in(_RECEIVED), **self.staged()})
        self.remote.bind_arrivals(dict(enumerate(moves)), self.reducing)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        opened = yield from self.open(fingerprint)
        received = self.transport.empty((self.remote.receive_elements,), self.dtype, self.device)
        started = yield StartTransfer(self.remote.transfer(x, received, fingerprint, opened.out))
        yield from self.push_all(x, opened, fingerprint)
        self.remote.last = self.last
        return (yield from self.remote.arrive(started, [x, opened.receive_buffer, received], opened.out))

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
