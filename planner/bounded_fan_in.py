"""Reductions of bounded fan-in: a step that would reduce too many terms at once is split into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.placements import Partial, Shard

MAX_FAN_IN = 512
"""The terms that one step reduces at most, unless they lie along a single mesh dim.

A rank knows all senders of each box that it sends or receives, so its part of a step takes memory in proportion to
peers times terms, and every peer costs a message. Reducing in stages moves as many bytes as reducing at once.
"""


def bound_fan_in(mesh: Mesh, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The same path, with steps of more than `MAX_FAN_IN` terms in stages of a few mesh dims each."""
    path = [layouts[0]]
    for a, b in pairwise(layouts):
        layout = a
        for mesh_dims in _stages(mesh, a, b)[:-1]:
            for m in mesh_dims:
                layout = layout.with_placement([m], b.placements[m])
            path.append(layout)
        path.append(b)
    return tuple(path)


def exceeds_fan_in(mesh: Mesh, a: Layout, b: Layout) -> bool:
    """Whether `bound_fan_in` splits the step from `a` to `b`."""
    return len(_stages(mesh, a, b)) > 1


def _stages(mesh: Mesh, a: Layout, b: Layout) -> list[list[int]]:
    """The mesh dims that each stage reduces, in the order in which they cut a tensor dim in `b`."""
    reduced = [m for m, p in enumerate(a.placements) if isinstance(p, Partial) and b.placements[m] != p]
    place_in_order = {m: i for _, order in b.orders for i, m in enumerate(order)}
    reduced.sort(key=lambda m: (not isinstance(b.placements[m], Shard), place_in_order.get(m, 0), m))
    stages: list[list[int]] = [[]]
    terms = 1
    for m in reduced:
        if stages[-1] and terms * mesh.shape[m] > MAX_FAN_IN:
            stages.append([])
            terms = 1
        stages[-1].append(m)
        terms *= mesh.shape[m]
    return stages
