"""Changes from or to a `NodeLayout`, and the boxes that they transfer."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ..layouts.index_sets import held_box, valid_box
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.node_layout import NodeLayout
from ..layouts.nodes import Nodes, nodes_of
from ..layouts.placements import Partial, Replicate
from .layout_change import LayoutChange
from .transfer_table import FILL, TransferTable


class NodeChange(LayoutChange):
    """The change from layout `source` to layout `target` on one mesh, at least one of which is a `NodeLayout`.

    Neither has strided shards, and no mesh dim becomes partial.

    Attributes:
        term: [positions] the index of the term that each rank holds.
        contributors: the number of terms per element on the rank that reduces most; others have `FILL` instead.
    """

    def __init__(self, mesh: Mesh, dtype: str, source: Layout, target: Layout, nodes: Nodes | None) -> None:
        super().__init__(mesh, dtype, source, target, nodes)
        along = {m for x in (source, target) if isinstance(x, NodeLayout) for m in x.along}
        assert self.closure is not None
        self.closure = self.source_dims = self.target_dims = tuple(sorted({*self.closure, *along}))
        self.replicas, self.split, self.shards_split, self.keepers = (), (), (), ()
        summed = [m for m, p in enumerate(source.placements) if isinstance(p, Partial) and target.placements[m] != p]
        if isinstance(target, NodeLayout) and target.kind == "node sums":
            summed = list(target.along)
        self.reduced = tuple(summed)
        self.term = np.zeros(mesh.size, dtype=np.int64)
        self.contributors = 1
        if isinstance(source, NodeLayout) and source.kind == "node sums":
            self.term, self.contributors = source.node, int(source.number_of_nodes.max())
        elif summed:
            for m in summed:
                self.term = self.term * mesh.shape[m] + mesh.coordinates[m]
            self.contributors = math.prod(mesh.shape[m] for m in summed)
            if isinstance(target, NodeLayout) and target.kind == "node sums":
                self.contributors = int(target.ranks_on_node.max())

    @property
    def divisor(self) -> float:
        """The divisor of an average, which the first sum applies."""
        if isinstance(self.source, NodeLayout):
            return 1
        averages = [m for m in self.reduced if self.source.placements[m] == Partial("avg")]
        return math.prod(self.source_mesh.shape[m] for m in averages)

    @cached_property
    def is_local(self) -> bool:
        return False

    @cached_property
    def is_strided(self) -> bool:
        return False

    @cached_property
    def _receives_from(self) -> np.ndarray:
        """[receivers, holders] whether a rank may send to another: they have the partial values of the same mesh dims
        that are not reduced, and where a node adds its terms they share it."""
        mesh, target = self.source_mesh, self.target
        kept = [m for m in self.source.partial_dims if m not in self.reduced]
        if isinstance(self.source, NodeLayout) and self.source.kind == "node sums":
            # Replicas of a value are not added by the same nodes, so a sum takes all its terms from one replica.
            kept += [m for m, p in enumerate(self.source.placements) if p == Replicate()]
        alike = np.ones((mesh.size, mesh.size), dtype=bool)
        to_sums = isinstance(target, NodeLayout) and target.kind == "node sums"
        same = range(mesh.ndim) if to_sums else kept
        for m in same:
            if not (to_sums and m in self.reduced):
                alike &= mesh.coordinates[m][:, None] == mesh.coordinates[m]
        assert self.closure is not None
        for m in set(range(mesh.ndim)).difference(self.closure):  # only ranks of the step's group take part
            alike &= mesh.coordinates[m][:, None] == mesh.coordinates[m]
        return alike & self._near if to_sums else alike

    @cached_property
    def _near(self) -> np.ndarray:
        node = nodes_of(self.source_mesh.rank_array, self.nodes)
        return node[:, None] == node


@lru_cache(maxsize=1024)
def node_transfer_table(change: NodeChange, shape: tuple[int, ...]) -> TransferTable:
    """The boxes of all ranks.

    Of equal holders of a box the receiver itself comes first, then those of its node, then all, in turn.
    """
    mesh, ndim = change.source_mesh, len(shape)
    held, held_from = _boxes(mesh, change.source, shape)
    wanted, wanted_from = _boxes(mesh, change.target, shape)
    parts = [_boxes_of(change, receiver, held, wanted[receiver]) for receiver in range(mesh.size)]
    receiver, sender, start, extent = (np.concatenate(x) for x in zip(*parts, strict=True))
    ones = np.ones_like(extent)
    starts = start - held_from[sender[:, 0]], start - wanted_from[receiver]
    return TransferTable(receiver, sender, *starts, extent, ones, ones, tuple(range(ndim)))


def elements_into_nodes(change: NodeChange, shape: tuple[int, ...]) -> np.ndarray:
    """[nodes] the elements that enter each node, by ascending number of the node."""
    table = node_transfer_table(change, shape)
    node = np.unique(nodes_of(change.source_mesh.rank_array, change.nodes), return_inverse=True)[1]
    receiver = np.broadcast_to(table.receiver[:, None], table.sender.shape)
    elements = np.broadcast_to(table.elements[:, None], table.sender.shape)
    far = (table.sender != FILL) & (node[table.sender] != node[receiver])
    return np.bincount(node[receiver[far]], weights=elements[far], minlength=node.max() + 1).astype(np.int64)


@lru_cache(maxsize=256)
def _boxes(mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[positions, tensor dims, 2] what each rank has values of, and [positions, tensor dims] where its memory begins in
    the tensor."""
    positions, of_all = range(mesh.size), (mesh.size, len(shape), 2)
    valid = np.array([valid_box(shape, layout, mesh, p) for p in positions], dtype=np.int64).reshape(of_all)
    memory = [held_box(shape, layout, mesh.shape, mesh.coordinate(p)) for p in positions]
    return valid, np.array(memory, dtype=np.int64).reshape(of_all)[:, :, 0]


