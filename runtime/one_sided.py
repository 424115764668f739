"""A step on a world whose ranks write into each other's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..planner import Boxes, Exchange
from .allocator import block_size
from .bound_step import BoundStep, Run
from .copies import Copies, Side, contiguous_strides
from .landings import LARGEST_KEPT
from .meeting import Address, Meet, Mixed, Transfer


class OneSidedStep(BoundStep):
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
        self.lands_in_output = step.slabs < 2 and bool(reduce is None or self.peers)
        slabs = 1 if self.lands_in_output else min(step.slabs, len(self.peers))
        self.landing_shape = self.shape if self.lands_in_output else (slabs, *self.shape)
        self.pushes: list[tuple[int, int, Copies]] = []
        largest = self.nbytes(self.shape, slabs)
        for index, peer in enumerate(self.peers):
            shape = self.program.shape_after(step, peer)
            strides, nbytes = contiguous_strides(shape)[: len(self.program.shape)], self.nbytes(shape, slabs)
            largest = max(largest, nbytes)
            parts = []
            for contributor in range(self.contributors):
                rows = self.outgoing(peer, contributor)
                target = Side.target(rows, strides, self.slabs_of(rows)[:, contributor] * math.prod(shape))
                parts.append((0, 0, rows, Side.source(rows, self.source_strides), target))
            copies = Copies(parts, step.fill, self.dtype, self.device)
            if not copies.empty:
                self.pushes.append((index, nbytes, copies))
        self.own_nbytes, self.largest = self.nbytes(self.shape, slabs), largest
        self.block = block_size(self.own_nbytes)
        group = tuple(sorted((self.program.mesh.rank_at(self.me), *self.peer_ranks)))
        # Between meshes each rank has peers of its own, so what is kept would not be alike on both sides.
        alike = isinstance(step, Exchange) and step.group is not None
        self.landings = self.world.landings(group) if alike and self.peers and largest <= LARGEST_KEPT else None
        self.has_run = False
        self.own: Copies | None = None
        if reduce:
            bases = self.slabs_of(self.incoming) * math.prod(self.shape)
            self.staged = [Side.target(self.incoming, self.strides, base) for base in bases.T]
            self.bind_reduction()
        else:
            rows = self.kept_rows()
            sides = Side.source(rows, self.source_strides), Side.target(rows, self.strides)
            self.own = Copies([(0, 0, rows, *sides), self.fills()], step.fill, self.dtype, self.device)

    def bind_reduction(self) -> None:
        self.reduce = self.reduction(self.staged)

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    def pushed(self, rows: Boxes) -> np.ndarray:
        """Which contributions to rows of this rank or a peer are pushed, [n, contributors]."""
        return np.isin(rows.sender, (self.me, *self.peers)) & (rows.sender != rows.receiver[:, None])

    def slabs_of(self, rows: Boxes) -> np.ndarray:
        """Which slab of its receiver each contribution goes to, [n, contributors]; of those that are not pushed none,
        whatever is said."""
        return (np.cumsum(self.pushed(rows), axis=1) - 1).clip(0)

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

    def finish(
        self, x: torch.Tensor, landing: torch.Tensor, out: torch.Tensor, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output, when everything has landed. `received`: what came otherwise."""
        if not self.own:
            self.reduce([x, landing], [out])
        return out

    def exchange(self, x: torch.Tensor, token: int, messages: Callable[[torch.Tensor], Transfer] | None = None) -> Run:
        """Push to peers and be pushed to, while what `messages` makes for an output goes to others."""
        world, landings = self.world, self.landings
        kept = landings.take(token) if landings else None
        if kept is None:
            landing = self.land()
            address = world.address(landing)
            addresses = yield Meet(self.peer_ranks, token, address)
        else:
            landing, address, addresses = kept
        own = partial(self.push, x, self.own, address, self.own_nbytes) if self.own else None
        out = self.output(landing)
        given = out if self.last else None
        following = self.land() if landings and self.has_run and landings.have_room(self.block) else None
        offer = None if following is None else world.address(following)
        meet = Meet(self.peer_ranks, token + 1, offer, own, given)
        if messages is None:
            self.push_all(x, addresses)
            addresses = yield meet
        else:
            addresses = yield Mixed(messages(out), partial(self.push_all, x, addresses), meet, given)
        if landings and following is not None and None not in addresses:
            landings.keep(token, following, offer, addresses, self.block, self.largest)
        self.has_run = True
        return landing, out

    def push_all(self, x: torch.Tensor, addresses: Sequence[Address]) -> None:
        for index, nbytes, copies in self.pushes:
            self.push(x, copies, addresses[index], nbytes)
