"""Changes from or to a `NodeLayout`, and the boxes that they transfer."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import numpy as np

from ..layouts.index_sets import boxes_of_all
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.node_layout import NodeLayout
from ..layouts.nodes import Nodes, nodes_of
from ..layouts.placements import Partial, Replicate
from .layout_change import LayoutChange
from .transfer_table import FILL, TransferTable

_NO_BOUND = np.iinfo(np.int64).max


class NodeChange(LayoutChange):
    """The change from layout `source` to layout `target`, at least one of which is a `NodeLayout`.

    Neither has strided shards, and no mesh dim becomes partial.

    Attributes:
        term: [positions] the index of the term that each rank holds.
        contributors: the number of terms per element on the rank that reduces most; others have `FILL` instead.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: str,
        source: Layout,
        target: Layout,
        nodes: Nodes | None,
        target_mesh: Mesh | None = None,
        positions: Mesh | None = None,
    ) -> None:
        super().__init__(mesh, dtype, source, target, nodes, target_mesh, positions)
        if self.closure is not None:
            along = {m for x in (source, target) if isinstance(x, NodeLayout) for m in x.along}
            self.closure = self.source_dims = self.target_dims = tuple(sorted({*self.closure, *along}))
        self.replicas, self.split, self.shards_split, self.keepers = (), (), (), ()
        summed = []
        if self.closure is not None:
            placements = enumerate(zip(source.placements, target.placements, strict=True))
            summed = [m for m, (p, wanted) in placements if isinstance(p, Partial) and wanted != p]
        if isinstance(target, NodeLayout) and target.kind == "node sums":
            summed = list(target.summed)
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
                self.contributors = int(target.terms_on_node.max())

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
        if self.closure is None:
            return np.ones((self.target_mesh.size, mesh.size), dtype=bool)
        kept = [m for m in self.source.partial_dims if m not in self.reduced]
        if isinstance(self.source, NodeLayout) and self.source.kind == "node sums":
            # Replicas of a value are not added by the same nodes, so a sum takes all its terms from one replica.
            added = self.source.along
            kept += [m for m, p in enumerate(self.source.placements) if p == Replicate() and m not in added]
        alike = np.ones((mesh.size, mesh.size), dtype=bool)
        to_sums = isinstance(target, NodeLayout) and target.kind == "node sums"
        same = range(mesh.ndim) if to_sums else kept
        for m in same:
            if not (isinstance(target, NodeLayout) and to_sums and m in target.along):
                alike &= mesh.coordinates[m][:, None] == mesh.coordinates[m]
        for m in set(range(mesh.ndim)).difference(self.closure):  # only ranks of the step's group take part
            alike &= mesh.coordinates[m][:, None] == mesh.coordinates[m]
        if isinstance(target, NodeLayout) and to_sums:
            alike &= self._near & target.adds
        return alike

    @cached_property
    def _near(self) -> np.ndarray:
        """[receivers, holders] whether they share a node."""
        receivers, holders = (nodes_of(m.rank_array, self.nodes) for m in (self.target_mesh, self.source_mesh))
        return receivers[:, None] == holders

    @cached_property
    def _is_itself(self) -> np.ndarray:
        """[receivers, holders] whether they are the same rank."""
        return self.target_mesh.rank_array[:, None] == self.source_mesh.rank_array


@lru_cache(maxsize=1024)
def node_transfer_table(change: NodeChange, shape: tuple[int, ...]) -> TransferTable:
    """The boxes of all ranks.

    A receiver's target shard is cut where a holder's part of it begins or ends. Of equal holders of a box the receiver
    itself comes first, then those of its node, then all, in turn.
    """
    held_from, held = shard_boxes(change.source_mesh, change.source, shape)
    wanted_from, wanted = shard_boxes(change.target_mesh, change.target, shape)
    low = np.maximum(held[:, :, 0], wanted[:, None, :, 0])  # [receivers, holders, tensor dims]
    high = np.minimum(held[:, :, 1], wanted[:, None, :, 1])
    meets = change._receives_from & (low < high).all(axis=2)
    receiver, start, stop, number = _cells(low, high, meets)
    holds = meets[receiver]
    for d in range(len(shape)):
        holds &= (held[:, d, 0] <= start[:, d, None]) & (stop[:, d, None] <= held[:, d, 1])
    sender = _senders(change, receiver, meets, holds, number)
    extent, ones = stop - start, np.ones_like(start)
    starts = start - held_from[sender[:, 0], :, 0], start - wanted_from[receiver, :, 0]
    positions = change.positions
    if positions is not change.source_mesh or positions is not change.target_mesh:
        receiver = positions.positions_of(change.target_mesh.rank_array[receiver])
        sender = np.where(sender == FILL, FILL, positions.positions_of(change.source_mesh.rank_array[sender]))
    table = TransferTable(receiver, sender, *starts, extent, ones, ones, tuple(range(len(shape))))
    return table if positions is change.target_mesh else table.select(np.argsort(receiver, kind="stable"))


