"""Builds steps from layout changes on one mesh, and from exchanges between two meshes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from .cross_mesh_exchange import CrossMeshExchange
from .dtypes import check_computed, identity
from .exchange import LayoutChange
from .mesh import Mesh
from .placements import Partial
from .steps import Exchange, Local, Reduce, Step
from .transfer_table import FILL


@lru_cache(maxsize=4096)
def _reduction_and_fill(change: LayoutChange) -> tuple[Reduce | None, float | int | bool]:
    """The reduction of a change (None for plain copies) and its fill value, for tensors of any shape."""
    plain = change.contributors == 1 and change.divisor == 1
    reduce = None if plain else Reduce(change.op, change.contributors, change.divisor)
    if reduce is not None:
        check_computed(change.dtype)
    partials = [p for p in change.target.placements if isinstance(p, Partial)]
    return reduce, identity(change.dtype, partials[0].op) if partials else 0


def build_step(change: LayoutChange, shape: tuple[int, ...], rank: int | None) -> Step:
    """The step that performs a layout change on a tensor of `shape`: of all ranks, or of mesh position `rank`."""
    reduce, fill = _reduction_and_fill(change)
    fields = (change.mesh, change.source, change.mesh, change.target, change.boxes(shape, rank), reduce, fill)
    return Exchange(*fields, change.closure) if change.communicates(shape) else Local(*fields)


def build_step_on_one_mesh(union: Mesh, change: LayoutChange, shape: tuple[int, ...], rank: int | None) -> Step:
    """A step on one of the two meshes of a program, with positions in `union`, the mesh of the ranks of both."""
    mesh = change.mesh
    if rank is not None:
        (rank,) = mesh.positions_of(np.array([union.rank_at(rank)])).tolist()
    if rank == -1:
        step = build_step(change, shape, 0)
        return replace(step, boxes=step.boxes.select(np.zeros(len(step.boxes), dtype=bool)))
    step = build_step(change, shape, rank)
    positions = union.positions_of(mesh.rank_array)
    sender = np.where(step.boxes.sender == FILL, FILL, positions[step.boxes.sender])
    boxes = replace(step.boxes, receiver=positions[step.boxes.receiver], sender=sender)
    return replace(step, boxes=boxes.select(np.argsort(boxes.receiver, kind="stable")))


def build_cross_mesh_step(exchange: CrossMeshExchange, rank: int | None) -> Step:
    """The step from one mesh to another, with positions in the mesh of the ranks of both."""
    meshes_and_layouts = exchange.source_mesh, exchange.source, exchange.target_mesh, exchange.target
    fields = *meshes_and_layouts, exchange.boxes(rank), None, 0
    return Exchange(*fields, None) if exchange.communicates() else Local(*fields)
