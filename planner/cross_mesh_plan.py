"""The program from a layout on one mesh to a layout on another: one exchange between, and what is needed around it."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from ..errors import ArgumentError
from .arguments import Asked
from .bounded_fan_in import staged
from .cross_mesh_exchange import Crossing, price_step, union
from .dtypes import ITEMSIZE
from .exchange import change_of
from .index_sets import held_sizes
from .layout import Layout
from .mesh import Mesh
from .placements import Partial, Replicate, Shard
from .program import Exchange, Local, Program, Step
from .ranks import PRICED_WHOLE, ranks_of
from .search import Route
from .steps import step_inside
from .topology import Topology

_OTHERS = 3

Leg = tuple[Mesh, Layout, Mesh, Layout]


@lru_cache(maxsize=4096)
def plan_crossing(source_mesh: Mesh, target_mesh: Mesh, asked: Asked) -> Program:
    """Values that are partial are reduced on the source's mesh, and made partial on the target's; one exchange between.

    On a topology the target's mesh may also take in shards, which its nodes then gather inside.

    Raises:
        ArgumentError: no route keeps to `max_bytes`.
    """
    shape, topology, max_bytes = asked.shape, asked.topology, asked.max_bytes
    source, target = asked.src.without_size_one(source_mesh.shape), asked.dst.without_size_one(target_mesh.shape)
    whole = target.with_placement([m for m, p in enumerate(target.placements) if isinstance(p, Partial)], Replicate())
    ends = (source_mesh, source), (target_mesh, whole), (target_mesh, target)
    routes = []
    for first in _without_partial(source, shape):
        for last in _taken_in(target_mesh, whole, shape, topology):
            stops = [ends[0], (source_mesh, first), (target_mesh, last), *ends[1:]]
            legs = [(*a, *b) for a, b in pairwise(stops) if a != b]
            routes.append((_priced(legs, shape, asked.dtype, topology), legs))
    routes.sort(key=lambda found: (found[0].us, len(found[1])))

    def program(number: int, rank: int | None) -> Program:
        others = (
            () if topology is None else tuple(route for i, (route, _) in enumerate(routes) if i != number)[:_OTHERS]
        )
        return _program(source_mesh, target_mesh, asked, routes[number][1], others, rank)

    if max_bytes is None:
        return program(0, asked.rank)
    held = []
    for number, (route, _) in enumerate(routes):
        both = union(source_mesh, target_mesh)
        held.append(route.peak_bytes if both.size > PRICED_WHOLE else max(program(number, None).peak_bytes))
        if held[-1] <= max_bytes:
            return program(number, asked.rank)
    least = routes[held.index(min(held))][0]
    raise ArgumentError(f"max_bytes: {max_bytes}; the plan found that holds least, {least}, needs {min(held)}")


def _program(
    source_mesh: Mesh, target_mesh: Mesh, asked: Asked, legs: list[Leg], others: tuple[Route, ...], rank: int | None
) -> Program:
    shape, dtype, topology = asked.shape, asked.dtype, asked.topology
    both, node_size = union(source_mesh, target_mesh), None if topology is None else topology.node_size
    steps: list[Step] = []
    for mesh, a, other, b in legs:
        if mesh == other:
            stops = staged(mesh, (a, b))
            changes = [change_of(mesh, dtype, x, y, node_size) for x, y in pairwise(stops)]
            steps += [step_inside(both, change, shape, rank) for change in changes]
            continue
        steps.append(step_between(Crossing(shape, mesh, a, other, b, node_size), rank))
    ends = asked.src, asked.dst, tuple(steps), rank
    return Program(both, shape, dtype, *ends, topology, others, source_mesh, target_mesh)


def step_between(crossing: Crossing, rank: int | None) -> Step:
    """The step from mesh to mesh, in positions of everyone."""
    ends = crossing.source_mesh, crossing.source, crossing.target_mesh, crossing.target
    common = *ends, crossing.boxes(rank), None, 0
    return Exchange(*common, None) if crossing.communicates() else Local(*common)


def _without_partial(source: Layout, shape: tuple[int, ...]) -> list[Layout]:
    """What the source may be reduced to: shards of any tensor dim, or the same everywhere."""
    partial = [m for m, p in enumerate(source.placements) if isinstance(p, Partial)]
    if not partial:
        return [source]
    shards = [source.with_placement(partial, Shard(d)) for d, n in enumerate(shape) if n > 1]
    return [*shards, source.with_placement(partial, Replicate())]


def _taken_in(mesh: Mesh, whole: Layout, shape: tuple[int, ...], topology: Topology | None) -> list[Layout]:
    """What the target's mesh may take in: what is wanted, or shards of it that ranks of a node share."""
    shared = []
    if topology is not None:
        shared = [m for m in ranks_of(mesh, topology).inside if whole.placements[m] == Replicate()]
    return [whole, *(whole.with_placement(shared, Shard(d)) for d, n in enumerate(shape) if shared and n > 1)]


def _priced(legs: list[Leg], shape: tuple[int, ...], dtype: str, topology: Topology | None) -> Route:
    """Microseconds on a topology; without one the bytes that the largest shards take in: every rank prices alike."""
    stops = (legs[0][1], *(leg[3] for leg in legs)) if legs else ()
    if topology is not None:
        prices = [price_step(*leg, shape, dtype, topology) for leg in legs]
        held = _largest(shape, legs[0][1], legs[0][0]) * ITEMSIZE[dtype]
        peak = max(p.peak_bytes + (held if i else 0) for i, p in enumerate(prices))
        return Route(stops, sum(round(p.us, 3) for p in prices), peak)
    taken = 0
    for mesh, a, other, b in legs:
        contributors = change_of(mesh, dtype, a, b).contributors if mesh == other else 1
        taken += _largest(shape, b, other) * contributors
    return Route(stops, taken * ITEMSIZE[dtype], 0)


def _largest(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> int:
    """Elements of the shard of the first rank, which no shard exceeds."""
    return math.prod(held_sizes(shape, layout, mesh.shape, (0,) * mesh.ndim))
