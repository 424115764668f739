"""A change of layouts as a step of a program: boxes, reduction, what is filled."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from .dtypes import check_computed, identity
from .exchange import FILL, Change
from .mesh import Mesh
from .placements import Partial
from .program import Exchange, Local, Reduce, Step


@lru_cache(maxsize=4096)
def _computed(change: Change) -> tuple[Reduce | None, float | int | bool]:
    """How terms become one value, None where they are copied, and what is filled; whatever the shape."""
    plain = change.contributors == 1 and change.divisor == 1
    reduce = None if plain else Reduce(change.op, change.contributors, change.divisor)
    if reduce is not None:
        check_computed(change.dtype)
    partials = [p for p in change.target.placements if isinstance(p, Partial)]
    return reduce, identity(change.dtype, partials[0].op) if partials else 0


def step_of(change: Change, shape: tuple[int, ...], rank: int | None) -> Step:
    reduce, fill = _computed(change)
    common = (change.mesh, change.source, change.mesh, change.target, change.boxes(shape, rank), reduce, fill)
    return Exchange(*common, change.closure) if change.communicates(shape) else Local(*common)


def step_inside(both: Mesh, change: Change, shape: tuple[int, ...], rank: int | None) -> Step:
    """A step of one of two meshes, in positions of everyone."""
    mesh = change.mesh
    if rank is not None:
        (rank,) = mesh.positions_of(np.array([both.rank_at(rank)])).tolist()
    if rank == -1:
        step = step_of(change, shape, 0)
        return replace(step, boxes=step.boxes.select(np.zeros(len(step.boxes), dtype=bool)))
    step = step_of(change, shape, rank)
    places = both.positions_of(mesh.rank_array)
    sender = np.where(step.boxes.sender == FILL, FILL, places[step.boxes.sender])
    boxes = replace(step.boxes, receiver=places[step.boxes.receiver], sender=sender)
    return replace(step, boxes=boxes.select(np.argsort(boxes.receiver, kind="stable")))
