"""The part of a bound step that is common to all transports: its boxes as one rank sees them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ...kernels import Where, WindowUse
from ...planner import FILL, Program, Row, Step, TransferTable
from ..transports.base import Transport
from .copies import Copies, Move, Part, Reduction, box_at, contiguous_strides

Terms = dict[tuple[int, int], Part]
"""Where the contributions of peers are, by the index of the row in `incoming` and the index of the contributor."""


class BoundStep:
    """A step of one rank, bound to a transport.

    Args:
        me: the position of this rank in the mesh.
        strides: of the input.
        members: positions that take part in this kind of exchange, including `me`; None: all that the step has.

    Attributes:
        launches: all copies and reductions of this step that are not empty, for compiling them ahead.
        last: whether this is the program's last step, so that its output is the program's.
        peers: positions of the other members, beginning after this rank, so that writes are spread over the peers.
        peer_ranks: their ranks.
    """

    def __init__(self, program: Program, step: Step, me: int, strides: Sequence[int], transport: Transport,
                 dtype: torch.dtype, device: torch.device, members: tuple[int, ...] | None = None) -> None:  # fmt: skip
        self.program, self.step, self.me = program, step, me
        self.transport, self.dtype, self.device = transport, dtype, device
        self.launches: list[Copies | Reduction] = []
        # A rank outside the mesh holds nothing, and its strides may be more than the tensor has dims.
        self.source_strides = tuple(strides)[: len(program.shape)]
        self.last = True
        self.shape = program.shape_after(step, me)
        self.strides = contiguous_strides(self.shape)[: len(program.shape)]
        group = program.members(step, me) if members is None else members
        start = group.index(me)
        self.members = frozenset(group)
        self.peers = tuple([p for p in group[start:] + group[:start] if p != me])
        self.peer_ranks = tuple([program.mesh.rank_at(p) for p in self.peers])

    @cached_property
    def boxes(self) -> TransferTable:
        """The rows in which this rank receives or sends."""
        boxes = self.step.boxes
        if self.program.rank is not None:
            return boxes
        return boxes.select((boxes.receiver == self.me) | (boxes.sender == self.me).any(axis=1))

    @cached_property
    def rows(self) -> list[Row]:
        """`boxes` as Python numbers."""
        return self.boxes.rows()

    @cached_property
    def incoming(self) -> list[Row]:
        """The rows of this rank's output."""
        return [row for row in self.rows if row.receiver == self.me]

    @cached_property
    def incoming_from(self) -> dict[int, dict[int, list[tuple[int, Row]]]]:
        """The rows of this rank's output with their indices in `incoming`, by sender and index of the contributor."""
        rows: dict[int, dict[int, list[tuple[int, Row]]]] = {}
        for index, row in enumerate(self.incoming):
            for contributor, sender in enumerate(row.senders):
                rows.setdefault(sender, {}).setdefault(contributor, []).append((index, row))
        return rows

    @cached_property
    def outgoing(self) -> dict[int, dict[int, list[Row]]]:
        """The rows that this rank contributes to, by receiver and index of the contributor."""
        rows: dict[int, dict[int, list[Row]]] = {}
        for row in self.rows:
            if self.me in row.senders:
                contributor = row.senders.index(self.me)
                rows.setdefault(row.receiver, {}).setdefault(contributor, []).append(row)
        return rows

    def source(self, row: Row, strides: Sequence[int] | None = None) -> Where:
        """Where the box of a row is in its sender's input. `strides`: of the sender's input; None: of this rank's."""
        strides = self.source_strides if strides is None else strides
        return box_at(row.extent, row.source_start, row.source_step, strides, self.boxes.axes)

    def target(self, row: Row, strides: Sequence[int] | None = None, base: int = 0) -> Where:
        """Where the box of a row is in its receiver's output, which begins at element `base` of a buffer. `strides`: of
        the receiver's output; None: of this rank's."""
        strides = self.strides if strides is None else strides
        return box_at(row.extent, row.target_start, row.target_step, strides, self.boxes.axes, base)

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    def fills(self) -> list[Move]:
        """The boxes of the output that are filled with a constant."""
        return [Move((0, self.target(row)), []) for row in self.incoming if row.senders[0] == FILL]

    def empty(self) -> torch.Tensor:
        """A new output."""
        return self.transport.empty(self.shape, self.dtype, self.device)

    def copies(self, moves: Sequence[Move], use: WindowUse | None = None, pieces: bool = False) -> Copies:
        """Copies of this step, registered in `launches`. `pieces`: as in `Copies`."""
        copies = Copies(moves, self.step.fill, self.dtype, self.device, use, pieces)
        if moves:
            self.launches.append(copies)
        return copies

    def reduction(self, staged: Terms, use: WindowUse | None = None) -> Reduction:
        """The reduction into the output of `reduction_moves`, registered in `launches`."""
        return self.reducing(self.reduction_moves(staged), use)

    def reduction_moves(self, staged: Terms) -> list[Move]:
        """For each row of the output (target 0), its terms: in the input (source 0), and those of peers at `staged`."""
        moves = []
        for index, row in enumerate(self.incoming):
            own = 0, self.source(row)
            terms = [own if p == self.me else staged[index, i] for i, p in enumerate(row.senders) if p != FILL]
            moves.append(Move((0, self.target(row)), terms))
        return moves

    def reducing(self, moves: Sequence[Move], use: WindowUse | None = None) -> Reduction:
        """A reduction of this step, registered in `launches`."""
        reduce = self.step.reduce
        assert reduce is not None
        reduction = Reduction(moves, reduce, self.step.fill, self.dtype, self.device, use)
        if moves:
            self.launches.append(reduction)
        return reduction
