"""Paths through node layouts, for nodes that are not the product of mesh dims, so that no split of mesh dims helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from .cost.node_cost import node_step_price
from .cost.priced_ranks import priced_ranks
from .cost.step_cost import StepPrice
from .cost.topology import Topology
from .exchange.node_change import NodeChange, layout_change
from .layouts.dtypes import ITEMSIZE
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout, pairs_of
from .layouts.mesh import Mesh
from .layouts.node_layout import MAX_RANKS, Kind, NodeLayout
from .layouts.placements import Partial, Replicate
from .path import Path

_MOST_BOXES = 128  # of the strided shards of all ranks


def best_path(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology, found: Path
) -> Path:
    """The cheapest of `found`, which a search has found, and of the paths in which the ranks of a node share what it
    receives, and add what it sends.

    It is `found` where the nodes are the product of mesh dims, for strided shards in many pieces, for mesh dims that
    become partial, and on meshes of more than `MAX_RANKS` ranks.
    """
    if not _applies(mesh, source, target, topology):
        return found
    best = found
    prices: dict[tuple[Layout, Layout], StepPrice] = {}
    source_bytes = math.prod(held_sizes(shape, source, mesh.shape, (0,) * mesh.ndim)) * ITEMSIZE[dtype]
    for layouts in dict.fromkeys(_paths(mesh, shape, source, target, topology)):
        if not _replicas_are_equal(layouts) or any(map(_cuts_strided, layouts)):
            continue
        us, peak = topology.call_us, 0
        for i, (a, b) in enumerate(pairwise(layouts)):
            if (a, b) not in prices:
                change = layout_change(mesh, dtype, a, b, topology.rank_nodes)
                assert isinstance(change, NodeChange)
                prices[a, b] = node_step_price(change, shape, topology)
            step = prices[a, b]
            us += round(step.us, 3)
            peak = max(peak, step.peak_bytes + (source_bytes if i else 0))
            if us >= best.us:
                break
        else:
            best = Path(layouts, us, peak)
    return best


def _applies(mesh: Mesh, source: Layout, target: Layout, topology: Topology) -> bool:
    if not (has_few_boxes(mesh, source) and has_few_boxes(mesh, target)):
        return False
    if any(isinstance(b, Partial) and a != b for a, b in zip(source.placements, target.placements, strict=True)):
        return False
    return has_irregular_nodes(mesh, topology)


def has_few_boxes(mesh: Mesh, layout: Layout) -> bool:
    """Whether all shards together have few boxes: strided ones have many, each of which is planned by itself."""
    if not layout.strided_dims:
        return True
    splits = (split for d in layout.strided_dims for _, split in pairs_of(layout.cuts(d)))
    return mesh.size * math.prod(splits) <= _MOST_BOXES


def has_irregular_nodes(mesh: Mesh, topology: Topology) -> bool:
    """Whether ranks share nodes that are not the product of mesh dims, on a mesh of up to `MAX_RANKS` ranks."""
    if topology.rank_nodes is None or not 2 < mesh.size <= MAX_RANKS:
        return False
    ranks = priced_ranks(mesh, topology)
    on_node = ranks.members.sum(axis=1)
    inside = np.prod([mesh.shape[m] for m in ranks.inside], dtype=np.int64)
    return len(on_node) > 1 and bool((on_node > 1).any()) and not bool((on_node == inside).all())


def _replicas_are_equal(layouts: tuple[Layout, ...]) -> bool:
    """Whether all replicas of a sum have the same bits: nodes that add other terms round otherwise."""
    for a, b in pairwise(layouts):
        if isinstance(a, NodeLayout) and a.kind == "node sums":
            cut = {*a.along, *(b.along if isinstance(b, NodeLayout) else ())}
            ends = enumerate(zip(a.placements, b.placements, strict=True))
            if not a.is_alike_along([m for m, (x, y) in ends if x == y == Replicate() and m not in cut]):
                return False
    return True


def _cuts_strided(layout: Layout) -> bool:
    """Whether a layout cuts a tensor dim with a strided shard by nodes, which `NodeChange` does not know."""
    return isinstance(layout, NodeLayout) and layout.tensor_dim in layout.base.strided_dims


def _paths(
    mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, topology: Topology
) -> Iterator[tuple[Layout, ...]]:
    dims = [m for m in range(mesh.ndim) if mesh.shape[m] > 1]
    summed = tuple(
        m for m in dims if isinstance(source.placements[m], Partial) and target.placements[m] != source.placements[m]
    )
    replicated = tuple(m for m in dims if target.placements[m] == Replicate())
    strided = {*source.strided_dims, *target.strided_dims}
    largest = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: (d in strided, -shape[d]))

    def cut(kind: Kind, base: Layout, along: tuple[int, ...]) -> Callable[[int], NodeLayout]:
        return lambda d: NodeLayout(kind, base, d, along, mesh, topology.rank_nodes)

    node_shares = cut("node shares", target, replicated)
    replicas = tuple(m for m in dims if source.placements[m] == Replicate())
    alongs = dict.fromkeys((summed, tuple(sorted(summed + replicas))))
    sums = [cut("node sums", source, along) for along in alongs]
    shares = cut("shares", target, replicated)
    reduced = source.with_placement(summed, Replicate())
    reduced_shares = [cut("shares", reduced, along) for along in alongs]
    for d in largest[:2]:
        ends: list[tuple[Layout, ...]] = [(target,)]
        if replicated:
            ends += [(node_shares(d), target)]
            if summed:
                ends += [(shares(d), node_shares(d), target), (shares(d), target)]
        if summed and reduced != target:
            ends += [(shares_of(d), *end) for end in ends[:2] for shares_of in reduced_shares]
        for end in sorted(ends, key=len, reverse=True):  # the cheapest tend to be long
            if summed:
                yield from ((source, of_nodes(d), *end) for of_nodes in sums)
            if len(end) > 1:
                yield source, *end
