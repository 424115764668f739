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
from .exchange.layout_change import LayoutChange
from .exchange.node_change import layout_change
from .exchange.steps import Step
from .layouts.dtypes import ITEMSIZE
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout
from .layouts.mesh import Mesh, union_mesh
from .layouts.node_layout import MAX_RANKS, NodeLayout
from .layouts.placements import Partial, Replicate, Shard
from .node_paths import best_path, has_few_boxes, has_irregular_nodes
from .path import Path, with_others
from .program import Program
from .request import Request
from .search import Search

Leg = tuple[Mesh, Layout, Mesh, Layout]
"""One part of a path: source mesh, source layout, target mesh, target layout."""


@lru_cache(maxsize=4096)
def plan_cross_mesh(request: Request) -> Program:
    """Plan a request whose source and target are on different meshes.

    Partial values are reduced on the source mesh and created on the target mesh, with one exchange in between. With a
    topology values are reduced on the path that a request on the source mesh alone would take, and the exchange may
    bring shards to the target mesh, which are then all-gathered inside its nodes.

    Raises:
        ArgumentError: no plan that was found stays within `max_bytes`.
    """
    source_mesh, shape, dtype, source, target, target_mesh = request.fields()
    topology, max_bytes = request.topology, request.max_bytes
    source, target = source.without_size_one(source_mesh.shape), target.without_size_one(target_mesh.shape)
    partial = [m for m, p in enumerate(target.placements) if isinstance(p, Partial)]
    whole = target.with_placement(partial, Replicate())
    candidates: list[list[Leg]] = []
    for reduced in _reducing_paths(source_mesh, shape, dtype, source, topology):
        for gathered in _gathering_paths(target_mesh, shape, whole, topology, (source_mesh, reduced[-1])):
            ends = [(source_mesh, layout) for layout in reduced]
            ends += [(target_mesh, layout) for layout in (*gathered, target)]
            candidates.append([(*a, *b) for a, b in pairwise(ends) if a != b])
    if topology is None:
        legs = min(candidates, key=lambda legs: (_bytes_received(legs, shape, dtype), len(legs)))
        return _program(request, legs, (), request.rank)
    paths = [(_path(legs, shape, dtype, topology), legs) for legs in candidates]
    paths.sort(key=lambda entry: (entry[0].us, len(entry[1])))

    def program(index: int, rank: int | None) -> Program:
        others = with_others([path for path, _ in paths], index).others
        plain = tuple([path for path in others if not any(isinstance(x, NodeLayout) for x in path.layouts)])
        return _program(request, paths[index][1], plain, rank)

    is_large = union_mesh(source_mesh, target_mesh).size > PRICED_WHOLE
    if max_bytes is None:
        return program(0, request.rank)
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
    topology, union = request.topology, union_mesh(source_mesh, target_mesh)
    steps: tuple[Step, ...] = tuple([build_step(change, shape, rank) for change in _changes(request, legs)])
    return Program(union, shape, dtype, source, target, steps, rank, topology, others, source_mesh, target_mesh)


def _changes(request: Request, legs: list[Leg]) -> list[LayoutChange]:
    """The change of each leg, at the positions of the program."""
    nodes = None if request.topology is None else request.topology.rank_nodes
    union = union_mesh(request.mesh, request.target_mesh)
    return [layout_change(mesh, request.dtype, a, b, nodes, other, union) for mesh, a, other, b in legs]


def _reducing_paths(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, topology: Topology | None
) -> list[tuple[Layout, ...]]:
    """Paths on the source mesh to layouts without partial: sharded along any tensor dim, or replicated."""
    partial = [m for m, p in enumerate(source.placements) if isinstance(p, Partial)]
    if not partial:
        return [(source,)]
    shards = [source.with_placement(partial, Shard(d)) for d, n in enumerate(shape) if n > 1]
    paths = []
    for reduced in (*shards, source.with_placement(partial, Replicate())):
        if topology is None:
            paths.append(bound_fan_in(mesh, (source, reduced)))
        else:
            found = Search(mesh, shape, dtype, source, reduced, topology).cheapest()
            paths.append(best_path(mesh, shape, dtype, source, reduced, topology, found).layouts)
    return paths


def _gathering_paths(
    mesh: Mesh, shape: tuple[int, ...], whole: Layout, topology: Topology | None, sent: tuple[Mesh, Layout]
) -> list[tuple[Layout, ...]]:
    """Paths on the target mesh to `whole`, from what it may receive: `whole` itself, or parts of it that the ranks of a
    node then all-gather.

    Args:
        sent: the mesh and the layout that it receives from.
    """
    paths: list[tuple[Layout, ...]] = [(whole,)]
    replicated = [m for m, p in enumerate(whole.placements) if p == Replicate() and mesh.shape[m] > 1]
    if topology is None or not replicated:
        return paths
    cut = [d for d, n in enumerate(shape) if n > 1]
    inside = [m for m in priced_ranks(mesh, topology).inside if m in replicated]
    if inside:
        paths += [(whole.with_placement(inside, Shard(d)), whole) for d in cut]
    few_boxes = has_few_boxes(mesh, whole) and has_few_boxes(*sent)
    if has_irregular_nodes(mesh, topology) and sent[0].size <= MAX_RANKS and few_boxes:
        along, nodes = tuple(replicated), topology.rank_nodes
        shares = [NodeLayout("node shares", whole, d, along, mesh, nodes) for d in cut if d not in whole.strided_dims]
        paths += [(layout, whole) for layout in shares]
    return paths


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
