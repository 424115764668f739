"""A step on a world whose ranks send and receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..planner import Boxes
from .bound_step import BoundStep, Run
from .copies import Copies, Reduction, Side, run_of
from .meeting import Transfer


class TwoSidedStep(BoundStep):
    """Pack what each peer needs, send and receive with exact sizes, unpack or reduce what came.

    What lies in one run of memory is sent from where it is, and received where it belongs.

    Args:
        received_at: where a buffer that other tensors share holds what each peer sends, by its position, in elements;
            None: the buffer is this step's own.
    """

    def __init__(self, *args: Any, received_at: Mapping[int, int] | None = None) -> None:
        super().__init__(*args)
        step, reduce = self.step, self.step.reduce
        contributors = reduce.contributors if reduce else 1
        self.sends: list[tuple[int, int, Copies | int]] = []
        """Rank, elements, and how they are packed or where they begin."""
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            parts, base = [], 0
            for contributor in range(contributors):
                rows = self.outgoing(peer, contributor)
                if elements := int(rows.elements.sum()):
                    packed = Side.packed(rows)
                    packed.offset = packed.offset + base
                    base += elements
                    parts.append((0, 0, rows, Side.source(rows, self.source_strides), packed))
            if base:
                run = run_of(parts[0][2], parts[0][3]) if len(parts) == 1 else None
                packing = Copies(parts, step.fill, self.dtype, self.device) if run is None else run
                self.sends.append((rank, base, packing))
        # What a peer sends comes contributor by contributor, in the order of rows, as the peer packs it.
        self.receives: list[tuple[int, int, int, bool]] = []
        """Rank, first and last element, and whether in the output itself."""
        staged = [Side.target(self.incoming, self.strides) for _ in range(contributors)]
        unpack: list[tuple[int, int, Boxes, Side, Side]] = []
        base = 0
        for peer, rank in zip(self.peers, self.peer_ranks, strict=True):
            first = base = base if received_at is None else received_at[peer]
            for contributor in range(contributors):
                here = np.flatnonzero(self.incoming.sender[:, contributor] == peer)
                rows = self.incoming.select(here)
                target = Side.target(rows, self.strides)
                run = None if reduce or received_at is not None else run_of(rows, target)
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
        if reduce:
            self.finish: Reduction | Copies = self.reduction(staged)
        else:
            rows = self.kept_rows()
            sides = Side.source(rows, self.source_strides), Side.target(rows, self.strides)
            parts = [(0, 0, rows, *sides), self.fills(), *unpack]
            self.finish = Copies(parts, step.fill, self.dtype, self.device)

    def run_from(self, x: torch.Tensor, first: int, elements: int) -> torch.Tensor:
        """What lies in one run of the input's memory."""
        return x.as_strided((elements,), (1,), x.storage_offset() + first)

    def run(self, x: torch.Tensor, token: int) -> Run:
        out = self.empty()
        received = torch.empty(self.received, dtype=self.dtype, device=self.device)
        if self.peers:
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
            yield Transfer(tuple(sends), tuple(receives))
        self.finish([x, received], [out])
        return out
