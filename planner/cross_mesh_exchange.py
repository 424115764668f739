"""The exchange between two meshes, which may share all, some or no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .exchange import grid, round_robin_index
from .index_sets import cells_meeting, elements_in_common, held_box, held_sizes
from .intersection import intersect
from .layout import Layout
from .mesh import Mesh, union_mesh
from .placements import Shard
from .transfer_table import TransferTable

_MAX_PAIRS_AT_ONCE = 1 << 18  # pairs of receiver and holder that are intersected together


class CrossMeshExchange:
    """The exchange from `source` on `source_mesh` to `target` on `target_mesh`, for tensors of `shape`.

    Neither layout is partial, and mesh dims of size 1 are replicated. Senders are chosen as in `LayoutChange`: the
    receiver itself if it holds the box; otherwise one of the equal holders, of its node if there are any, round robin.

    Attributes:
        union: the mesh of the ranks of both meshes; positions in the boxes refer to it.
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
        self.union = union_mesh(source_mesh, target_mesh)
        self._cut = [m for _, order in source.orders for m in order]
        self._replicas = [m for m in range(source_mesh.ndim) if m not in self._cut]

    def boxes(self, rank: int | None = None) -> TransferTable:
        """The transfer table, sorted by receiver: all rows, or those in which position `rank` of the union receives or
        sends."""
        if rank is None:
            return _by_receiver(TransferTable.concatenate([self._boxes(*pairs) for pairs in self._all_pairs()]))
        global_rank = self.union.rank_at(rank)
        received, sent = self._boxes(*self._pairs_to(global_rank)), self._boxes(*self._pairs_from(global_rank))
        mine = (sent.sender[:, 0] == rank) & (sent.receiver != rank)
        return _by_receiver(TransferTable.concatenate([received, sent.select(mine)]))

    def communicates(self) -> bool:
        """Whether any rank receives anything from another. Every rank computes the same answer."""
        if 0 in self.shape:
            return False
        in_source_mesh = np.isin(self.target_mesh.rank_array, self.source_mesh.rank_array)
        held_at = self.source_mesh.positions_of(self.target_mesh.rank_array)
        for position in range(self.target_mesh.size):
            to = self.target_mesh.shape, self.target_mesh.coordinate(position)
            wanted = math.prod(held_sizes(self.shape, self.target, *to))
            if wanted and not in_source_mesh[position]:
                return True
            if wanted:
                at = self.source_mesh.shape, self.source_mesh.coordinate(int(held_at[position]))
                if elements_in_common(self.shape, self.source, at, self.target, to) < wanted:
                    return True
        return False

    def elements(self, mesh: Mesh, layout: Layout, rank: int) -> int:
        """The elements of the shard of position `rank` of the union under a layout on one of the meshes; 0 if the rank
        is not in the mesh."""
        (position,) = mesh.positions_of(np.array([self.union.rank_at(rank)])).tolist()
        return 0 if position < 0 else math.prod(held_sizes(self.shape, layout, mesh.shape, mesh.coordinate(position)))

    def _all_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates [n, mesh dims] of all receivers, and of a holder of each source shard (at coordinate 0 along
        replicated mesh dims), in chunks."""
        cells = grid([self.source_mesh.shape[m] for m in self._cut])
        at_once = max(1, _MAX_PAIRS_AT_ONCE // len(cells))
        for first in range(0, self.target_mesh.size, at_once):
            positions = np.arange(first, min(first + at_once, self.target_mesh.size))
            receivers = np.stack(np.unravel_index(positions, self.target_mesh.shape), axis=1)
            holders = np.zeros((len(positions) * len(cells), self.source_mesh.ndim), dtype=np.int64)
            holders[:, self._cut] = np.tile(cells, (len(positions), 1))
            yield receivers.repeat(len(cells), axis=0), holders

    def _pairs_to(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose receiver is `rank`."""
        mesh, position = self.target_mesh, int(self.target_mesh.positions_of(np.array([rank]))[0])
        if position < 0:
            return self._no_pairs()
        me = mesh.coordinate(position)
        holders = _coordinates_meeting(
            self.source_mesh, self.source, self.shape, held_box(self.shape, self.target, mesh.shape, me)
        )
        return np.tile(np.array(me, dtype=np.int64), (len(holders), 1)), holders

    def _pairs_from(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose holder has the source shard of `rank`."""
        mesh, position = self.source_mesh, int(self.source_mesh.positions_of(np.array([rank]))[0])
        if position < 0:
            return self._no_pairs()
        me = mesh.coordinate(position)
        box = held_box(self.shape, self.source, mesh.shape, me)
        free = [m for m, p in enumerate(self.target.placements) if not isinstance(p, Shard)]
        receivers = _coordinates_meeting(self.target_mesh, self.target, self.shape, box, free)
        holders = np.zeros((len(receivers), mesh.ndim), dtype=np.int64)
        holders[:, self._cut] = np.array(me, dtype=np.int64)[self._cut]
        return receivers, holders

    def _no_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.zeros((0, mesh.ndim), dtype=np.int64) for mesh in (self.target_mesh, self.source_mesh))  # type: ignore[return-value]

    def _boxes(self, receivers: np.ndarray, holders: np.ndarray) -> TransferTable:
        common = intersect(
            self.shape, self.source, self.source_mesh.shape, holders, self.target, self.target_mesh.shape, receivers
        )
        receivers, holders = receivers[common.pair], holders[common.pair]
        ranks = self.target_mesh.rank_array[receivers @ self.target_mesh.strides]
        senders = self.source_mesh.rank_array[self._senders(receivers, ranks, holders)]
        columns = self.union.positions_of(ranks), self.union.positions_of(senders)[:, None]
        return TransferTable.of_intersection(common, *columns)

    def _senders(self, receivers: np.ndarray, ranks: np.ndarray, holders: np.ndarray) -> np.ndarray:
        """[n] the source mesh positions of the senders of each pair; `ranks` are those of the receivers."""
        mesh, cut = self.source_mesh, self._cut
        turn = round_robin_index(receivers, self.target, self.target_mesh.shape, range(self.target_mesh.ndim))
        chosen, digits = holders.copy(), turn
        for m in reversed(self._replicas):
            digits, chosen[:, m] = np.divmod(digits, mesh.shape[m])
        senders = chosen @ mesh.strides
        if self.node_size is not None and self._replicas:
            near = mesh.on_node_of(ranks, self.node_size)
            coordinates = np.stack(np.unravel_index(np.maximum(near, 0), mesh.shape), axis=2)
            holds = (coordinates[:, :, cut] == holders[:, None, cut]).all(axis=2) & (near >= 0)
            count = holds.sum(axis=1)
            nth = (holds.cumsum(axis=1) == (turn % np.maximum(count, 1) + 1)[:, None]).argmax(axis=1)
            senders = np.where(count > 0, near[np.arange(len(near)), nth], senders)
        itself = mesh.positions_of(ranks)
        coordinates = np.stack(np.unravel_index(np.maximum(itself, 0), mesh.shape), axis=1)
        own = (itself >= 0) & (coordinates[:, cut] == holders[:, cut]).all(axis=1)
        return np.where(own, itself, senders)


def _by_receiver(boxes: TransferTable) -> TransferTable:
    return boxes.select(np.argsort(boxes.receiver, kind="stable"))


def _coordinates_meeting(
    mesh: Mesh, layout: Layout, shape: tuple[int, ...], box: tuple, free: list[int] | None = None
) -> np.ndarray:
    """[n, mesh dims] coordinates whose shards under `layout` may meet `box`.

    Mesh dims that do not shard have coordinate 0; the mesh dims `free` have every coordinate.
    """
    free = free or []
    spans = list(zip(shape, box, strict=True))
    cells = [cells_meeting(n, layout.cuts(d), mesh.shape, span) for d, (n, span) in enumerate(spans)]
    index = grid([len(of_dim) for of_dim in cells] + [mesh.shape[m] for m in free])
    coordinates = np.zeros((len(index), mesh.ndim), dtype=np.int64)
    for d, of_dim in enumerate(cells):
        coordinates[:, layout.order(d)] = of_dim[index[:, d]]
    coordinates[:, free] = index[:, len(cells) :]
    return coordinates
