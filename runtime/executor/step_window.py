"""A step on a transport whose ranks meet on the device, through windows of their group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...planner import Program, Step
from ..transports.symmetric_memory.window import Window, WindowedTransport
from .copies import Copies, Move, contiguous_strides, packed
from .lower import Lowering, window_bytes, window_members
from .step import BoundStep, Run, Terms, Transport

_PULLS = 1 << 15  # above the numbers of steps in a token


class Place(NamedTuple):
    """Where in the window of some ranks a step has its part, in bytes."""

    ranks: tuple[int, ...]
    first: int
    nbytes: int


def place_of(program: Program, step: Step, position: int, transport: Transport, lowering: Lowering) -> Place | None:
    """What a step needs of a window of its own; None where it needs none. Of ranks that reach each other."""
    members = window_members(program, step, position)
    here = transport.node_of(program.mesh.rank_at(position))
    near = [p for p in members if transport.node_of(program.mesh.rank_at(p)) == here]
    if lowering.algorithm not in ("push", "pull", "push and send") or len(near) == 1:
        return None
    nbytes = window_bytes(program, step, near, lowering.algorithm)
    return Place(tuple(sorted(map(program.mesh.rank_at, near))), 0, nbytes)


class WindowStep(BoundStep):
    """Push into the peers' windows and unpack one's own; or publish the input in one's own window and pull from the
    peers'. Either way one launch writes windows, one reads them, and three signals say when.

    A window is, for a push, [slabs, *output shape] of its rank, a slab for each contribution but its own; what comes
    from peers lies where it will lie in the output. For a pull it is the input of its rank, contiguous. A rank's own
    part never goes through a window. The host never waits: `run` yields nothing.

    Args:
        place: the part of a window that others have parts of as well, who signal for all of them; None: the step is
            alone.
    """

    def __init__(self, *args: Any, lowering: Lowering, place: Place | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.windows: WindowedTransport = self.transport  # type: ignore[assignment]
        self.window: Window | None = None
        self.pulls = lowering.algorithm == "pull"
        place = place or place_of(self.program, self.step, self.me, self.transport, lowering)
        if place is not None:
            self.window = self.windows.window(place.ranks, place.first + place.nbytes)
            self.window.build(self.dtype)
            parts = {r: data[place.first :].view(self.dtype) for r, data in self.window.data.items()}
            self.own_window = parts[self.program.mesh.rank_at(self.me)]
            peer_windows = [parts[rank] for rank in self.peer_ranks]
            self.written, self.read = (
                ([self.own_window], peer_windows) if self.pulls else (peer_windows, [self.own_window])
            )
            self.write = self._publishing() if self.pulls else self._pushing()
            self.write.fix(targets=self.written)
        self.finish = self._pulling() if self.pulls else self._unpacking()
        if place is not None:
            self.finish.fix(sources=[None, *self.read])

    def slabs_of(self, receiver: int) -> list[int]:
        """Which of a receiver's slabs each contribution goes to; its own to none, whatever is said."""
        terms = self.contributors
        if not self.step.receivers_contribute:
            return list(range(terms))
        sent = self.outgoing.get(receiver, {})
        rows = self.incoming if receiver == self.me else [row for part in sent.values() for row in part]
        first = min([row.senders.index(receiver) for row in rows if receiver in row.senders], default=terms)
        return [max(i - (i >= first), 0) for i in range(terms)]

    def _pushing(self) -> Copies:
        """From the input (source 0) into the window of each peer."""
        moves = []
        for number, peer in enumerate(self.peers):
            shape = self.program.shape_after(self.step, peer)
            strides = contiguous_strides(shape)[: len(self.program.shape)]
            slabs = self.slabs_of(peer)
            for contributor, rows in self.outgoing.get(peer, {}).items():
                for row in rows:
                    there = self.target(row, strides, slabs[contributor] * math.prod(shape))
                    moves.append(Move((number, there), [(0, self.source(row))]))
        return Copies(moves, self.step.fill, self.dtype, self.device)

    def _unpacking(self) -> Any:
        """From the input and this rank's window (source 1) into the output."""
        return self.reduction(self.landed()) if self.step.reduce else self.copied(self.came())

    def came(self) -> list[Move]:
        """What peers have pushed, from this rank's window (source 1) into the output."""
        rows = [row for row in self.incoming if row.senders[0] in self.peers]
        return [Move((0, self.target(row)), [(1, self.target(row))]) for row in rows]

    def landed(self) -> Terms:
        """Where in this rank's window (source 1) the contributions of peers lie."""
        bases = [slab * math.prod(self.shape) for slab in self.slabs_of(self.me)]
        return {
            (number, i): (1, self.target(row, base=bases[i]))
            for number, row in enumerate(self.incoming)
            for i, p in enumerate(row.senders)
            if p in self.peers
        }

    def _publishing(self) -> Copies:
        """The whole input (source 0) into this rank's window."""
        shape = self.program.shape_before(self.step, self.me)[: len(self.program.shape)]
        moves = [Move((0, packed(shape, 0)), [(0, (tuple(shape), self.source_strides, 0))])]
        return Copies(moves, self.step.fill, self.dtype, self.device)

    def _pulling(self) -> Any:
        """From the input and the peers' windows (sources 1, 2, and so on) into the output."""
        ndim, strides = len(self.program.shape), {}
        for peer in self.peers:
            strides[peer] = contiguous_strides(self.program.shape_before(self.step, peer))[:ndim]
        sources = {peer: source for source, peer in enumerate(self.peers, 1)}
        staged: Terms = {
            (number, i): (sources[p], self.source(row, strides[p]))
            for number, row in enumerate(self.incoming)
            for i, p in enumerate(row.senders)
            if p in sources
        }
        if self.step.reduce:
            return self.reduction(staged)
        return self.copied([Move((0, self.target(self.incoming[n])), [part]) for (n, _), part in staged.items()])

    def copied(self, came: list[Move]) -> Copies:
        """The output out of what is kept, what is filled, and what came."""
        kept = [row for row in self.incoming if row.senders[0] == self.me]
        moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in kept]
        return Copies([*moves, *self.fills(), *came], self.step.fill, self.dtype, self.device)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        yield from ()  # a generator, as all steps are
        out = self.empty()
        if self.window is None:
            self.finish([x], [out])
            return out
        signal = self.windows.signal
        signal(self.window, "enter")
        self.fill_windows(x)
        signal(self.window, "meet", self.fingerprint(fingerprint))
        self.read_windows(x, out)
        signal(self.window, "leave", poison=out)
        self.windows.check()
        return out

    def fingerprint(self, fingerprint: int) -> int:
        """What ranks compare: that they also go the same way."""
        return fingerprint ^ (_PULLS if self.pulls else 0)

    def fill_windows(self, x: torch.Tensor) -> None:
        self.write([x], self.written)

    def read_windows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.finish([x, *self.read], [out])
