"""A step on a world whose ranks send and receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..planner import FILL, Boxes, Step
from .bound_step import BoundStep, Run
from .copies import Copies, Patchwork, Reduction, Side, Whole, is_plain, run_of
from .lowering import lower
from .meeting import AllToAll, Transfer

_Part = tuple[int, int, Boxes, Side, Side]


class TwoSidedStep(BoundStep):
    """Pack what each peer needs, send and receive with exact sizes, unpack or reduce what came.

    Either a message to each peer, where what lies in one run of memory is sent from where it is and received where it
    belongs; or an all-to-all, packed into one buffer (`lowering.lower` says which).

    Args:
        received_at: where a buffer that other tensors share holds what each peer sends, by its position, in elements;
            None: the buffer is this step's own.
        origin: what the step reads, and in which of the buffers that `run` is given; None: one tensor in the only one.
        buffers: how many `run` is given.
        leave_apart: what comes is not put together: `run` returns its buffers and one more, where `patchwork` lies.
    """

    def __init__(
        self,
        *args: Any,
        received_at: Mapping[int, int] | None = None,
        origin: Patchwork | None = None,
        buffers: int = 1,
        leave_apart: bool = False,
    ) -> None:
        super().__init__(*args)
        self.origin = origin or Whole(0, self.source_strides)
        self.arrived, self.leave_apart = buffers, leave_apart
        self.lowering = lower(self.program, self.step, self.me, self.world)
        self.together = self.lowering.how == "all-to-all" and received_at is None
        if self.together:
            # Messages lie in the order of the group.
            place = self.lowering.group.index
            order = sorted(zip(self.peer_ranks, self.peers, strict=True), key=lambda peer: place(peer[0]))
            self.peer_ranks, self.peers = (tuple(column) for column in zip(*order, strict=True))
            self._bind_pack()
        else:
            self._bind_sends()
        self._bind_receives(received_at)

    def _parts_to(self, peer: int, base: int) -> tuple[list[_Part], int]:
        """What a peer gets, contributor by contributor in the order of rows, packed from `base`; and where it ends."""
        parts: list[_Part] = []
        for contributor in range(self.contributors):
            rows = self.outgoing(peer, contributor)
            if elements := int(rows.elements.sum()):
                packed = Side.packed(rows)
                packed.offset = packed.offset + base
                base += elements
                for piece in self.origin.pieces(rows):
                    parts.append((piece.buffer, 0, piece.boxes, piece.side, packed.part(piece)))
        return parts, base

    def _bind_sends(self) -> None:
        self.sends: list[tuple[int, int, Copies | tuple[int, int]]] = []
        """Rank, elements, and how they are packed, or in which buffer they begin, and where."""
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            parts, elements = self._parts_to(peer, 0)
            if elements:
                run = run_of(parts[0][2], parts[0][3]) if len(parts) == 1 else None
                packing = Copies(parts, self.step.fill, self.dtype, self.device)
                self.sends.append((rank, elements, packing if run is None else (parts[0][0], run)))

    def _bind_pack(self) -> None:
        parts: list[_Part] = []
        self.sent = 0
        self.send_sizes = dict.fromkeys(self.lowering.group, 0)
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            more, end = self._parts_to(peer, self.sent)
            parts += more
            self.send_sizes[rank], self.sent = end - self.sent, end
        self.pack = Copies(parts, self.step.fill, self.dtype, self.device)

    def _bind_receives(self, received_at: Mapping[int, int] | None) -> None:
        self.receives: list[tuple[int, int, int, bool]] = []
        """Rank, first and last element, and whether in the output itself."""
        staged = [Side.target(self.incoming, self.strides) for _ in range(self.contributors)]
        unpack: list[_Part] = []
        in_place = not (self.together or self.leave_apart or self.step.reduce) and received_at is None
        base = 0
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            first = base = base if received_at is None else received_at[peer]
            for contributor in range(self.contributors):
                here = np.flatnonzero(self.incoming.sender[:, contributor] == peer)
                rows = self.incoming.select(here)
                target = Side.target(rows, self.strides)
                run = run_of(rows, target) if in_place else None
                if run is not None:
                    self.receives.append((rank, run, run + int(rows.elements.sum()), True))
                    continue
                packed = Side.packed(rows)
                packed.offset = packed.offset + base
                staged[contributor].offset[here] = packed.offset
                staged[contributor].stride[here] = packed.stride
                unpack.append((self.arrived, 0, rows, packed, target))
                base += int(rows.elements.sum())
            if base > first:
                self.receives.append((rank, first, base, False))
        self.received = base
        if self.step.reduce:
            self.finish: Reduction | Copies = self.reduction(staged)
            return
        kept = self.origin.pieces(self.kept_rows())
        parts = [(p.buffer, 0, p.boxes, p.side, Side.target(p.boxes, self.strides)) for p in kept]
        parts += [self.fills(), *unpack]
        if self.leave_apart:
            self.patchwork = Patchwork([(buffer, boxes, side) for buffer, _, boxes, side, _ in parts])
        else:
            self.finish = Copies(parts, self.step.fill, self.dtype, self.device)

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    def run_from(self, buffers: Sequence[torch.Tensor], run: tuple[int, int], elements: int) -> torch.Tensor:
        """What lies in one run of a buffer's memory."""
        x, first = buffers[run[0]], run[1]
        return x.as_strided((elements,), (1,), x.storage_offset() + first)

    def run(self, x: torch.Tensor | list[torch.Tensor], token: int) -> Run:
        buffers = x if isinstance(x, list) else [x]
        out = None if self.leave_apart else self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.together:
            yield self._all_to_all(buffers, received)
        elif self.peers:
            yield self._messages(buffers, received if out is None else out, received)
        buffers = [*buffers, received]
        if out is None:
            return buffers
        self.finish(buffers, [out])
        return out

    def _all_to_all(self, buffers: Sequence[torch.Tensor], received: torch.Tensor) -> AllToAll:
        packed = torch.empty(self.sent, dtype=self.dtype, device=self.device)
        self.pack(buffers, [packed])
        size, came = self.dtype.itemsize, {rank: last - first for rank, first, last, _ in self.receives}
        return AllToAll(
            self.lowering.group,
            packed.view(torch.uint8),
            [self.send_sizes[rank] * size for rank in self.lowering.group],
            received.view(torch.uint8),
            [came.get(rank, 0) * size for rank in self.lowering.group],
        )

    def _messages(self, buffers: Sequence[torch.Tensor], out: torch.Tensor, received: torch.Tensor) -> Transfer:
        sends = []
        for rank, elements, packing in self.sends:
            if isinstance(packing, tuple):
                message = self.run_from(buffers, packing, elements)
            else:
                message = torch.empty(elements, dtype=self.dtype, device=self.device)
                packing(buffers, [message])
            sends.append((rank, message.view(torch.uint8)))
        landed, arrived, size = out.view(-1).view(torch.uint8), received.view(torch.uint8), self.dtype.itemsize
        receives = [
            (rank, (landed if final else arrived)[first * size : last * size])
            for rank, first, last, final in self.receives
        ]
        return Transfer(tuple(sends), tuple(receives))


def may_leave_apart(step: Step, following: Step) -> bool:
    """Whether what `step` brings may be read by `following` from where it arrived."""
    reduces = step.reduce or following.reduce
    return not reduces and is_plain(step.boxes) and is_plain(following.boxes) and not (step.boxes.sender == FILL).any()
