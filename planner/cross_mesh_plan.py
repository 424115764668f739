"""Plans a redistribution between two meshes: one exchange between them, with steps on each mesh where needed."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from ..errors import ArgumentError
from .bounded_fan_in import bound_fan_in
from .cost.cross_mesh_cost import step_price_between
from .cost.priced_ranks import PRICED_WHOLE, priced_ranks
from .cost.topology import Topology
from .exchange.build_steps import build_step
from .exchange.node_change import layout_change
from .exchange.steps import Step
from .layouts.dtypes import ITEMSIZE
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout
from .layouts.mesh import Mesh, union_mesh
from .layouts.placements import Partial, Replicate, Shard
from .path import Path, with_others
from .program import Program
from .request import Request

Leg = tuple[Mesh, Layout, Mesh, Layout]
"""One part of a path: source mesh, source layout, target mesh, target layout."""


@lru_cache(maxsize=4096)
def plan_cross_mesh(request: Request) -> Program:
    """Plan a request whose source and target are on different meshes.

    Partial values are reduced on the source mesh and created on the target mesh, with one exchange in between. With a
    topology the exchange may also bring shards to the target mesh, which then all-gathers them inside its nodes.

    Raises:
        ArgumentError: no plan that was found stays within `max_bytes`.
    """
    source_mesh, shape, dtype, source, target, target_mesh = request.fields()
    topology, max_bytes = request.topology, request.max_bytes
    source, target = source.without_size_one(source_mesh.shape), target.without_size_one(target_mesh.shape)
    partial = [m for m, p in enumerate(target.placements) if isinstance(p, Partial)]
    whole = target.with_placement(partial, Replicate())
    candidates: list[list[Leg]] = []
    for sent in _reduced_sources(source, shape):
        for received in _received_layouts(target_mesh, whole, shape, topology):
            ends = [
                (source_mesh, source), (source_mesh, sent), (target_mesh, received), (target_mesh, whole),
                (target_mesh, target),
            ]  # fmt: skip
            candidates.append([(*a, *b) for a, b in pairwise(ends) if a != b])
    if topology is None:
        fewest = min(candidates, key=lambda legs: (_bytes_received(legs, shape, dtype), len(legs)))
        return _program(request, fewest, (), request.rank)
    paths = [(_path(legs, shape, dtype, topology), legs) for legs in candidates]
    paths.sort(key=lambda entry: (entry[0].us, len(entry[1])))

    def program(index: int, rank: int | None) -> Program:
        others = with_others([path for path, _ in paths], index).others
        return _program(request, paths[index][1], others, rank)

    if max_bytes is None:
        return program(0, request.rank)
    is_large = union_mesh(source_mesh, target_mesh).size > PRICED_WHOLE
    peaks = []
    for index, (path, _) in enumerate(paths):
        peaks.append(path.peak_bytes if is_large else max(program(index, None).peak_bytes))
        if peaks[-1] <= max_bytes:
            return program(index, request.rank)
    smallest = paths[peaks.index(min(peaks))][0]
    raise ArgumentError(
        f"max_bytes: {max_bytes}; allowed: at least {min(peaks)}, needed by the smallest plan found, {smallest}"
    )


def _program(request: Request, legs: list[Leg], others: tuple[Path, ...], rank: int | None) -> Program:
    source_mesh, shape, dtype, source, target, target_mesh = request.fields()
    topology = request.topology
    union, nodes = union_mesh(source_mesh, target_mesh), None if topology is None else topology.rank_nodes
    steps: list[Step] = []
    for mesh, a, other, b in legs:
        layouts = bound_fan_in(mesh, (a, b))  # between two meshes no value is reduced
        changes = [layout_change(mesh, dtype, x, y, nodes, other, union) for x, y in pairwise(layouts)]
        steps += [build_step(change, shape, rank) for change in changes]
    return Program(union, shape, dtype, source, target, tuple(steps), rank, topology, others, source_mesh, target_mesh)


def _reduced_sources(source: Layout, shape: tuple[int, ...]) -> list[Layout]:
    """The layouts without partial that the source may be reduced to: sharded along any tensor dim, or replicated."""
    partial = [m for m, p in enumerate(source.placements) if isinstance(p, Partial)]
    if not partial:
        return [source]
    shards = [source.with_placement(partial, Shard(d)) for d, n in enumerate(shape) if n > 1]
    return [*shards, source.with_placement(partial, Replicate())]


def _received_layouts(mesh: Mesh, whole: Layout, shape: tuple[int, ...], topology: Topology | None) -> list[Layout]:
    """The layouts that the target mesh may receive: the target itself, or shards of it inside each node."""
    inside = []
    if topology is not None:
        inside = [m for m in priced_ranks(mesh, topology).inside if whole.placements[m] == Replicate()]
    return [whole, *(whole.with_placement(inside, Shard(d)) for d, n in enumerate(shape) if inside and n > 1)]


def _path(legs: list[Leg], shape: tuple[int, ...], dtype: str, topology: Topology) -> Path:
    """The path of some legs, with its price."""
    layouts = (legs[0][1], *(leg[3] for leg in legs))
    prices = [step_price_between(*leg, shape, dtype, topology) for leg in legs]
    source_bytes = _largest_shard(shape, legs[0][1], legs[0][0]) * ITEMSIZE[dtype]
    peak = max(p.peak_bytes + (source_bytes if i else 0) for i, p in enumerate(prices))
    return Path(layouts, topology.call_us + sum(round(p.us, 3) for p in prices), peak)


def _bytes_received(legs: list[Leg], shape: tuple[int, ...], dtype: str) -> int:
    """The bytes that the largest shards receive; all ranks compute the same."""
    received = 0
    for mesh, a, other, b in legs:
        contributors = layout_change(mesh, dtype, a, b, None, other).contributors
        received += _largest_shard(shape, b, other) * contributors
    return received * ITEMSIZE[dtype]


def _largest_shard(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> int:
    """The elements of the shard of the first rank, which is the largest."""
    return math.prod(held_sizes(shape, layout, mesh.shape, (0,) * mesh.ndim))
