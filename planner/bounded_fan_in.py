"""A reduction over very many ranks, a few mesh dims at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .layout import Layout
from .mesh import Mesh
from .placements import Partial, Shard

MOST_TERMS = 512
"""Terms of one sum in one step. A rank knows of each piece that it sends who else sends, so its part of a step takes
room by its peers times the terms; and peers cost messages. Scattered in stages as many bytes come in as at once."""


def staged(mesh: Mesh, stops: Sequence[Layout]) -> tuple[Layout, ...]:
    """The same route with steps of more than `MOST_TERMS` terms in stages, where several mesh dims make them up."""
    found = [stops[0]]
    for a, b in pairwise(stops):
        at = a
        for mesh_dims in _groups(mesh, a, b)[:-1]:
            for m in mesh_dims:
                at = at.with_placement([m], b.placements[m])
            found.append(at)
        found.append(b)
    return tuple(found)


def is_too_wide(mesh: Mesh, a: Layout, b: Layout) -> bool:
    """Whether `staged` has stages for a step."""
    return len(_groups(mesh, a, b)) > 1


def _groups(mesh: Mesh, a: Layout, b: Layout) -> list[list[int]]:
    """Mesh dims that are reduced together, in the order in which they cut a tensor dim in `b`."""
    reduced = [m for m, p in enumerate(a.placements) if isinstance(p, Partial) and b.placements[m] != p]
    place = {m: i for _, order in b.orders for i, m in enumerate(order)}
    reduced.sort(key=lambda m: (not isinstance(b.placements[m], Shard), place.get(m, 0), m))
    groups: list[list[int]] = [[]]
    terms = 1
    for m in reduced:
        if groups[-1] and terms * mesh.shape[m] > MOST_TERMS:
            groups.append([])
            terms = 1
        groups[-1].append(m)
        terms *= mesh.shape[m]
    return groups
