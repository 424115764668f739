"""A step on a transport whose ranks synchronise on the device, through symmetric windows of their group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...kernels import HALVES, Turn, Where, WindowUse
from ...planner import Program, Row, Step
from ..transports.base import Transport, WindowedTransport
from ..transports.symmetric_memory.window import Window
from .choose_algorithm import Algorithm, window_members
from .copies import Copies, Move, Reduction, contiguous_strides, packed
from .run import Run
from .step import BoundStep, Terms
from .window_layout import PushedPieces, pushed_pieces, window_bytes

_PULLS = 1 << 15  # in a fingerprint, above the numbers of steps


class WindowRegion(NamedTuple):
    """The part of a group's window that a step uses, in bytes.

    Attributes:
        pieces: where pushes go; None: boxes are placed as in the output, or pulled.
    """

    ranks: tuple[int, ...]
    first: int
    nbytes: int
    pieces: PushedPieces | None = None


def window_region(
    program: Program, step: Step, position: int, transport: Transport, algorithm: Algorithm
) -> WindowRegion | None:
    """The region that a step needs if no other step shares the window, of the ranks that reach each other's memory;
    None if it needs no window."""
    members = window_members(program, step, position)
    node = transport.node_of(program.mesh.rank_at(position))
    node_members = [p for p in members if transport.node_of(program.mesh.rank_at(p)) == node]
    if algorithm.name not in ("push", "pull", "push and send") or len(node_members) == 1:
        return None
    pieces = None if algorithm.name == "pull" else pushed_pieces(program, step, node_members)
    nbytes = window_bytes(program, step, node_members, algorithm.name) if pieces is None else pieces.nbytes
    return WindowRegion(tuple(sorted(map(program.mesh.rank_at, node_members))), 0, nbytes, pieces)


class WindowStep(BoundStep):
    """Push into the windows of peers and unpack the own window; or copy the input into the own window and pull from
    those of peers. Either way one launch writes windows and one reads them; each waits for the peers before its first
    access and signals them after its last one.

    For a push a window holds the pieces of the peers (`PushedPieces`). Where they have no place that all ranks know, it
    has shape [staging slots, *output shape], with a slot for each contribution of a peer, whose boxes are placed as in
    the output. For a pull it holds the input, contiguous. What a rank keeps is never copied through a window. The host
    never waits: `run` yields no requests.

    Args:
        region: the region of a window that several steps share, which signal together; None: the step has a window of
            its own.
    """

    transport: WindowedTransport

    def __init__(self, *args: Any, algorithm: Algorithm, region: WindowRegion | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.window: Window | None = None
        self.reading: WindowUse | None = None
        self.pulls = algorithm.name == "pull"
        region = region or window_region(self.program, self.step, self.me, self.transport, algorithm)
        self.pieces = None if region is None else region.pieces
        self._slots: dict[int, list[int]] = {}
        if region is not None:
            self.window = self.transport.window(region.ranks, region.first + region.nbytes, HALVES)
            self.reading = self.window.reading(self.dtype, self.pulls)
            me, written_and_read = self.program.mesh.rank_at(self.me), []
            for half in map(self.window.half, range(HALVES)):
                windows = {r: data[region.first :].view(self.dtype) for r, data in half.items()}
                of_peers = [windows[rank] for rank in self.peer_ranks]
                written_and_read.append(([windows[me]], of_peers) if self.pulls else (of_peers, [windows[me]]))
            # By half.
            self.written, self.read = zip(*written_and_read, strict=True)
            self.write = self._publishing() if self.pulls else self._pushing()
            self.write.fix(targets=self.written[0])
        self.finish = self._pulling() if self.pulls else self._unpacking()
        if region is not None:
            self.finish.fix(sources=[None, *self.read[0]])

    def pushed_to(self, receiver: int, sender: int, row: Row, contributor: int) -> Where:
        """Where in the receiver's window a sender puts its contribution to a row."""
        if self.pieces is not None:
            return packed(row.extent, self.pieces.first[receiver, sender])
        shape = self.shape if receiver == self.me else self.program.shape_after(self.step, receiver)
        strides = contiguous_strides(shape)[: len(self.program.shape)]
        slots = self._slots.get(receiver)
        if slots is None:
            slots = self._slots[receiver] = self.staging_slots(receiver)
        return self.target(row, strides, slots[contributor] * math.prod(shape))

    def staging_slots(self, receiver: int) -> list[int]:
        """The staging slot of each contributor in a receiver's window, by index. The receiver has no slot: its entry is
        meaningless."""
        terms = self.contributors
        if not self.step.receivers_contribute:
            return list(range(terms))
        sent = self.outgoing.get(receiver, {})
        rows = self.incoming if receiver == self.me else [row for part in sent.values() for row in part]
        first = min([row.senders.index(receiver) for row in rows if receiver in row.senders], default=terms)
        return [max(i - (i >= first), 0) for i in range(terms)]

    def _pushing(self) -> Copies:
        """Copies from the input (source 0) into the windows of the peers (targets)."""
        moves = [
            Move((number, self.pushed_to(peer, self.me, row, contributor)), [(0, self.source(row))])
            for number, peer in enumerate(self.peers)
            for contributor, rows in self.outgoing.get(peer, {}).items()
            for row in rows
        ]
        return self.copies(moves, self.window.writing if self.window else None, pieces=self.pieces is not None)

    def _unpacking(self) -> Copies | Reduction:
        """Copies or reduction from the input and the own window (source 1) into the output."""
        if self.step.reduce:
            return self.reduction(self.staged(), self.reading)
        return self.output_copies(self.pushed())

    def pushed(self) -> list[Move]:
        """Copies of what peers pushed, from the own window (source 1) into the output."""
        rows = [row for row in self.incoming if row.senders[0] in self.peers]
        return [Move((0, self.target(row)), [(1, self.pushed_to(self.me, row.senders[0], row, 0))]) for row in rows]

    def staged(self) -> Terms:
        """Where in the own window (source 1) the contributions of the peers are."""
        return {
            (index, i): (1, self.pushed_to(self.me, p, row, i))
            for index, row in enumerate(self.incoming)
            for i, p in enumerate(row.senders)
            if p in self.peers
        }

    def _publishing(self) -> Copies:
        """The copy of the whole input (source 0) into the own window."""
        shape = self.program.shape_before(self.step, self.me)[: len(self.program.shape)]
        publish = Move((0, packed(shape, 0)), [(0, (tuple(shape), self.source_strides, 0))])
        return self.copies([publish], self.window.writing if self.window else None)

    def _pulling(self) -> Copies | Reduction:
        """Copies or reduction from the input and the windows of the peers (sources 1, 2, …) into the output."""
        ndim, strides = len(self.program.shape), {}
        for peer in self.peers:
            strides[peer] = contiguous_strides(self.program.shape_before(self.step, peer))[:ndim]
        sources = {peer: source for source, peer in enumerate(self.peers, 1)}
        staged: Terms = {
            (index, i): (sources[p], self.source(row, strides[p]))
            for index, row in enumerate(self.incoming)
            for i, p in enumerate(row.senders)
            if p in sources
        }
        if self.step.reduce:
            return self.reduction(staged, self.reading)
        return self.output_copies([Move((0, self.target(self.incoming[n])), [part]) for (n, _), part in staged.items()])

    def output_copies(self, received: list[Move]) -> Copies:
        """Copies of all boxes of the output: kept, filled and received ones."""
        kept = [row for row in self.incoming if row.senders[0] == self.me]
        moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in kept]
        return self.copies([*moves, *self.fills(), *received], self.reading)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        yield from ()  # a generator, as all runs are
        out = self.empty()
        if self.window is None:
            self.finish([x], [out])
            return out
        fingerprint = self.fingerprint(fingerprint)
        turn = self.transport.turn(fingerprint, out=out)
        self.fill_windows(x, turn)
        self.read_windows(x, out, turn)
        self.transport.check()
        return out

    def fingerprint(self, fingerprint: int) -> int:
        """The fingerprint that ranks compare, which includes the direction."""
        return fingerprint ^ (_PULLS if self.pulls else 0)

    def fill_windows(self, x: torch.Tensor, turn: Turn) -> None:
        assert self.window is not None
        self.write.in_window([x], self.written[self.window.writing.half()], turn)

    def read_windows(self, x: torch.Tensor, out: torch.Tensor, turn: Turn, *received: torch.Tensor) -> None:
        """Complete the output. `received`: buffers of messages."""
        assert self.reading is not None
        self.finish.in_window([x, *self.read[self.reading.half()], *received], [out], turn)
