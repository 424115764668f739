"""A step that torch.distributed reduces itself, in an order of its own: only under `reduction="fast"`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...planner import Row
from ..transports.requests import AllReduce, ReduceScatter
from .copies import Copies, Move, packed, run_of
from .lower import Lowering
from .step import BoundStep, Run


class CollectiveReduction(BoundStep):
    """A reduce-scatter, of a term for each rank of the group one after the other; or an all-reduce in the output.

    Sums of 16-bit floats are rounded as the backend does it, and divided after that.
    """

    def __init__(self, *args: Any, lowering: Lowering) -> None:
        super().__init__(*args)
        assert self.step.reduce is not None
        self.op, self.divisor = self.step.reduce.op, self.step.reduce.divisor
        self.group, self.scatters = lowering.group, lowering.algorithm == "reduce-scatter"
        if self.scatters:
            self._bind_scatter()
        else:
            moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in self._terms_of(self.me)]
            self.pack = Copies(moves, self.step.fill, self.dtype, self.device)

    def _terms_of(self, position: int) -> list[Row]:
        """This rank's terms of what a rank of the group ends with."""
        return [row for _, rows in sorted(self.outgoing.get(position, {}).items()) for row in rows]

    def _bind_scatter(self) -> None:
        moves, self.packed = [], 0
        for rank in self.group:
            (position,) = self.program.mesh.positions_of(np.array([rank])).tolist()
            for row in self._terms_of(position):
                moves.append(Move((0, packed(row.extent, self.packed)), [(0, self.source(row))]))
                self.packed += math.prod(row.extent)
        self.from_where_it_is = run_of(where for _, ((_, where),) in moves)
        in_order = self.from_where_it_is is not None
        self.pack = Copies([] if in_order else moves, self.step.fill, self.dtype, self.device)
        moves, base = [], 0
        for row in self.incoming:
            moves.append(Move((0, self.target(row)), [(0, packed(row.extent, base))]))
            base += math.prod(row.extent)
        self.lands = run_of(where for (_, where), _ in moves) == 0
        self.unpack = Copies(moves, self.step.fill, self.dtype, self.device)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        out = self.empty()
        if self.scatters:
            landed = out if self.lands else torch.empty(out.numel(), dtype=self.dtype, device=self.device)
            yield ReduceScatter(
                self.group, self._terms(x), landed.view(-1), self.op, fingerprint, out if self.last else None
            )
            if not self.lands:
                self.unpack([landed], [out])
        else:
            self.pack([x], [out])
            yield AllReduce(self.group, out.view(-1), self.op, fingerprint, out if self.last else None)
        return out if self.divisor == 1 else out.div_(self.divisor)

    def _terms(self, x: torch.Tensor) -> torch.Tensor:
        if self.from_where_it_is is not None:
            return x.as_strided((self.packed,), (1,), x.storage_offset() + self.from_where_it_is)
        terms = torch.empty(self.packed, dtype=self.dtype, device=self.device)
        self.pack([x], [terms])
        return terms
