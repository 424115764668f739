"""Paths through node layouts, for nodes that are not the product of mesh dims, so that no split of mesh dims helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from .cost.node_cost import node_step_price
from .cost.priced_ranks import priced_ranks
from .cost.step_cost import StepPrice, step_price
from .cost.topology import Topology
from .exchange.node_change import NodeChange, layout_change
from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.node_layout import MAX_RANKS, Kind, NodeLayout
from .layouts.placements import Partial, Replicate
from .path import Path

_MAX_TENSOR_DIMS = 1  # the largest ones, that node layouts cut


def node_paths(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
) -> list[Path]:
    """The paths from `source` to `target` in which the ranks of a node share what it receives, and add what it sends;
    with their prices.

    Empty on a topology of `node_size` alone (`Topology.has_defaults`), where the nodes are the product of mesh dims,
    for strided shards, for mesh dims that become partial, and on meshes of more than `MAX_RANKS` ranks.
    """
    if not _applies(mesh, source, target, topology):
        return []
    paths: list[Path] = []
    prices: dict[tuple[Layout, Layout], StepPrice] = {}
    for layouts in dict.fromkeys(_paths(mesh, shape, source, target, topology)):
        us, peak = 0.0, 0
        for a, b in pairwise(layouts):
            if (a, b) not in prices:
                change = layout_change(mesh, dtype, a, b, topology.rank_nodes)
                if isinstance(change, NodeChange):
                    prices[a, b] = node_step_price(change, shape, topology)
                else:
                    prices[a, b] = step_price(change, shape, topology)
            step = prices[a, b]
            us += round(step.us, 3)
            peak = max(peak, step.peak_bytes)
        paths.append(Path(layouts, us + topology.call_us, peak))
    return paths


def _applies(mesh: Mesh, source: Layout, target: Layout, topology: Topology) -> bool:
    if topology.rank_nodes is None or topology.has_defaults or not 2 < mesh.size <= MAX_RANKS:
        return False
    if source.strided_dims or target.strided_dims:
        return False
    if any(isinstance(b, Partial) and a != b for a, b in zip(source.placements, target.placements, strict=True)):
        return False
    ranks = priced_ranks(mesh, topology)
    on_node = ranks.members.sum(axis=1)
    inside = np.prod([mesh.shape[m] for m in ranks.inside], dtype=np.int64)
    return len(on_node) > 1 and bool((on_node > 1).any()) and not bool((on_node == inside).all())


def _paths(
    mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, topology: Topology
) -> Iterator[tuple[Layout, ...]]:
    dims = [m for m in range(mesh.ndim) if mesh.shape[m] > 1]
    summed = tuple(
        m for m in dims if isinstance(source.placements[m], Partial) and target.placements[m] != source.placements[m]
    )
    replicated = tuple(m for m in dims if target.placements[m] == Replicate())
    largest = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -shape[d])[:_MAX_TENSOR_DIMS]

    def cut(kind: Kind, base: Layout, along: tuple[int, ...]) -> Callable[[int], NodeLayout]:
        return lambda d: NodeLayout(kind, base, d, along, mesh, topology.rank_nodes)

    sums, node_shares = cut("node sums", source, summed), cut("node shares", target, replicated)
    shares = cut("shares", target, replicated)
    for d in largest:
        ends: list[tuple[Layout, ...]] = [(target,)]
        if replicated:
            ends += [(node_shares(d), target)]
            if summed:
                ends += [(shares(d), node_shares(d), target), (shares(d), target)]
        for end in ends:
            if len(end) > 1:
                yield source, *end
            if summed:
                yield source, sums(d), *end
