"""A step whose ranks write into each other's memory inside a node, and send and receive across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...planner import Program, Row, Step
from ..transports.requests import Barrier, HierarchicalExchange, Transfer
from .copies import Copies, Move, Part
from .lower import Lowering, window_members
from .step import Run, Terms, Transport
from .step_put import PutStep
from .step_sendrecv import SendRecvStep, SharedBuffers
from .step_window import WindowStep

_RECEIVED = 2  # what is read: the input, what has landed, this


class _Messages(SendRecvStep):
    """What a step exchanges with other nodes: packed and sent, received where it belongs or beside it."""

    def bind_finish(self, unpack: list[tuple[Row, Part]]) -> None:
        self.unpack = [] if self.step.reduce else unpack

    def unpacked_from(self, source: int) -> list[Move]:
        """What is unpacked, from a buffer of that number."""
        return [Move((0, self.target(row)), [(source, where)]) for row, (_, where) in self.unpack]

    def staged_in(self, source: int) -> Terms:
        """`staged`, in a buffer of that number."""
        return {at: (source, where) for at, (_, where) in self.staged.items()}

    def begun(self, x: torch.Tensor, received: torch.Tensor, fingerprint: int, out: torch.Tensor) -> Transfer:
        asked = self.messages([x], out, received, fingerprint)
        assert isinstance(asked, Transfer)
        return asked


def _far_and_near(
    program: Program, step: Step, me: int, members: Sequence[int], transport: Transport
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of positions that meet those of other nodes and those of this rank's; itself in both."""
    node = {p: transport.node_of(program.mesh.rank_at(p)) for p in members}
    far = tuple(p for p in members if p == me or node[p] != node[me])
    return far, tuple(p for p in members if node[p] == node[me])


class HierarchicalStep(PutStep):
    """A one-sided step among the ranks of a node, with messages (`far`) to and from the others under way meanwhile.

    Each pair of ranks meets in one of the two ways, by their nodes alone, so both know which. What messages bring is
    received in the output where it can be, and otherwise unpacked; terms of a reduction are read from the slabs and
    from what was received, in the order of contributors as everywhere.
    """

    def __init__(
        self,
        program: Program,
        step: Step,
        me: int,
        *args: Any,
        lowering: Lowering,
        shared: SharedBuffers | None = None,
    ) -> None:
        far, near = _far_and_near(program, step, me, program.members(step, me), args[1])
        self.far = _Messages(program, step, me, *args, lowering=lowering, shared=shared, members=far)
        self.unpack = Copies(self.far.unpacked_from(1), step.fill, self.far.dtype, self.far.device)
        super().__init__(program, step, me, *args, members=near)

    def bind_reduction(self) -> None:
        self.reduce = self.reduction({**self.far.staged_in(_RECEIVED), **self.staged()})

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        received = torch.empty(self.far.received, dtype=self.dtype, device=self.device)
        receive_buffer, out = yield from self.exchange(
            x, fingerprint, partial(self.far.begun, x, received, fingerprint)
        )
        return self.finish(x, receive_buffer, out, received)

    def finish(
        self, x: torch.Tensor, receive_buffer: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert received is not None
        if self.own:
            self.unpack([x, received], [out])
        else:
            self.reduce([x, receive_buffer, received], [out])
        return out


class HierarchicalWindowStep(WindowStep):
    """Pushes into windows among the ranks of a node, with messages (`far`) to and from the others under way meanwhile.

    The host waits for no device: on one, what messages bring is waited for by the stream.
    """

    far: _Messages

    def __init__(self, program: Program, step: Step, me: int, *args: Any, lowering: Lowering) -> None:
        peers = program.members(step, me)
        far, _ = _far_and_near(program, step, me, peers, args[1])
        _, near = _far_and_near(program, step, me, window_members(program, step, me), args[1])
        self.far = _Messages(program, step, me, *args, lowering=lowering, members=far)
        super().__init__(program, step, me, *args, lowering=lowering, members=near)

    def _unpacking(self) -> Any:
        """From the input, this rank's window and what was received (sources 0, 1 and 2) into the output."""
        if self.step.reduce:
            return self.reduction({**self.far.staged_in(_RECEIVED), **self.landed()})
        return self.copied([*self.came(), *self.far.unpacked_from(_RECEIVED)])

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        out, far, window = self.empty(), self.far, self.window
        received = torch.empty(far.received, dtype=self.dtype, device=self.device)
        if window is not None:
            self.windows.signal(window, "enter")
        given = out if self.last else None
        yield HierarchicalExchange(
            far.begun(x, received, fingerprint, out), partial(self._push, x, fingerprint), Barrier((), 0, None), given
        )
        own = received if window is None else self.own_window
        self.finish([x, own, received], [out])
        if window is not None:
            self.windows.signal(window, "leave", poison=out)
            self.windows.check()
        return out

    def _push(self, x: torch.Tensor, fingerprint: int) -> None:
        if self.window is not None:
            self.fill_windows(x)
            self.windows.signal(self.window, "meet", fingerprint)
