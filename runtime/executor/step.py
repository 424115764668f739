"""What binding a step to a transport needs, whichever way data moves: its boxes as one rank sees them."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from ...kernels import Where
from ...planner import FILL, Program, Row, Step, TransferTable
from ..transports.base import Address, CommRequest
from ..transports.capabilities import WindowPolicy
from ..transports.receive_buffers import ReceiveBuffers
from .copies import Copies, Move, Part, Reduction, box_at, contiguous_strides

Run = Generator[CommRequest, Any, Any]
Terms = dict[tuple[int, int], Part]
"""Where contributions of others lie: by the number of the row among `incoming`, and of the contributor."""


class Transport(Protocol):
    """Where ranks meet."""

    one_sided: bool
    """All ranks write into each other's buffers (`Barrier`), instead of sending and receiving (`Transfer`)."""
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
            TransportError: this transport is dead, as far as the host knows.
        """

    backend: str
    """Of process groups, one of `lowering.BACKENDS`. Of transports that are not one-sided."""

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks of a process group of exactly these ranks, in its order; None if there is none that all of them
        know. Of transports that are not one-sided."""

    def receive_buffers(self, ranks: tuple[int, ...]) -> ReceiveBuffers | None:
        """What the group of these ranks keeps ready between runs; None where no run follows another."""


class BoundStep:
    """What both kinds of transport need of one step on one rank.

    Args:
        members: positions that meet in this way, itself included; None: all that meet in the step.
    """

    def __init__(self, program: Program, step: Step, me: int, strides: Sequence[int], transport: Transport,
                 dtype: torch.dtype, device: torch.device, members: tuple[int, ...] | None = None) -> None:  # fmt: skip
        self.program, self.step, self.me = program, step, me
        self.transport, self.dtype, self.device = transport, dtype, device
        # Of a rank that is not in a mesh, and holds nothing, more strides may be given than the tensor has dims.
        self.source_strides = tuple(strides)[: len(program.shape)]
        self.last = True  # of its program: what it puts together is what the run returns
        self.shape = program.shape_after(step, me)
        self.strides = contiguous_strides(self.shape)[: len(program.shape)]
        group = program.members(step, me) if members is None else members
        # Each rank begins with the peer after itself: writes spread over the peers.
        start = group.index(me)
        self.members = frozenset(group)
        self.peers = tuple([p for p in group[start:] + group[:start] if p != me])
        self.peer_ranks = tuple([program.mesh.rank_at(p) for p in self.peers])

    def launched(self) -> Iterator[Copies | Reduction]:
        """All that a run may launch, in whichever attribute it is."""
        for held in vars(self).values():
            if isinstance(held, BoundStep):
                yield from held.launched()
            for part in held if isinstance(held, list) else [held]:
                for kept in part if isinstance(part, tuple) else (part,):
                    if isinstance(kept, Copies | Reduction) and not kept.empty:
                        yield kept

    @cached_property
    def boxes(self) -> TransferTable:
        """Rows in which this rank receives or sends."""
        boxes = self.step.boxes
        if self.program.rank is not None:
            return boxes
        return boxes.select((boxes.receiver == self.me) | (boxes.sender == self.me).any(axis=1))

    @cached_property
    def rows(self) -> list[Row]:
        """`boxes` in Python numbers."""
        return self.boxes.rows()

    @cached_property
    def incoming(self) -> list[Row]:
        """Rows of what this rank ends with."""
        return [row for row in self.rows if row.receiver == self.me]

    @cached_property
    def incoming_from(self) -> dict[int, dict[int, list[tuple[int, Row]]]]:
        """By sender, and by the number of the contributor, rows that this rank ends with; each with its number among
        `incoming`."""
        found: dict[int, dict[int, list[tuple[int, Row]]]] = {}
        for number, row in enumerate(self.incoming):
            for contributor, sender in enumerate(row.senders):
                found.setdefault(sender, {}).setdefault(contributor, []).append((number, row))
        return found

    @cached_property
    def outgoing(self) -> dict[int, dict[int, list[Row]]]:
        """By receiver, and by the number of the contributor, rows that this rank contributes to."""
        found: dict[int, dict[int, list[Row]]] = {}
        for row in self.rows:
            if self.me in row.senders:
                at = row.senders.index(self.me)
                found.setdefault(row.receiver, {}).setdefault(at, []).append(row)
        return found

    def source(self, row: Row, strides: Sequence[int] | None = None) -> Where:
        """Where the box of a row lies in what its sender holds: this rank, or one whose strides are given."""
        held = self.source_strides if strides is None else strides
        return box_at(row.extent, row.source_start, row.source_step, held, self.boxes.axes)

    def target(self, row: Row, strides: Sequence[int] | None = None, base: int = 0) -> Where:
        """Where the box of a row lies in what its receiver ends with, from element `base` on: this rank, or one whose
        strides are given."""
        held = self.strides if strides is None else strides
        return box_at(row.extent, row.target_start, row.target_step, held, self.boxes.axes, base)

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    def fills(self) -> list[Move]:
        """Of boxes that nobody sends."""
        return [Move((0, self.target(row)), []) for row in self.incoming if row.senders[0] == FILL]

    def empty(self) -> torch.Tensor:
        return self.transport.empty(self.shape, self.dtype, self.device)

    def reduction(self, staged: Terms) -> Reduction:
        """Reduce into the output from the input (source 0) and the contributions of others, at `staged`."""
        reduce = self.step.reduce
        assert reduce is not None
        moves = []
        for number, row in enumerate(self.incoming):
            own = 0, self.source(row)
            terms = [own if p == self.me else staged[number, i] for i, p in enumerate(row.senders) if p != FILL]
            moves.append(Move((0, self.target(row)), terms))
        return Reduction(moves, reduce, self.step.fill, self.dtype, self.device)
