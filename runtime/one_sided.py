"""A step on a world whose ranks write into each other's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..planner import Exchange
from .bound_step import BoundStep, Run
from .copies import Copies, Side, contiguous_strides
from .landings import LARGEST_KEPT
from .meeting import Address, Meet


class OneSidedStep(BoundStep):
    """Ranks push into each other's buffers and meet: the outputs themselves, or slabs of contributions.

    Where contributions are reduced, a rank's buffer is [slabs, *output shape], a slab for each contributor, but none
    for the rank itself where it always is one: where a box goes follows from its contributor and its place in the
    output, so senders need nothing that the plan does not say. What is one contribution alone, or the one that a rank's
    own is added to, lands in the output itself.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        step, reduce = self.step, self.step.reduce
        self.lands_in_output = step.slabs < 2 and bool(reduce is None or self.peers)
        slabs = 1 if self.lands_in_output else max(step.slabs, 1)
        self.landing_shape = self.shape if self.lands_in_output else (slabs, *self.shape)
        self.pushes: list[tuple[int, int, Copies]] = []
        largest = self.nbytes(self.shape, slabs)
        for index, peer in enumerate(self.peers):
            shape = self.program.shape_after(step, peer)
            strides, nbytes = contiguous_strides(shape)[: len(self.program.shape)], self.nbytes(shape, slabs)
            largest = max(largest, nbytes)
            parts = []
            for contributor, slab in enumerate(self.slabs_of(peer)):
                rows = self.outgoing(peer, contributor)
                target = Side.target(rows, strides, slab * math.prod(shape))
                parts.append((0, 0, rows, Side.source(rows, self.source_strides), target))
            copies = Copies(parts, step.fill, self.dtype, self.device)
            if not copies.empty:
                self.pushes.append((index, nbytes, copies))
        self.own_nbytes, self.largest = self.nbytes(self.shape, slabs), largest
        group = tuple(sorted((self.program.mesh.rank_at(self.me), *self.peer_ranks)))
        # Between meshes each rank has peers of its own, so what is kept would not be alike on both sides.
        alike = isinstance(step, Exchange) and step.group is not None
        self.landings = self.world.landings(group) if alike and self.peers and largest <= LARGEST_KEPT else None
        self.own: Copies | None = None
        if reduce:
            size = math.prod(self.shape)
            staged = [Side.target(self.incoming, self.strides, slab * size) for slab in self.slabs_of(self.me)]
            self.reduce = self.reduction(staged)
        else:
            rows = self.kept_rows()
            sides = Side.source(rows, self.source_strides), Side.target(rows, self.strides)
            self.own = Copies([(0, 0, rows, *sides), self.fills()], step.fill, self.dtype, self.device)

    def slabs_of(self, receiver: int) -> list[int]:
        if self.lands_in_output:
            return [0] * (self.step.reduce.contributors if self.step.reduce else 1)
        return super().slabs_of(receiver)

    def nbytes(self, shape: Sequence[int], slabs: int) -> int:
        return math.prod(shape) * slabs * self.dtype.itemsize

    def land(self) -> torch.Tensor:
        """A buffer for what peers push."""
        return self.world.empty(self.landing_shape, self.dtype, self.device)

    def push(self, x: torch.Tensor, copies: Copies, address: Address, nbytes: int) -> None:
        """Copy boxes of `x` into the buffer at an address, this rank's own included."""
        key = address if self.world.recycles else None
        copies([x], () if copies.knows(key) else [self.world.open(address, nbytes).view(self.dtype)], key)

    def run(self, x: torch.Tensor, token: int) -> Run:
        if self.peers:
            landing, out = yield from self.exchange(x, token)
            return self.finish(x, landing, out)
        if self.own:
            landing = self.land()
            self.push(x, self.own, self.world.address(landing), self.own_nbytes)
        else:
            landing = x  # nothing comes from anyone else
        return self.finish(x, landing, self.output(landing))

    def output(self, landing: torch.Tensor) -> torch.Tensor:
        """What the step ends with: the buffer that everything lands in, or another."""
        return landing if self.own or self.lands_in_output else self.empty()

    def finish(self, x: torch.Tensor, landing: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The output, when everything has landed."""
        if not self.own:
            self.reduce([x, landing], [out])
        return out

    def exchange(self, x: torch.Tensor, token: int) -> Run:
        """Push to peers and be pushed to."""
        world, landings = self.world, self.landings
        kept = landings.take(token) if landings else None
        if kept is None:
            landing = self.land()
            address = world.address(landing)
            addresses = yield Meet(self.peer_ranks, token, address)
        else:
            landing, address, addresses = kept
        for index, nbytes, copies in self.pushes:
            self.push(x, copies, addresses[index], nbytes)
        own = partial(self.push, x, self.own, address, self.own_nbytes) if self.own else None
        out = self.output(landing)
        given = out if self.last else None
        if landings is None:
            yield Meet(self.peer_ranks, token + 1, None, own, given)
        else:
            following = self.land()
            address = world.address(following)
            addresses = yield Meet(self.peer_ranks, token + 1, address, own, given)
            landings.keep(token, following, address, addresses, self.largest)
        return landing, out