def _boxes_of(change: NodeChange, receiver: int, held: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, ...]:
    """The boxes of one receiver: receiver [n], senders [n, contributors], start in the tensor [n, tensor dims],
    extent."""
    ndim, terms = held.shape[1], change.contributors
    low, high = np.maximum(held[:, :, 0], wanted[:, 0]), np.minimum(held[:, :, 1], wanted[:, 1])
    meets = change._receives_from[receiver].copy()
    for d in range(ndim):  # faster than `all` along an axis of so few
        meets &= low[:, d] < high[:, d]
    holders = np.flatnonzero(meets)
    holders = holders[np.argsort(change.term[holders], kind="stable")]
    if not len(holders) or (wanted[:, 0] >= wanted[:, 1]).any():
        none = np.zeros((0, ndim), dtype=np.int64)
        return np.zeros(0, dtype=np.int64), np.zeros((0, terms), dtype=np.int64), none, none
    spans = [list(pairwise(sorted({*low[holders, d].tolist(), *high[holders, d].tolist()}))) for d in range(ndim)]
    index = np.indices([len(x) for x in spans]).reshape(ndim, -1)
    cells = np.stack([np.array(x, dtype=np.int64)[i] for x, i in zip(spans, index, strict=True)], axis=1)
    start, stop = cells[:, :, 0], cells[:, :, 1]
    holds = np.ones((len(start), len(holders)), dtype=bool)
    for d in range(ndim):
        holds &= (held[holders, d, 0] <= start[:, d, None]) & (stop[:, d, None] <= held[holders, d, 1])
    # Equal holders of each term: the receiver itself, else those of its node, else all; one of them in turn.
    term = change.term[holders]
    begins = np.ones(len(term), dtype=bool)
    begins[1:] = term[1:] != term[:-1]
    first, inverse = np.flatnonzero(begins), begins.cumsum() - 1
    preference = np.where(holds, 1 + change._near[receiver, holders] + (holders == receiver), 0)
    best = np.maximum.reduceat(preference, first, axis=1)[:, inverse]
    equal = holds & (preference == best)
    before = equal.cumsum(axis=1) - equal
    index = before - before[:, first][:, inverse]
    number = np.add.reduceat(equal.astype(np.int64), first, axis=1)[:, inverse]
    turn = (np.arange(len(start)) + receiver)[:, None]
    cell, holder = np.nonzero(equal & (index == turn % np.maximum(number, 1)))
    senders = np.full((len(start), terms), FILL)
    senders[cell, inverse[holder]] = holders[holder]
    assert (senders[:, 0] != FILL).all(), "a box without a holder"
    return np.full(len(start), receiver), senders, start, stop - start


@lru_cache(maxsize=4096)
def layout_change(
    mesh: Mesh,
    dtype: str,
    source: Layout,
    target: Layout,
    nodes: Nodes | None = None,
    target_mesh: Mesh | None = None,
    positions: Mesh | None = None,
) -> LayoutChange:
    """The change between two layouts; cached. Args as for `LayoutChange`."""
    if isinstance(source, NodeLayout) or isinstance(target, NodeLayout):
        return NodeChange(mesh, dtype, source, target, nodes)
    return LayoutChange(mesh, dtype, source, target, nodes, target_mesh, positions)
