"""The exchange on one mesh: the change from one layout to another, and the boxes that ranks transfer for it.

Each rank computes its own rows without the others: holders and senders are closed forms of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np

from .dtypes import is_floating
from .index_sets import cells_meeting, elements_in_common, held_box, held_sizes, spans_at
from .intersection import FewPairs, intersect
from .layout import Layout, receivers_contribute
from .mesh import Coordinate, Mesh
from .placements import Partial, Shard
from .transfer_table import FILL, Row, TransferTable

_MAX_PAIRS_AT_ONCE = 1 << 18  # pairs of receiver and holder that are intersected together
_MAX_CACHED_CLOSURE = 64  # ranks of a closure up to which the pairs for any shape are cached
_MAX_SCALAR_PAIRS = 64  # pairs up to which Python numbers are faster than arrays
_MAX_EXACT_RANKS = 1024  # ranks of a mesh up to which `communicates` looks at all shards where it has no closed form


class LayoutChange:
    """The change from layout `source` to layout `target` on one mesh, for tensors of any shape.

    In both layouts mesh dims of size 1 are replicated.

    Attributes:
        node_size: ranks per node; None if all ranks share one. Receivers prefer senders of their node.
        closure: the mesh dims whose cut, or an earlier cut of the same tensor dim, changes. Ranks exchange only along
            these.
        reduced: the mesh dims whose partial is reduced.
        split: the mesh dims that become partial.
        keepers: those of `split` where coordinate 0 keeps the value and the others hold zero (integers and bool).
        replicas: the mesh dims of the closure along which the source is replicated, so that several ranks hold a box.
        shards_split: those of `split` that are sharded in the source; each shard stays at its coordinate.
        contributors: the number of terms per element that are reduced, 1 without a reduction.
    """

    def __init__(self, mesh: Mesh, dtype: str, source: Layout, target: Layout, node_size: int | None = None) -> None:
        self.mesh, self.dtype, self.source, self.target = mesh, dtype, source, target
        self.node_size = node_size
        before, after = source.prefixes, target.prefixes
        self.closure = tuple([m for m in range(mesh.ndim) if before[m] != after[m]])
        self.replicas = tuple([m for m in self.closure if not before[m]])
        self.reduced = tuple([m for m in source.partial_dims if m in self.closure])
        self.split = tuple([m for m in target.partial_dims if m in self.closure])
        self.shards_split = tuple([m for m in self.split if isinstance(source.placements[m], Shard)])
        self.keepers = () if not self.split or is_floating(dtype) else self._new_sums
        self.contributors = math.prod([mesh.shape[m] for m in self.reduced]) if self.reduced else 1

    @property
    def _new_sums(self) -> tuple[int, ...]:
        """The mesh dims that change from replicated to a partial sum."""
        whole = [m for m in self.split if m not in self.shards_split]
        return tuple([m for m in whole if self.target.placements[m] == Partial("sum")])

    @property
    def divisor(self) -> float:
        """The divisor of the result: the size of each reduced average, and of each new partial sum of floats. Below 1
        where a shard becomes a partial average, as its owner then holds n times its part."""
        divided = [m for m in self.reduced if self.source.placements[m] == Partial("avg")]
        divided += self._new_sums if is_floating(self.dtype) else ()
        multiplied = [m for m in self.shards_split if self.target.placements[m] == Partial("avg")]
        divisor, multiplier = (math.prod(self.mesh.shape[m] for m in dims) for dims in (divided, multiplied))
        return divisor if multiplier == 1 else divisor / multiplier

    @property
    def op(self) -> str:
        """The op of the reduction over contributors; an average is a sum with a divisor."""
        ops = {p.op for m, p in enumerate(self.source.placements) if m in self.reduced and isinstance(p, Partial)}
        return "sum" if not ops or "avg" in ops else ops.pop()

    def boxes(self, shape: tuple[int, ...], rank: int | None = None) -> TransferTable:
        """The transfer table for a tensor of `shape`: all rows, or those in which position `rank` receives or sends.

        The rows of a receiver tile its target shard. Rows are sorted by receiver, then by the shards of the source,
        tensor dim by tensor dim in cutting order.
        """
        if rank is None:
            return TransferTable.concatenate([self._boxes(shape, *pairs) for pairs in self._all_pairs()])
        if math.prod([self.mesh.shape[m] for m in self.closure]) <= _MAX_CACHED_CLOSURE:
            return _cached_pairs(self, rank).boxes(shape)
        sent = self._boxes(shape, *self._pairs_from(rank, shape))
        mine = (sent.sender == rank).any(axis=1) & (sent.receiver != rank)
        table = TransferTable.concatenate([self._boxes(shape, *self._pairs_to(rank, shape)), sent.select(mine)])
        return table.select(np.argsort(table.receiver, kind="stable"))

    def pairs_of_any_shape(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows that position `rank` may have for a tensor of any shape, in their order: coordinates of receivers
        and of holders [n, mesh dims], and senders [n, contributors]."""
        received, sent = self._pairs_to(rank), self._pairs_from(rank)
        receivers, holders = (np.concatenate(both) for both in zip(received, sent, strict=True))
        senders, receiver = self._senders(receivers, holders), receivers @ self.mesh.strides
        mine = (senders == rank).any(axis=1) & (receiver != rank)
        mine[: len(received[0])] = True
        rows = np.flatnonzero(mine)
        rows = rows[np.argsort(receiver[rows], kind="stable")]
        return receivers[rows], holders[rows], senders[rows]

    def _all_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates [n, mesh dims] of all receivers, and of a holder of each source shard, in chunks."""
        mesh, cut = self.mesh, self._cut(self.source)
        cells = grid([mesh.shape[m] for m in cut])
        at_once = max(1, _MAX_PAIRS_AT_ONCE // len(cells))
        for first in range(0, mesh.size, at_once):
            receivers = mesh.coordinates[:, first : first + at_once].T.repeat(len(cells), axis=0)
            holders = receivers.copy()
            holders[:, cut] = np.tile(cells, (len(receivers) // len(cells), 1))
            yield receivers, holders

    def _pairs_to(self, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose receiver is `rank`, for a tensor of `shape` or (None) of any shape."""
        me = self.mesh.coordinate(rank)
        holders = self._coordinates_meeting(self.source, me, shape, self.target)
        return np.broadcast_to(np.array(me), holders.shape), holders

    def _pairs_from(self, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose holder has the shard of `rank`, for a tensor of `shape` or (None) of any shape."""
        me = self.mesh.coordinate(rank)
        free = [m for m in self.closure if not isinstance(self.target.placements[m], Shard)]
        receivers = self._coordinates_meeting(self.target, me, shape, self.source, free)
        holders, cut = receivers.copy(), self._cut(self.source)
        holders[:, cut] = np.array(me)[cut]
        return receivers, holders

    def _cut(self, layout: Layout) -> list[int]:
        """The mesh dims of the closure that shard under a layout, tensor dim by tensor dim in cutting order.

        Along other mesh dims that shard, different coordinates have nothing in common.
        """
        return [m for _, order in layout.orders for m in order if m in self.closure]

    def _coordinates_meeting(
        self, layout: Layout, me: Coordinate, shape: tuple[int, ...] | None, my_layout: Layout, free: Sequence[int] = ()
    ) -> np.ndarray:
        """[n, mesh dims] coordinates whose shards under `layout` meet the shard of `me` under `my_layout`.

        Without a shape, those that do for a tensor of some shape. Mesh dims that do not shard have the coordinate of
        `me`; the mesh dims `free` have every coordinate.
        """
        if shape is None:
            cut = self._cut(layout)
            cells = grid([self.mesh.shape[m] for m in cut])
        else:
            box = held_box(shape, my_layout, self.mesh.shape, me)
            cut = [m for _, order in layout.orders for m in order]
            by_dim = [cells_meeting(n, layout.cuts(d), self.mesh.shape, box[d]) for d, n in enumerate(shape)]
            index = grid([len(of_dim) for of_dim in by_dim])
            of_dims = [of_dim[index[:, d]] for d, of_dim in enumerate(by_dim)]
            cells = np.concatenate([index[:, :0], *of_dims], axis=1)
        index = grid([len(cells), *(self.mesh.shape[m] for m in free)])
        coordinates = np.tile(np.array(me, dtype=np.int64), (len(index), 1))
        coordinates[:, cut] = cells[index[:, 0]]
        coordinates[:, free] = index[:, 1:]
        return coordinates

    def _boxes(
        self, shape: tuple[int, ...], receivers: np.ndarray, holders: np.ndarray, senders: np.ndarray | None = None
    ) -> TransferTable:
        """The rows of pairs of a receiver and a holder, without pairs that have nothing in common."""
        mesh = self.mesh
        common = intersect(shape, self.source, mesh.shape, holders, self.target, mesh.shape, receivers)
        receivers = receivers[common.pair]
        sender = self._senders(receivers, holders[common.pair]) if senders is None else senders[common.pair]
        return TransferTable.of_intersection(common, receivers @ mesh.strides, sender)

    def _senders(self, receivers: np.ndarray, holders: np.ndarray) -> np.ndarray:
        """[n, contributors] the senders of each pair.

        The receiver itself if it holds the box; otherwise one of the equal holders, of its node if there are any,
        chosen round robin.
        """
        mesh, reduced = self.mesh, list(self.reduced)
        fixed = [m for m in range(mesh.ndim) if m not in self.replicas and m not in reduced]
        terms = grid([mesh.shape[m] for m in reduced])
        itself = receivers @ mesh.strides
        alike = (holders[:, fixed] == receivers[:, fixed]).all(axis=1)
        own = alike[:, None] & (self._term(receivers)[:, None] == np.arange(len(terms)))
        base = holders[:, fixed] @ mesh.strides[fixed]
        if self.replicas:
            turn = digits = round_robin_index(receivers, self.target, mesh.shape, self.closure)
            for m in reversed(self.replicas):
                digits, digit = np.divmod(digits, mesh.shape[m])
                base = base + digit * mesh.strides[m]
        senders = base[:, None] + terms @ mesh.strides[reduced]
        if self.replicas and self.node_size is not None:
            near = mesh.on_node_of(mesh.rank_array[itself], self.node_size)
            coordinates = np.stack(np.unravel_index(np.maximum(near, 0), mesh.shape), axis=2)
            holds = (coordinates[:, :, fixed] == holders[:, None, fixed]).all(axis=2) & (near >= 0)
            holds = holds[:, None, :] & (self._term(coordinates)[:, None, :] == np.arange(len(terms))[:, None])
            count = holds.sum(axis=2)
            nth = (holds.cumsum(axis=2) == (turn[:, None] % np.maximum(count, 1))[:, :, None] + 1).argmax(axis=2)
            senders = np.where(count > 0, np.take_along_axis(near, nth, axis=1), senders)
        senders = np.where(own, itself[:, None], senders)
        # A shard that becomes partial stays at its coordinate; the other coordinates hold the identity.
        filled = (holders != receivers)[:, self.shards_split].any(axis=1)
        filled |= (receivers[:, self.keepers] != 0).any(axis=1)
        senders[filled] = FILL
        return senders

    def _term(self, coordinates: np.ndarray) -> np.ndarray:
        """[...] the index of the term that the ranks at `coordinates` [..., mesh dims] contribute."""
        term = np.zeros(coordinates.shape[:-1], dtype=np.int64)
        for m in self.reduced:
            term = term * self.mesh.shape[m] + coordinates[..., m]
        return term

    def communicates(self, shape: tuple[int, ...]) -> bool:
        """Whether any rank receives anything from another. Every rank computes the same answer."""
        if 0 in shape or not self.closure:
            return False
        if self.reduced:
            return True
        if self.closure == self.shards_split or self.is_local:
            return False
        if self.shards_split:
            if self.mesh.size > _MAX_EXACT_RANKS:
                return True  # an exact answer would take the boxes of all ranks
            boxes = self.boxes(shape)
            return bool(((boxes.sender != boxes.receiver[:, None]) & (boxes.sender != FILL)).any())
        if self.source.strided_dims or self.target.strided_dims:
            if self.mesh.size > _MAX_EXACT_RANKS:
                return True
            return not all(self._is_local_at(shape, self.mesh.coordinate(p)) for p in range(self.mesh.size))
        # The first rank, which is never empty, usually decides.
        first = self.mesh.shape, (0,) * self.mesh.ndim
        spans = zip(held_box(shape, self.source, *first), held_box(shape, self.target, *first), strict=True)
        if any(wanted[0] < held[0] or held[1] < wanted[1] for held, wanted in spans):
            return True
        at = self.mesh.shape, self.mesh.coordinates
        held_from, held_to = spans_at(shape, self.source, *at)
        wanted_from, wanted_to = spans_at(shape, self.target, *at)
        wanted = (wanted_from < wanted_to).all(axis=0)
        inside = ((held_from <= wanted_from) & (wanted_to <= held_to)).all(axis=0)
        return bool((wanted & ~inside).any())

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank already holds its target shard, reductions aside, for tensors of any shape."""
        return receivers_contribute(self.source, self.target)

    def _is_local_at(self, shape: tuple[int, ...], coordinate: Coordinate) -> bool:
        """Whether the rank at `coordinate` already holds its target shard."""
        at = self.mesh.shape, coordinate
        return elements_in_common(shape, self.source, at, self.target, at) == math.prod(
            held_sizes(shape, self.target, *at)
        )


layout_change = lru_cache(maxsize=4096)(LayoutChange)
"""The change between two layouts; cached."""


class _ReusablePairs:
    """The result of `LayoutChange.pairs_of_any_shape`, from which the boxes for each new shape are computed."""

    def __init__(self, change: LayoutChange, rank: int) -> None:
        self.change, self.pairs = change, change.pairs_of_any_shape(rank)
        receivers, holders, senders = self.pairs
        self.few: FewPairs | None = None  # if Python numbers are faster than arrays
        if len(receivers) <= _MAX_SCALAR_PAIRS and not (change.source.strided_dims or change.target.strided_dims):
            on = change.mesh.shape
            self.few = FewPairs(change.source, on, holders.tolist(), change.target, on, receivers.tolist())
            self.receivers, self.senders = (receivers @ change.mesh.strides).tolist(), senders.tolist()

    def boxes(self, shape: tuple[int, ...]) -> TransferTable:
        if self.few is None:
            return self.change._boxes(shape, *self.pairs)
        ones = [1] * len(shape)
        rows = [
            Row(self.receivers[pair], self.senders[pair], source, target, extent, ones, ones)
            for pair, source, target, extent in self.few.intersections(shape)
        ]
        return TransferTable.from_rows(rows, self.change.contributors, tuple(range(len(shape))))


_cached_pairs = lru_cache(maxsize=1024)(_ReusablePairs)


def grid(sizes: Sequence[int]) -> np.ndarray:
    """[n, dims] every index of an array of the given sizes, row-major."""
    return np.indices(sizes, dtype=np.int64).reshape(len(sizes), math.prod(sizes)).T


def round_robin_index(
    receivers: np.ndarray, target: Layout, mesh_shape: Sequence[int], mesh_dims: Iterable[int]
) -> np.ndarray:
    """[n] the index of each receiver among the ranks with its target shard, plus the index of that shard.

    Choosing the sender by this index modulo the number of equal holders spreads the load over them.
    """
    among = shard = np.zeros(len(receivers), dtype=np.int64)
    for m in mesh_dims:
        if isinstance(target.placements[m], Shard):
            shard = shard * mesh_shape[m] + receivers[:, m]
        else:
            among = among * mesh_shape[m] + receivers[:, m]
    return among + shard
