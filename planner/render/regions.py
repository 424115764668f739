"""The regions of the global tensor that each rank holds before and after each step, with the ranks that sent them.

Boxes have local indices; a picture needs global ones. The regions after a step follow from its boxes, those at the
start from the source layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ArgumentError
from ..exchange.steps import Step
from ..exchange.transfer_table import FILL, TransferTable
from ..layouts.index_sets import cut_dims
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.spans import held_spans
from ..program_base import ProgramBase

Run = tuple[int, int]  # start, stop
Runs = tuple[Run, ...]

_MAX_RUNS = 256  # along one tensor dim of one box


@dataclass(frozen=True)
class Region:
    """A part of the global tensor that a rank holds.

    Attributes:
        holder: the mesh position of the rank.
        senders: the mesh positions that sent it, in the order of reduction: only the holder if it was kept, empty if it
            was filled.
        runs: the index ranges along each tensor dim; the region is their product.
    """

    holder: int
    senders: tuple[int, ...]
    runs: tuple[Runs, ...]

    @property
    def kept(self) -> bool:
        return self.senders == (self.holder,)

    @property
    def elements(self) -> int:
        return math.prod(sum(stop - start for start, stop in runs) for runs in self.runs)


@dataclass(frozen=True)
class Stage:
    """The regions of all ranks, by position, after `step`, or under the source layout if `step` is None."""

    mesh: Mesh
    layout: Layout
    step: Step | None
    regions: tuple[tuple[Region, ...], ...]

    def transfers(self) -> dict[tuple[int, int], int]:
        """The elements that move between two ranks, sorted by (sender, receiver)."""
        moved: dict[tuple[int, int], int] = {}
        for region in (r for held in self.regions for r in held):
            for sender in region.senders:
                if sender != region.holder:
                    pair = sender, region.holder
                    moved[pair] = moved.get(pair, 0) + region.elements
        return dict(sorted(moved.items()))


def stages(program: ProgramBase) -> list[Stage]:
    """The stage of the source, and the stage after each step, of a program of all ranks.

    Raises:
        ArgumentError: a box consists of too many pieces to be drawn.
    """
    positions = range(program.mesh.size)
    held = [held_runs(program, program.source, program.source_mesh, position) for position in positions]
    start = tuple(
        (Region(p, (p,), runs),) if runs is not None and all(runs) else ()
        for p, runs in zip(positions, held, strict=True)
    )
    return [Stage(program.source_mesh, program.source, None, start), *(_after(program, step) for step in program.steps)]


def held_runs(program: ProgramBase, layout: Layout, mesh: Mesh, position: int) -> tuple[Runs, ...] | None:
    """The runs of each tensor dim that a position holds under `layout` on `mesh`, in the order of its local shard; None
    if it is not in the mesh."""
    at = program.coordinate_in(mesh, position)
    if at is None:
        return None
    runs = []
    parts = {d: of_dim for d, of_dim, _ in cut_dims(layout, mesh.shape, at)}
    for d, extent in enumerate(program.shape):
        spans = held_spans(extent, parts.get(d, ()))
        runs.append(tuple((low, high) for low, high in spans.tolist()))
    return tuple(runs)


def _after(program: ProgramBase, step: Step) -> Stage:
    boxes, elements = step.boxes, step.boxes.elements
    regions: list[tuple[Region, ...]] = []
    for position in range(program.mesh.size):
        held = held_runs(program, step.target, step.target_mesh, position)
        rows = np.flatnonzero(boxes.receiver == position)
        regions.append(
            () if held is None else tuple(_region(boxes, row, held) for row in rows.tolist() if elements[row])
        )
    return Stage(step.target_mesh, step.target, step, tuple(regions))


def _region(boxes: TransferTable, row: int, held: Sequence[Runs]) -> Region:
    senders = tuple(s for s in boxes.sender[row].tolist() if s != FILL)
    runs = []
    for dim, within in enumerate(held):
        axes = [
            (int(boxes.target_step[row, a]), int(boxes.extent[row, a])) for a, d in enumerate(boxes.axes) if d == dim
        ]
        local = _strided(int(boxes.target_start[row, dim]), axes)
        runs.append(_merged([part for run in local for part in _inside(run, within)]))
    return Region(int(boxes.receiver[row]), senders, tuple(runs))


def _strided(start: int, axes: Sequence[tuple[int, int]]) -> list[Run]:
    """The runs of a box along one tensor dim, from the (step, extent) of each axis along it."""
    runs = [(start, start + 1)]
    for step, extent in sorted(axes):
        (low, high), *rest = runs
        if extent == 1:
            continue
        if not rest and step == high - low:
            runs = [(low, low + step * extent)]
            continue
        if len(runs) * extent > _MAX_RUNS:
            raise ArgumentError(
                f"program: a box consists of {len(runs) * extent} pieces along one tensor dim; allowed in a drawing: "
                f"{_MAX_RUNS}. Draw a smaller shape with the same layouts"
            )
        runs = [(low + i * step, high + i * step) for i in range(extent) for low, high in runs]
    return runs


def _inside(local: Run, held: Runs) -> list[Run]:
    """The global runs of a run of local indices."""
    runs, passed = [], 0
    for start, stop in held:
        low, high = max(local[0] - passed, 0), min(local[1] - passed, stop - start)
        if low < high:
            runs.append((start + low, start + high))
        passed += stop - start
    return runs


def _merged(runs: Sequence[Run]) -> Runs:
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)
