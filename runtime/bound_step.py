"""What binding a step to a world needs, whichever way data moves: its boxes as one rank sees them."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from functools import cached_property
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch

from ..kernels import Boxes as StridedBoxes
from ..kernels import Where
from ..planner import FILL, Boxes, Program, Step
from .copies import Copies, Reduction, Side, Terms, contiguous_strides
from .landings import Landings
from .lowering import WindowPolicy
from .meeting import Address, Ask

Run = Generator[Ask, Any, Any]


class World(Protocol):
    """Where ranks meet."""

    one_sided: bool
    """All ranks write into each other's buffers (`Meet`), instead of sending and receiving (`Transfer`)."""
    recycles: bool
    """The same address always means the same memory, so views on it may be kept."""

    @property
    def windows(self) -> WindowPolicy | None:
        """How ranks use each other's windows, and meet on the device; None where they do not."""

    def node_of(self, rank: int) -> Hashable:
        """Equal for ranks that write into each other's buffers; alike on all ranks."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous tensor that nobody else holds and that peers can address."""

    def addressable(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor of anybody's is, or lies in, one from `empty`."""

    def address(self, buffer: torch.Tensor) -> Address:
        """What names a tensor from `empty` on every rank."""

    def open(self, address: Address, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the buffer at an address of this rank or a peer, as flat bytes."""

    def offer(self, buffers: Sequence[torch.Tensor | None]) -> tuple[Address, object]:
        """One address that stands for those of several buffers, None for those that this rank has not; and what must
        live until peers have read it."""

    def offered(self, address: Address, number: int) -> Sequence[Address]:
        """The addresses that a peer's `offer` of so many buffers stands for."""

    def check(self) -> None:
        """
        Raises:
            WorldError: this world is dead, as far as the host knows.
        """

    backend: str
    """Of process groups, one of `lowering.BACKENDS`. Of worlds that are not one-sided."""

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks of a process group of exactly these ranks, in its order; None if there is none that all of them
        know. Of worlds that are not one-sided."""

    def landings(self, ranks: tuple[int, ...]) -> Landings | None:
        """What the group of these ranks keeps ready between runs; None where no run follows another."""


class BoundStep:
    """What both kinds of transport need of one step on one rank.

    Args:
        members: positions that meet in this way, itself included; None: all that meet in the step.
    """

    def __init__(self, program: Program, step: Step, me: int, strides: Sequence[int], world: World, dtype: torch.dtype,
                 device: torch.device, members: tuple[int, ...] | None = None) -> None:  # fmt: skip
        self.program, self.step, self.me = program, step, me
        self.world, self.dtype, self.device = world, dtype, device
        # Of a rank that is not in a mesh, and holds nothing, more strides may be given than the tensor has dims.
        self.source_strides = tuple(strides)[: len(program.shape)]
        self.last = True  # of its program: what it puts together is what the run returns
        self.shape = program.shape_after(step, me)
        self.strides = contiguous_strides(self.shape)[: len(program.shape)]
        group = program.members(step, me) if members is None else members
        # Each rank begins with the peer after itself: writes spread over the peers.
        start = group.index(me)
        self.members = group
        self.peers = tuple([p for p in group[start:] + group[:start] if p != me])
        self.peer_ranks = tuple([program.mesh.rank_at(p) for p in self.peers])

    def launched(self) -> Iterator[Copies | Reduction]:
        """All that a run may launch, in whichever attribute it is."""
        for held in vars(self).values():
            if isinstance(held, BoundStep):
                yield from held.launched()
            for part in held if isinstance(held, list) else [held]:
                for kept in part if isinstance(part, tuple) else (part,):
                    if isinstance(kept, Reduction) or (isinstance(kept, Copies) and not kept.empty):
                        yield kept

    @cached_property
    def boxes(self) -> Boxes:
        """Rows in which this rank receives or sends."""
        boxes = self.step.boxes
        if self.program.rank is not None:
            return boxes
        return boxes.select((boxes.receiver == self.me) | (boxes.sender == self.me).any(axis=1))

    @cached_property
    def incoming(self) -> Boxes:
        """Rows of what this rank ends with."""
        return self.boxes.select(self.boxes.receiver == self.me)

    def where(
        self, extent: list[int], start: list[int], step: list[int], strides: Sequence[int], base: int = 0
    ) -> Where:
        """A box of a row in a buffer with strides, as kernels say it."""
        axes = self.boxes.axes
        offset = base + sum(map(mul, start, strides))
        return tuple(extent), tuple([n * strides[d] for n, d in zip(step, axes, strict=True)]), offset

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    @cached_property
    def _none(self) -> Boxes:
        return self.boxes.select(np.zeros(0, np.int64))

    def fill_rows(self) -> Boxes:
        return self.incoming.select(self.incoming.sender[:, 0] == FILL)

    def kept_rows(self) -> Boxes:
        """Rows that this rank sends itself."""
        return self.incoming.select(self.incoming.sender[:, 0] == self.me)

    def outgoing(self, peer: int, contributor: int) -> Boxes:
        """Rows that this rank contributes to a peer."""
        boxes = self.boxes
        rows = np.flatnonzero((boxes.receiver == peer) & (boxes.sender[:, contributor] == self.me))
        return boxes.select(rows) if len(rows) else self._none

    def fills(self) -> tuple[int, int, Boxes, Side, Side]:
        rows = self.fill_rows()
        return FILL, 0, rows, Side.packed(rows), Side.target(rows, self.strides)

    def empty(self) -> torch.Tensor:
        return self.world.empty(self.shape, self.dtype, self.device)

    def reduction(self, staged: Terms, buffers: np.ndarray | int = 1) -> Reduction:
        """Reduce into the output from the input (source 0) and the contributions of others, at `staged`.

        `buffers`: the sources that these are in, [n, contributors] or one for all.
        """
        rows, reduce = self.incoming, self.step.reduce
        assert reduce is not None
        own, target = Side.source(rows, self.source_strides), Side.target(rows, self.strides)
        is_own = rows.sender == self.me
        boxes = StridedBoxes.unchecked(
            self.step.fill,
            source=np.where(rows.sender == FILL, FILL, np.where(is_own, 0, buffers)),
            target=np.zeros(len(rows), np.int64),
            source_offset=np.where(is_own, own.offset[:, None], staged.offset),
            target_offset=target.offset,
            extent=rows.extent,
            source_stride=np.where(is_own[:, :, None], own.stride[:, None], staged.stride),
            target_stride=target.stride,
        )
        return Reduction(boxes, reduce, self.dtype, self.device)
