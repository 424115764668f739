"""Paths through node layouts, for nodes that are not the product of mesh dims, so that no split of mesh dims helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from .cost.link_time import equal_rates, link_time
from .cost.node_cost import node_step_price
from .cost.priced_ranks import priced_ranks
from .cost.step_cost import StepPrice
from .cost.topology import Topology
from .exchange.layout_change import LayoutChange
from .exchange.node_change import NodeChange, layout_change
from .exchange.senders import transfer_table
from .exchange.transfer_table import elements_between
from .layouts.distinct import distinct, numbered
from .layouts.dtypes import ITEMSIZE
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout, pairs_of
from .layouts.mesh import Mesh
from .layouts.node_layout import MAX_RANKS, Kind, NodeLayout
from .layouts.placements import Partial, Replicate
from .path import Path
from .share_weights import balanced_shares

_WIDE = 16
"""The mesh size up to which more paths are tried: cuts of the two largest tensor dims, not only of the largest, sums to
which replicas of the source contribute, and parts of every node's share."""
_PROMISING = 1.35
"""Paths that cost more than this times the cheapest are given up."""
_MOST_BOXES = 128  # of the strided shards of all ranks
_BALANCED = 64  # ranks times cheapest paths that are also tried with shares of different sizes, or in pieces
ALIKE = 1.25
"""Prices that differ less count as equal: they add up the busiest node of each step, as if all waited after it, and
how fast a link is while both directions are in use is assumed."""
_MORE = 0.05
"""The part of the tensor that a node may receive more than the least, on a path whose links take less time."""
_SAME_TIME = 1.02
"""Times of links that differ less count as equal: parts of a tensor of different sizes are rounded."""


def best_path(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology, found: Path
) -> Path:
    """The best of `found`, the cheapest path that a search has found, and of the paths in which the ranks of a node
    share what it receives, and add what it sends: of those that cost at most `ALIKE` times the cheapest the one that
    `least_traffic` selects.

    It is `found` where the nodes are the product of mesh dims, for strided shards in many pieces, for mesh dims that
    become partial, and on meshes of more than `MAX_RANKS` ranks.
    """
    paths = [found, *node_paths(mesh, shape, dtype, source, target, topology)]
    limit = ALIKE * min(path.us for path in paths)
    paths = sorted((path for path in paths if path.us <= limit), key=lambda path: path.us)

    def changes(path: Path) -> list[LayoutChange]:
        return [layout_change(mesh, dtype, a, b, topology.rank_nodes) for a, b in pairwise(path.layouts)]

    return paths[least_traffic([changes(path) for path in paths], shape, topology)] if len(paths) > 1 else paths[0]


def least_traffic(paths: Sequence[Sequence[LayoutChange]], shape: tuple[int, ...], topology: Topology) -> int:
    """The index of the path with the least traffic between nodes, of paths by ascending price: it lets the node that
    receives most receive at most `_MORE` of the tensor more than any other path; of those its links take the least
    time, up to `_SAME_TIME`; of those they take the least if no message takes up what others leave of a link, as
    connections do only in part; of those that node receives least.

    Args:
        paths: the changes of each, which all have the same positions.
    """
    ranks = paths[0][0].positions.rank_array
    node = numbered(topology.nodes_of(ranks))[1]
    sent = [[elements_between(transfer_table(change, shape), len(ranks)) for change in path] for path in paths]
    received = [_most_received(sum(steps[1:], steps[0]), node) for steps in sent]
    limit = min(received) + _MORE * math.prod(shape)
    few = [index for index, elements in enumerate(received) if elements <= limit]
    times = {index: sum(link_time(step, node) for step in sent[index]) for index in few}
    soonest = _SAME_TIME * min(times.values())
    alike = [index for index in few if times[index] <= soonest]
    slowest = {index: sum(link_time(step, node, equal_rates) for step in sent[index]) for index in alike}
    soonest = _SAME_TIME * min(slowest.values())
    return min((index for index in alike if slowest[index] <= soonest), key=received.__getitem__)


def _most_received(sent: np.ndarray, node: np.ndarray) -> int:
    """The elements that enter the node that receives most."""
    into = np.where(node[:, None] == node, 0, sent).sum(axis=0)
    return int(np.bincount(node, into).max())


def node_paths(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
) -> list[Path]:
    """The paths that `best_path` compares with that of a search."""
    if not _applies(mesh, source, target, topology):
        return []
    paths: list[Path] = []
    prices: dict[tuple[Layout, Layout], StepPrice] = {}
    source_bytes = math.prod(held_sizes(shape, source, mesh.shape, (0,) * mesh.ndim)) * ITEMSIZE[dtype]

    def add(layouts: tuple[Layout, ...]) -> None:
        us, peak = topology.call_us, 0
        most = _PROMISING * min([path.us for path in paths], default=math.inf)
        for i, (a, b) in enumerate(pairwise(layouts)):
            if us > most:
                return
            if (a, b) not in prices:
                change = layout_change(mesh, dtype, a, b, topology.rank_nodes)
                assert isinstance(change, NodeChange)
                prices[a, b] = node_step_price(change, shape, topology)
            step = prices[a, b]
            us += round(step.us, 3)
            peak = max(peak, step.peak_bytes + (source_bytes if i else 0))
        paths.append(Path(layouts, us, peak))

    for layouts in dict.fromkeys(_paths(mesh, shape, source, target, topology)):
        if _replicas_are_equal(layouts) and not any(_cuts_strided(layout) for layout in layouts):
            add(layouts)
    nodes = len(distinct(topology.nodes_of(mesh.rank_array)))
    for path in sorted(paths, key=lambda path: path.us)[: _BALANCED // mesh.size]:
        if balanced := balanced_shares(path.layouts, shape, dtype):
            add(balanced)
        if mesh.size <= _WIDE and (pieces := _in_pieces(path.layouts, nodes)):
            add(pieces)
    return paths


def _in_pieces(layouts: tuple[Layout, ...], nodes: int) -> tuple[Layout, ...] | None:
    """A path through "shares" on which each rank of a node has a part of every node's share before and after them;
    None if it has no such layouts."""
    kinds = {layout.kind for layout in layouts if isinstance(layout, NodeLayout)}
    if "shares" not in kinds or len(kinds) == 1:
        return None
    return tuple([layout.cut_in(nodes) if isinstance(layout, NodeLayout) else layout for layout in layouts])


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
    alongs = dict.fromkeys((summed, tuple(sorted(summed + replicas)))[: 1 + (mesh.size <= _WIDE)])
    sums = [cut("node sums", source, along) for along in alongs]
    shares = cut("shares", target, replicated)
    reduced = source.with_placement(summed, Replicate())
    reduced_shares = [cut("shares", reduced, along) for along in alongs]
    for d in largest[: 1 + (mesh.size <= _WIDE)]:
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
