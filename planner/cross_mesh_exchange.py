"""From a layout on one mesh to a layout on another, in one exchange: the meshes may share all, some or no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from .cost import Price, price
from .dtypes import ITEMSIZE
from .exchange import Boxes, change_of, grid, turn_of
from .index_sets import cells_meeting, elements_in_common, held_box, held_sizes
from .intersection import overlay
from .layout import Layout
from .mesh import Mesh
from .placements import Shard
from .ranks import PRICED_WHOLE, SAMPLED
from .topology import Topology

_MOST_PAIRS = 1 << 18  # of receivers and holders that are looked at together


def union(source_mesh: Mesh, target_mesh: Mesh) -> Mesh:
    """The ranks of both meshes as one mesh dim: the source's in its order, then those that only the target has."""
    if source_mesh.same_ranks(target_mesh):
        return source_mesh
    ranks = source_mesh.rank_array
    others = target_mesh.rank_array[~np.isin(target_mesh.rank_array, ranks)]
    size = len(ranks) + len(others)
    return Mesh((size,), ("ranks",), np.concatenate([ranks, others]).tolist())


@lru_cache(maxsize=1024)
def position_of(rank: int, source_mesh: Mesh, target_mesh: Mesh) -> int:
    """The position of a rank among the ranks of both meshes, -1 if it is in neither."""
    return int(union(source_mesh, target_mesh).positions_of(np.array([rank]))[0])