@lru_cache(maxsize=256)
def shard_boxes(mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`boxes_of_all`; cached."""
    return boxes_of_all(shape, layout, mesh)


def _cells(low: np.ndarray, high: np.ndarray, meets: np.ndarray) -> tuple[np.ndarray, ...]:
    """The boxes into which the parts of the holders cut each receiver's shard: receiver [n], start [n, tensor dims],
    stop, and the index among the boxes of the receiver [n].

    Args:
        low, high: [receivers, holders, tensor dims] the spans of the parts.
        meets: [receivers, holders] whether there is such a part.
    """
    ranks, _, ndim = low.shape
    bounds = np.where(
        np.concatenate([meets, meets], axis=1)[:, :, None], np.concatenate([low, high], axis=1), _NO_BOUND
    )
    bounds.sort(axis=1)
    first = np.ones(bounds.shape, dtype=bool)
    first[:, 1:] = bounds[:, 1:] != bounds[:, :-1]
    first &= bounds != _NO_BOUND
    bounds = np.where(first, bounds, _NO_BOUND)
    bounds.sort(axis=1)
    spans = np.maximum(first.sum(axis=1) - 1, 0)  # [receivers, tensor dims]
    cells = spans.prod(axis=1)
    receiver = np.arange(ranks).repeat(cells)
    number = np.arange(cells.sum()) - (cells.cumsum() - cells)[receiver]
    start, stop = np.empty((2, len(receiver), ndim), dtype=np.int64)
    index = number
    for d in reversed(range(ndim)):
        index, at = np.divmod(index, spans[receiver, d])
        start[:, d], stop[:, d] = bounds[receiver, at, d], bounds[receiver, at + 1, d]
    return receiver, start, stop, number


def _senders(
    change: NodeChange, receiver: np.ndarray, meets: np.ndarray, holds: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """[n, contributors] the senders of each box, by the index of the term among those of its receiver.

    Args:
        receiver, number: as `_cells` returns them.
        meets: [receivers, holders] whether a holder has a part of what a receiver wants.
        holds: [n, holders] whether it has all of the box.
    """
    order = np.argsort(change.term, kind="stable")  # holders of a term are adjacent
    term = change.term[order]
    first = np.flatnonzero(np.diff(term, prepend=-1))
    index = np.diff(term, prepend=-1).astype(bool).cumsum() - 1  # of each holder's term
    present = np.logical_or.reduceat(meets[:, order], first, axis=1)
    column = (present.cumsum(axis=1) - 1)[:, index]  # [receivers, holders]
    holds = holds[:, order]
    preference = (1 + change._near[:, order] + change._is_itself[:, order]).astype(np.int8)
    preference = np.where(holds, preference[receiver], 0)
    equal = holds & (preference == np.maximum.reduceat(preference, first, axis=1)[:, index])
    before = equal.cumsum(axis=1, dtype=np.int16) - equal
    among = np.add.reduceat(equal, first, axis=1, dtype=np.int16)[:, index]
    turn = (number + receiver)[:, None] % np.maximum(among, 1)
    cell, holder = np.nonzero(equal & (before - before[:, first][:, index] == turn))
    senders = np.full((len(receiver), change.contributors), FILL)
    senders[cell, column[receiver[cell], holder]] = order[holder]
    assert (senders[:, :1] != FILL).all(), "a box without a holder"
    return senders


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
        return NodeChange(mesh, dtype, source, target, nodes, target_mesh, positions)
    return LayoutChange(mesh, dtype, source, target, nodes, target_mesh, positions)
