"""A step on a world whose ranks meet on the device, through windows of their group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from ..planner import FILL, Boxes, Program, Step
from .bound_step import BoundStep, Run, World
from .copies import Copies, Side, Terms, contiguous_strides
from .lowering import Lowering, window_bytes, window_members
from .windows import Window, WindowedWorld

_PULLS = 1 << 15  # above the numbers of steps in a token


class Place(NamedTuple):
    """Where in the window of some ranks a step has its part, in bytes."""

    ranks: tuple[int, ...]
    first: int
    nbytes: int


def place_of(program: Program, step: Step, position: int, world: World, lowering: Lowering) -> Place | None:
    """What a step needs of a window of its own; None where it needs none. Of ranks that reach each other."""
    members = window_members(program, step, position)
    here = world.node_of(program.mesh.rank_at(position))
    near = [p for p in members if world.node_of(program.mesh.rank_at(p)) == here]
    if lowering.how not in ("push", "pull", "push and send") or len(near) == 1:
        return None
    nbytes = window_bytes(program, step, near, lowering.how)
    return Place(tuple(sorted(map(program.mesh.rank_at, near))), 0, nbytes)


class WindowedStep(BoundStep):
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
        self.windows: WindowedWorld = self.world  # type: ignore[assignment]
        self.window: Window | None = None
        self.pulls = lowering.how == "pull"
        place = place or place_of(self.program, self.step, self.me, self.world, lowering)
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
        boxes = self.step.boxes
        own = (boxes.sender[boxes.receiver == receiver] == receiver).any(axis=0)
        return (np.arange(terms) - (np.cumsum(own) > 0)).clip(0).tolist()

    def _pushing(self) -> Copies:
        """From the input (source 0) into the window of each peer."""
        parts = []
        for target, peer in enumerate(self.peers):
            shape = self.program.shape_after(self.step, peer)
            strides = contiguous_strides(shape)[: len(self.program.shape)]
            for contributor, slab in enumerate(self.slabs_of(peer)):
                rows = self.outgoing(peer, contributor)
                there = Side.target(rows, strides, slab * math.prod(shape))
                parts.append((0, target, rows, Side.source(rows, self.source_strides), there))
        return Copies(parts, self.step.fill, self.dtype, self.device)

    def _unpacking(self) -> Any:
        """From the input and this rank's window (source 1) into the output."""
        rows = self.incoming
        if self.step.reduce:
            return self.reduction(self.landed(rows))
        came = rows.select((rows.sender[:, 0] != self.me) & (rows.sender[:, 0] != FILL))
        return self.copied([(1, came, Side.target(came, self.strides))])

    def landed(self, rows: Boxes) -> Terms:
        """Where in this rank's window each contribution to rows of it lies."""
        bases = np.array([self.slabs_of(self.me)]) * math.prod(self.shape)
        return Terms(Side.target(rows, self.strides), bases)

    def _publishing(self) -> Copies:
        """The whole input (source 0) into this rank's window."""
        shape = self.program.shape_before(self.step, self.me)[: len(self.program.shape)]
        axes = len(shape)
        starts, ones = np.zeros((1, axes), np.int64), np.ones((1, axes), np.int64)
        me = np.array([self.me])
        whole = Boxes(me, me[:, None], starts, starts, np.array([shape], np.int64).reshape(1, axes), ones, ones,
                      tuple(range(axes)))  # fmt: skip
        sides = Side.source(whole, self.source_strides), Side.target(whole, contiguous_strides(shape))
        return Copies([(0, 0, whole, *sides)], self.step.fill, self.dtype, self.device)

    def _pulling(self) -> Any:
        """From the input and the peers' windows (sources 1, 2, and so on) into the output."""
        rows = self.incoming
        strides = {p: contiguous_strides(self.program.shape_before(self.step, p)) for p in self.peers}
        strides = {p: s[: len(self.program.shape)] for p, s in strides.items()}
        if not self.step.reduce:
            parts = []
            for source, peer in enumerate(self.peers, 1):
                came = rows.select(rows.sender[:, 0] == peer)
                parts.append((source, came, Side.source(came, strides[peer])))
            return self.copied(parts)
        staged = Terms(Side.source(rows, self.source_strides), np.zeros((1, self.contributors), np.int64))
        for contributor in range(self.contributors):
            for peer in self.peers:
                at = np.flatnonzero(rows.sender[:, contributor] == peer)
                staged.put(at, contributor, Side.source(rows.select(at), strides[peer]))
        buffers = np.ones_like(rows.sender)
        for source, peer in enumerate(self.peers, 1):
            buffers[rows.sender == peer] = source
        return self.reduction(staged, buffers)

    def copied(self, came: list[tuple[int, Boxes, Side]]) -> Copies:
        """The output out of what is kept, what is filled, and what came: source, boxes, where they lie in it."""
        kept = self.kept_rows()
        parts = [(0, 0, kept, Side.source(kept, self.source_strides), Side.target(kept, self.strides)), self.fills()]
        parts += [(source, 0, rows, side, Side.target(rows, self.strides)) for source, rows, side in came]
        return Copies(parts, self.step.fill, self.dtype, self.device)

    def run(self, x: torch.Tensor, token: int) -> Run:
        yield from ()  # a generator, as all steps are
        out = self.empty()
        if self.window is None:
            self.finish([x], [out])
            return out
        signal = self.windows.signal
        signal(self.window, "enter")
        self.fill_windows(x)
        signal(self.window, "meet", self.token(token))
        self.read_windows(x, out)
        signal(self.window, "leave", poison=out)
        self.windows.check()
        return out

    def token(self, token: int) -> int:
        """What ranks compare: that they also go the same way."""
        return token ^ (_PULLS if self.pulls else 0)

    def fill_windows(self, x: torch.Tensor) -> None:
        self.write([x], self.written)

    def read_windows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.finish([x, *self.read], [out])