class Crossing:
    """An exchange between meshes; neither layout is partial, mesh dims of size 1 are replicated.

    Positions in its boxes are those of `both`, the mesh of everyone. A receiver takes what it holds itself from
    itself; of equal holders, those of its node if there are any, the one whose turn it is.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        source_mesh: Mesh,
        source: Layout,
        target_mesh: Mesh,
        target: Layout,
        node_size: int | None = None,
    ) -> None:
        self.shape, self.node_size = shape, node_size
        self.source_mesh, self.source, self.target_mesh, self.target = source_mesh, source, target_mesh, target
        self.both = union(source_mesh, target_mesh)
        self._cut = [m for _, order in source.orders for m in order]
        self._replicas = [m for m in range(source_mesh.ndim) if m not in self._cut]

    def boxes(self, rank: int | None = None) -> Boxes:
        """Every row, or those in which position `rank` of everyone receives or sends, in the order of receivers."""
        if rank is None:
            return _by_receiver(Boxes.concatenate([self._boxes(*pairs) for pairs in self._all_pairs()]))
        number = self.both.rank_at(rank)
        received, sent = self._boxes(*self._pairs_to(number)), self._boxes(*self._pairs_from(number))
        mine = (sent.sender[:, 0] == rank) & (sent.receiver != rank)
        return _by_receiver(Boxes.concatenate([received, sent.select(mine)]))

    def communicates(self) -> bool:
        """Whether any rank must receive anything: the same answer on every rank."""
        if 0 in self.shape:
            return False
        inside = np.isin(self.target_mesh.rank_array, self.source_mesh.rank_array)
        held_at = self.source_mesh.positions_of(self.target_mesh.rank_array)
        for position in range(self.target_mesh.size):
            to = self.target_mesh.shape, self.target_mesh.coordinate(position)
            wanted = math.prod(held_sizes(self.shape, self.target, *to))
            if wanted and not inside[position]:
                return True
            if wanted:
                at = self.source_mesh.shape, self.source_mesh.coordinate(int(held_at[position]))
                if elements_in_common(self.shape, self.source, at, self.target, to) < wanted:
                    return True
        return False

    def elements(self, mesh: Mesh, layout: Layout, rank: int) -> int:
        """Elements that a position of everyone holds under a layout on one of the meshes; 0 if it is not in it."""
        (position,) = mesh.positions_of(np.array([self.both.rank_at(rank)])).tolist()
        return 0 if position < 0 else math.prod(held_sizes(self.shape, layout, mesh.shape, mesh.coordinate(position)))

    def _all_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates of receivers, and of a holder of each cell with coordinate 0 along replicated mesh dims."""
        cells = grid([self.source_mesh.shape[m] for m in self._cut])
        at_once = max(1, _MOST_PAIRS // len(cells))
        for first in range(0, self.target_mesh.size, at_once):
            positions = np.arange(first, min(first + at_once, self.target_mesh.size))
            receivers = np.stack(np.unravel_index(positions, self.target_mesh.shape), axis=1)
            holders = np.zeros((len(positions) * len(cells), self.source_mesh.ndim), dtype=np.int64)
            holders[:, self._cut] = np.tile(cells, (len(positions), 1))
            yield receivers.repeat(len(cells), axis=0), holders

    def _pairs_to(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of which a rank is the receiver."""
        mesh, position = self.target_mesh, int(self.target_mesh.positions_of(np.array([number]))[0])
        if position < 0:
            return self._no_pairs()
        me = mesh.coordinate(position)
        holders = _places(self.source_mesh, self.source, self.shape, held_box(self.shape, self.target, mesh.shape, me))
        return np.tile(np.array(me, dtype=np.int64), (len(holders), 1)), holders

    def _pairs_from(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in which the cell is that of a rank, with every receiver whose target may meet it."""
        mesh, position = self.source_mesh, int(self.source_mesh.positions_of(np.array([number]))[0])
        if position < 0:
            return self._no_pairs()
        me = mesh.coordinate(position)
        box = held_box(self.shape, self.source, mesh.shape, me)
        free = [m for m, p in enumerate(self.target.placements) if not isinstance(p, Shard)]
        receivers = _places(self.target_mesh, self.target, self.shape, box, free)
        holders = np.zeros((len(receivers), mesh.ndim), dtype=np.int64)
        holders[:, self._cut] = np.array(me, dtype=np.int64)[self._cut]
        return receivers, holders

    def _no_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.zeros((0, mesh.ndim), dtype=np.int64) for mesh in (self.target_mesh, self.source_mesh))  # type: ignore[return-value]

    def _boxes(self, receivers: np.ndarray, holders: np.ndarray) -> Boxes:
        found = overlay(
            self.shape, self.source, self.source_mesh.shape, holders, self.target, self.target_mesh.shape, receivers
        )
        receivers, holders = receivers[found.pair], holders[found.pair]
        numbers = self.target_mesh.rank_array[receivers @ self.target_mesh.strides]
        senders = self.source_mesh.rank_array[self._senders(receivers, numbers, holders)]
        return Boxes.of(found, self.both.positions_of(numbers), self.both.positions_of(senders)[:, None])

    def _senders(self, receivers: np.ndarray, numbers: np.ndarray, holders: np.ndarray) -> np.ndarray:
        """[n] positions in the source mesh of who sends, to receivers of these ranks."""
        mesh, cut = self.source_mesh, self._cut
        turn = turn_of(receivers, self.target, self.target_mesh.shape, range(self.target_mesh.ndim))
        chosen, digits = holders.copy(), turn
        for m in reversed(self._replicas):
            digits, chosen[:, m] = np.divmod(digits, mesh.shape[m])
        senders = chosen @ mesh.strides
        if self.node_size is not None and self._replicas:
            near = mesh.on_node_of(numbers, self.node_size)
            places = np.stack(np.unravel_index(np.maximum(near, 0), mesh.shape), axis=2)
            holds = (places[:, :, cut] == holders[:, None, cut]).all(axis=2) & (near >= 0)
            count = holds.sum(axis=1)
            nth = (holds.cumsum(axis=1) == (turn % np.maximum(count, 1) + 1)[:, None]).argmax(axis=1)
            senders = np.where(count > 0, near[np.arange(len(near)), nth], senders)
        itself = mesh.positions_of(numbers)
        place = np.stack(np.unravel_index(np.maximum(itself, 0), mesh.shape), axis=1)
        own = (itself >= 0) & (place[:, cut] == holders[:, cut]).all(axis=1)
        return np.where(own, itself, senders)


def price_step(
    source_mesh: Mesh,
    source: Layout,
    target_mesh: Mesh,
    target: Layout,
    shape: tuple[int, ...],
    dtype: str,
    topology: Topology,
) -> Price:
    """The price of one step, on a mesh or between two."""
    if source_mesh == target_mesh:
        return price(change_of(source_mesh, dtype, source, target, topology.node_size), shape, topology)
    return _price_crossing(
        Crossing(shape, source_mesh, source, target_mesh, target, topology.node_size), dtype, topology
    )


def _price_crossing(crossing: Crossing, dtype: str, topology: Topology) -> Price:
    """Priced box by box as `cost.price` prices, on every rank up to `PRICED_WHOLE`, else on 16 spread over them."""
    both, size, us, peak = crossing.both, ITEMSIZE[dtype], 0.0, 0
    whole = crossing.boxes() if both.size <= PRICED_WHOLE else None
    sampled = range(both.size) if whole else np.unique(np.linspace(0, both.size - 1, SAMPLED).astype(np.int64)).tolist()
    nodes = both.rank_array // (topology.node_size or both.rank_array.max() + 1)
    node, network = topology.node, topology.network
    for rank in sampled:
        boxes = whole or crossing.boxes(rank)
        nbytes, sender = boxes.elements * size, boxes.sender[:, 0]
        own = int(nbytes[(boxes.receiver == rank) & (sender == rank)].sum())
        moved = {}
        for way, mine, other in (("in", boxes.receiver, sender), ("out", sender, boxes.receiver)):
            rows = (mine == rank) & (other != rank)
            near = rows & (nodes[other] == nodes[rank])
            for reach, chosen in (("near", near), ("far", rows & ~near)):
                moved[reach, way] = int(nbytes[chosen].sum()), len(np.unique(other[chosen]))
        over = [
            link.us(max(moved[reach, "in"][0], moved[reach, "out"][0]), moved[reach, "in"][1])
            for link, reach in ((node, "near"), (network, "far"))
        ]
        packed = sum(
            0 if link.one_sided else moved[reach, "in"][0] + moved[reach, "out"][0]
            for link, reach in ((node, "near"), (network, "far"))
        )
        us = max(us, float(max(over) + topology.copy_us(own + packed)))
        held = crossing.elements(crossing.source_mesh, crossing.source, rank)
        wanted = crossing.elements(crossing.target_mesh, crossing.target, rank)
        peak = max(peak, (held + wanted) * size + packed)
    return Price(us, 0.0, peak)


def _by_receiver(boxes: Boxes) -> Boxes:
    return boxes.select(np.argsort(boxes.receiver, kind="stable"))


def _places(
    mesh: Mesh, layout: Layout, shape: tuple[int, ...], box: tuple, free: list[int] | None = None
) -> np.ndarray:
    """Coordinates whose shards may meet `box`, [n, mesh dims]; along mesh dims that cut nothing 0, each if `free`."""
    free = free or []
    spans = list(zip(shape, box, strict=True))
    cells = [cells_meeting(n, layout.cuts(d), mesh.shape, span) for d, (n, span) in enumerate(spans)]
    index = grid([len(found) for found in cells] + [mesh.shape[m] for m in free])
    places = np.zeros((len(index), mesh.ndim), dtype=np.int64)
    for d, found in enumerate(cells):
        places[:, layout.order(d)] = found[index[:, d]]
    places[:, free] = index[:, len(cells) :]
    return places
