"""A step that the backend of torch.distributed reduces, in an order of its own: only with `reduction="fast"`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...planner import Row
from ..transports.comm_requests import AllReduce, ReduceScatter
from .choose_algorithm import Algorithm
from .copies import Move, contiguous_start, packed
from .run import Run
from .step import BoundStep


class CollectiveReduction(BoundStep):
    """A reduce-scatter of one term for each rank of the group, or an all-reduce in the output.

    The backend rounds sums of 16-bit floats in its own way; an average is divided afterwards.
    """

    def __init__(self, *args: Any, algorithm: Algorithm) -> None:
        super().__init__(*args)
        assert self.step.reduce is not None
        self.op, self.divisor = self.step.reduce.op, self.step.reduce.divisor
        self.group, self.scatters = algorithm.group, algorithm.name == "reduce-scatter"
        if self.scatters:
            self._bind_scatter()
        else:
            moves = [Move((0, self.target(row)), [(0, self.source(row))]) for row in self._terms_of(self.me)]
            self.pack = self.copies(moves)

    def _terms_of(self, position: int) -> list[Row]:
        """The terms of this rank in the output of a rank of the group."""
        return [row for _, rows in sorted(self.outgoing.get(position, {}).items()) for row in rows]

    def _bind_scatter(self) -> None:
        moves, self.send_elements = [], 0
        for rank in self.group:
            (position,) = self.program.mesh.positions_of(np.array([rank])).tolist()
            for row in self._terms_of(position):
                moves.append(Move((0, packed(row.extent, self.send_elements)), [(0, self.source(row))]))
                self.send_elements += math.prod(row.extent)
        # The first element of the terms, if they are in group order in the input already.
        self.in_place = contiguous_start(where for _, ((_, where),) in moves)
        self.pack = self.copies([] if self.in_place is not None else moves)
        moves, base = [], 0
        for row in self.incoming:
            moves.append(Move((0, self.target(row)), [(0, packed(row.extent, base))]))
            base += math.prod(row.extent)
        self.receives_in_output = contiguous_start(where for (_, where), _ in moves) == 0
        self.unpack = self.copies(moves)

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        out = self.empty()
        output = out if self.last else None
        if self.scatters:
            received = out
            if not self.receives_in_output:
                received = self.transport.empty((out.numel(),), self.dtype, self.device)
            yield ReduceScatter(self.group, self._terms(x), received.view(-1), self.op, fingerprint, output)
            if not self.receives_in_output:
                self.unpack([received], [out])
        else:
            self.pack([x], [out])
            yield AllReduce(self.group, out.view(-1), self.op, fingerprint, output)
        return out if self.divisor == 1 else out.div_(self.divisor)

    def _terms(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place is not None:
            return x.as_strided((self.send_elements,), (1,), x.storage_offset() + self.in_place)
        terms = self.transport.empty((self.send_elements,), self.dtype, self.device)
        self.pack([x], [terms])
        return terms
