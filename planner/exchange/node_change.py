"""Changes from or to a `NodeLayout`, and the boxes that they transfer."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from ..layouts.index_sets import boxes_of_all, held_sizes, spans_by_dim
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

    No mesh dim becomes partial, and no `NodeLayout` cuts a tensor dim with a strided shard. Args as for `LayoutChange`.

    Attributes:
        term: [positions] the index of the term that each rank holds.
        contributors: the number of terms per element on the rank that reduces most; others have `FILL` instead.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        mesh, source, target = self.source_mesh, self.source, self.target
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
    held = shard_boxes(change.source_mesh, change.source, shape)
    wanted = shard_boxes(change.target_mesh, change.target, shape)
    low = np.maximum(held.start, wanted.start[:, None])  # [wanted, held, tensor dims]
    high = np.minimum(held.stop, wanted.stop[:, None])
    meets = change._receives_from[np.ix_(wanted.position, held.position)] & (low < high).all(axis=2)
    box, start, stop, number = _cells(low, high, meets)
    holds = meets[box]
    for d in range(len(shape)):
        holds &= (held.start[:, d] <= start[:, d, None]) & (stop[:, d, None] <= held.stop[:, d])
    sender_box = _senders(change, wanted.position, held.position, box, meets, holds, number)
    extent, ones = stop - start, np.ones_like(start)
    of_holder, of_receiver = sender_box[:, 0], box
    starts = (
        start - held.start[of_holder] + held.at[of_holder],
        start - wanted.start[of_receiver] + wanted.at[of_receiver],
    )
    receiver, sender = wanted.position[box], np.where(sender_box == FILL, FILL, held.position[sender_box])
    receiver, sender = change.at_positions(receiver, sender)
    table = TransferTable(receiver, sender, *starts, extent, ones, ones, tuple(range(len(shape))))
    return table if change.positions is change.target_mesh else table.select(np.argsort(receiver, kind="stable"))


class ShardBoxes(NamedTuple):
    """The boxes that ranks have values of: one of each rank, or several where its shard is strided. Some are empty."""

    position: np.ndarray
    """[n], ascending."""
    at: np.ndarray
    """[n, tensor dims]: where each begins in the shard of its rank."""
    start: np.ndarray
    """[n, tensor dims]."""
    stop: np.ndarray
    """[n, tensor dims]."""


@lru_cache(maxsize=256)
def shard_boxes(mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> ShardBoxes:
    """The boxes of all ranks; cached."""
    held, valid = boxes_of_all(shape, layout, mesh)
    start, stop, at = valid[:, :, 0], valid[:, :, 1], valid[:, :, 0] - held[:, :, 0]
    boxes = ShardBoxes(np.arange(mesh.size), at, start, stop)
    return _strided_boxes(mesh, layout, shape, boxes) if layout.strided_dims else boxes


def _strided_boxes(mesh: Mesh, layout: Layout, shape: tuple[int, ...], whole: ShardBoxes) -> ShardBoxes:
    """The boxes of all ranks, from those that span the strided tensor dims."""
    at, start, stop = whole[1:]
    boxes = []
    for position in range(mesh.size):
        # Of each tensor dim: (at, start, stop) of each span.
        by_dim = [[span] for span in zip(*[x[position].tolist() for x in (at, start, stop)], strict=True)]
        spans = spans_by_dim(shape, layout, mesh.shape, mesh.coordinate(position))
        for d in layout.strided_dims:
            before = accumulate([high - low for low, high in spans[d]], initial=0)
            by_dim[d] = [(first, *span) for first, span in zip(before, spans[d], strict=False)] or [(0, 0, 0)]
        boxes += [(position, *zip(*box, strict=True)) for box in product(*by_dim)]
    position_of, *columns = (np.array(column, dtype=np.int64) for column in zip(*boxes, strict=True))
    return ShardBoxes(position_of, *columns)


@lru_cache(maxsize=256)
def held_elements(mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """[positions] the elements of the shards of all ranks; cached."""
    if not layout.strided_dims:
        held = boxes_of_all(shape, layout, mesh)[0]
        return (held[:, :, 1] - held[:, :, 0]).prod(axis=1)
    at = [mesh.coordinate(position) for position in range(mesh.size)]
    return np.array([math.prod(held_sizes(shape, layout, mesh.shape, coordinate)) for coordinate in at])


def _cells(low: np.ndarray, high: np.ndarray, meets: np.ndarray) -> tuple[np.ndarray, ...]:
    """The boxes into which the parts of the holders cut each wanted box: its index [n], start [n, tensor dims], stop,
    and the index among the boxes of the wanted one [n].

    Args:
        low, high: [wanted, held, tensor dims] the spans of the parts.
        meets: [wanted, held] whether there is such a part.
    """
    number_wanted, _, ndim = low.shape
    bounds = np.where(
        np.concatenate([meets, meets], axis=1)[:, :, None], np.concatenate([low, high], axis=1), _NO_BOUND
    )
    bounds.sort(axis=1)
    first = np.ones(bounds.shape, dtype=bool)
    first[:, 1:] = bounds[:, 1:] != bounds[:, :-1]
    first &= bounds != _NO_BOUND
    bounds = np.where(first, bounds, _NO_BOUND)
    bounds.sort(axis=1)
    spans = np.maximum(first.sum(axis=1) - 1, 0)  # [wanted, tensor dims]
    cells = spans.prod(axis=1)
    box = np.arange(number_wanted).repeat(cells)
    number = np.arange(cells.sum()) - (cells.cumsum() - cells)[box]
    start, stop = np.empty((2, len(box), ndim), dtype=np.int64)
    index = number
    for d in reversed(range(ndim)):
        index, at = np.divmod(index, spans[box, d])
        start[:, d], stop[:, d] = bounds[box, at, d], bounds[box, at + 1, d]
    return box, start, stop, number


def _senders(
    change: NodeChange,
    receivers: np.ndarray,
    holders: np.ndarray,
    box: np.ndarray,
    meets: np.ndarray,
    holds: np.ndarray,
    number: np.ndarray,
) -> np.ndarray:
    """[n, contributors] the held box that each box is sent from, by the index of the term among those of its receiver.

    Args:
        receivers, holders: [wanted] and [held] the position of each box of a rank.
        box, number: as `_cells` returns them.
        meets: [wanted, held] whether a held box has a part of a wanted one.
        holds: [n, held] whether it has all of the box.
    """
    term = change.term[holders]
    order = np.argsort(term, kind="stable")  # holders of a term are adjacent
    term = term[order]
    first = np.flatnonzero(np.diff(term, prepend=-1))
    index = np.diff(term, prepend=-1).astype(bool).cumsum() - 1  # of each holder's term
    present = np.logical_or.reduceat(meets[:, order], first, axis=1)
    column = (present.cumsum(axis=1) - 1)[:, index]  # [wanted, held]
    holds = holds[:, order]
    ends = np.ix_(receivers, holders[order])
    preference = (1 + change._near[ends] + change._is_itself[ends]).astype(np.int8)
    preference = np.where(holds, preference[box], 0)
    equal = holds & (preference == np.maximum.reduceat(preference, first, axis=1)[:, index])
    before = equal.cumsum(axis=1, dtype=np.int16) - equal
    among = np.add.reduceat(equal, first, axis=1, dtype=np.int16)[:, index]
    turn = (number + receivers[box])[:, None] % np.maximum(among, 1)
    cell, holder = np.nonzero(equal & (before - before[:, first][:, index] == turn))
    senders = np.full((len(box), change.contributors), FILL)
    senders[cell, column[box[cell], holder]] = order[holder]
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
