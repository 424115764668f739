"""A step that torch.distributed reduces itself, in an order of its own: only under `reduction="fast"`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..planner import Boxes
from .bound_step import BoundStep, Run
from .copies import Copies, Side, run_of
from .lowering import Lowering
from .meeting import AllReduce, ReduceScatter


class VendorReduction(BoundStep):
    """A reduce-scatter, of a term for each rank of the group one after the other; or an all-reduce in the output.

    Sums of 16-bit floats are rounded as the backend does it, and divided after that.
    """

    def __init__(self, *args: Any, lowering: Lowering) -> None:
        super().__init__(*args)
        assert self.step.reduce is not None
        self.op, self.divisor = self.step.reduce.op, self.step.reduce.divisor
        self.group, self.scatters = lowering.group, lowering.how == "reduce-scatter"
        if self.scatters:
            self._bind_scatter()
        else:
            rows = self._terms_of(self.me)
            part = 0, 0, rows, Side.source(rows, self.source_strides), Side.target(rows, self.strides)
            self.pack = Copies([part], self.step.fill, self.dtype, self.device)

    def _terms_of(self, position: int) -> Boxes:
        """This rank's terms of what a rank of the group ends with, in the order of rows."""
        boxes = self.step.boxes
        return boxes.select((boxes.receiver == position) & (boxes.sender == self.me).any(axis=1))

    def _bind_scatter(self) -> None:
        parts, self.packed = [], 0
        runs: list[tuple[int | None, int]] = []  # where a term begins if it is contiguous, where it is to be
        for rank in self.group:
            (position,) = self.program.mesh.positions_of(np.array([rank])).tolist()
            rows = self._terms_of(position)
            source, packed = Side.source(rows, self.source_strides), Side.packed(rows)
            packed.offset = packed.offset + self.packed
            runs.append((run_of(rows, source), self.packed))
            parts.append((0, 0, rows, source, packed))
            self.packed += int(rows.elements.sum())
        first = runs[0][0]
        in_order = first is not None and all(run == first + place for run, place in runs)
        self.from_where_it_is = first if in_order else None
        self.pack = Copies([] if in_order else parts, self.step.fill, self.dtype, self.device)
        rows = self.incoming
        packed, target = Side.packed(rows), Side.target(rows, self.strides)
        self.lands = run_of(rows, target) == 0
        self.unpack = Copies([(0, 0, rows, packed, target)], self.step.fill, self.dtype, self.device)

    def run(self, x: torch.Tensor, token: int) -> Run:
        out = self.empty()
        if self.scatters:
            landed = out if self.lands else torch.empty(out.numel(), dtype=self.dtype, device=self.device)
            yield ReduceScatter(self.group, self._terms(x), landed.view(-1), self.op, token, out if self.last else None)
            if not self.lands:
                self.unpack([landed], [out])
        else:
            self.pack([x], [out])
            yield AllReduce(self.group, out.view(-1), self.op, token, out if self.last else None)
        return out if self.divisor == 1 else out.div_(self.divisor)

    def _terms(self, x: torch.Tensor) -> torch.Tensor:
        if self.from_where_it_is is not None:
            return x.as_strided((self.packed,), (1,), x.storage_offset() + self.from_where_it_is)
        terms = torch.empty(self.packed, dtype=self.dtype, device=self.device)
        self.pack([x], [terms])
        return terms
