"""A step on a world whose ranks send and receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..planner import Boxes
from .bound_step import BoundStep, Run
from .copies import Copies, Reduction, Side, run_of
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
    """

    def __init__(self, *args: Any, received_at: Mapping[int, int] | None = None) -> None:
        super().__init__(*args)
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
                parts.append((0, 0, rows, Side.source(rows, self.source_strides), packed))
        return parts, base

    def _bind_sends(self) -> None:
        self.sends: list[tuple[int, int, Copies | int]] = []
        """Rank, elements, and how they are packed or where they begin."""
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            parts, elements = self._parts_to(peer, 0)
            if elements:
                run = run_of(parts[0][2], parts[0][3]) if len(parts) == 1 else None
                packing = Copies(parts, self.step.fill, self.dtype, self.device) if run is None else run
                self.sends.append((rank, elements, packing))

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
        in_place = received_at is None and not self.together and not self.step.reduce
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
                unpack.append((1, 0, rows, packed, target))
                base += int(rows.elements.sum())
            if base > first:
                self.receives.append((rank, first, base, False))
        self.received = base
        if self.step.reduce:
            self.finish: Reduction | Copies = self.reduction(staged)
        else:
            rows = self.kept_rows()
            sides = Side.source(rows, self.source_strides), Side.target(rows, self.strides)
            parts = [(0, 0, rows, *sides), self.fills(), *unpack]
            self.finish = Copies(parts, self.step.fill, self.dtype, self.device)

    @property
    def contributors(self) -> int:
        return self.step.reduce.contributors if self.step.reduce else 1

    def run_from(self, x: torch.Tensor, first: int, elements: int) -> torch.Tensor:
        """What lies in one run of the input's memory."""
        return x.as_strided((elements,), (1,), x.storage_offset() + first)

    def run(self, x: torch.Tensor, token: int) -> Run:
        out = self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.together:
            yield self._all_to_all(x, received)
        elif self.peers:
            yield self._messages(x, out, received)
        self.finish([x, received], [out])
        return out

    def _all_to_all(self, x: torch.Tensor, received: torch.Tensor) -> AllToAll:
        packed = torch.empty(self.sent, dtype=self.dtype, device=self.device)
        self.pack([x], [packed])
        size, came = self.dtype.itemsize, {rank: last - first for rank, first, last, _ in self.receives}
        return AllToAll(
            self.lowering.group,
            packed.view(torch.uint8),
            [self.send_sizes[rank] * size for rank in self.lowering.group],
            received.view(torch.uint8),
            [came.get(rank, 0) * size for rank in self.lowering.group],
        )

    def _messages(self, x: torch.Tensor, out: torch.Tensor, received: torch.Tensor) -> Transfer:
        sends = []
        for rank, elements, packing in self.sends:
            if isinstance(packing, int):
                buffer = self.run_from(x, packing, elements)
            else:
                buffer = torch.empty(elements, dtype=self.dtype, device=self.device)
                packing([x], [buffer])
            sends.append((rank, buffer.view(torch.uint8)))
        landed, arrived, size = out.view(-1).view(torch.uint8), received.view(torch.uint8), self.dtype.itemsize
        receives = [
            (rank, (landed if final else arrived)[first * size : last * size])
            for rank, first, last, final in self.receives
        ]
        return Transfer(tuple(sends), tuple(receives))
