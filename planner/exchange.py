"""The one primitive: from one assignment of index sets to another, inside subgroups of ranks, as a table of boxes.

Every rank computes its own rows alone: who holds a piece and who serves it are closed forms of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .dtypes import is_floating
from .index_sets import cells_meeting, elements_in_common, held_box, held_sizes, spans_at
from .intersection import FewPairs, Overlay, overlay
from .layout import Layout, receivers_contribute
from .mesh import Coordinate, Mesh
from .placements import Partial, Shard

FILL = -1
"""In place of a sender: the box is filled with the identity of the target's partial op."""

_MOST_PAIRS = 1 << 18  # of receivers and holders that are looked at together
_MOST_KEPT = 64  # ranks of a closure up to which all pairs that there may be are looked at, whatever the shape
_FEW_PAIRS = 64  # that are looked at one by one, rather than as arrays
_MOST_COUNTED = 1024  # ranks of a mesh up to which all boxes of a shard that becomes partial are looked at


class Row(NamedTuple):
    """One of `Boxes`, in Python numbers."""

    receiver: int
    senders: list[int]
    source_start: list[int]
    target_start: list[int]
    extent: list[int]
    source_step: list[int]
    target_step: list[int]


@dataclass(frozen=True, eq=False)
class Boxes:
    """n boxes over k axes; each row says which box of which senders' shards becomes which box of the receiver's.

    Starts are indices into the local shards, per tensor dim; axis a of a box runs along tensor dim `axes[a]` in
    steps, so that index sets with a stride need no other table. All int64.
    """

    receiver: np.ndarray  # [n] mesh positions
    sender: np.ndarray  # [n, contributors] mesh positions, ascending in the order of reduction; FILL = none
    source_start: np.ndarray  # [n, tensor dims]
    target_start: np.ndarray  # [n, tensor dims]
    extent: np.ndarray  # [n, axes]
    source_step: np.ndarray  # [n, axes]
    target_step: np.ndarray  # [n, axes]
    axes: tuple[int, ...]

    def __len__(self) -> int:
        rows = self.__dict__.get("_rows")
        return len(self.receiver if rows is None else rows)

    @property
    def elements(self) -> np.ndarray:
        """Elements of each box, [n]."""
        return self.extent.prod(axis=1)

    @classmethod
    def of_rows(cls, rows: list[Row], contributors: int, axes: tuple[int, ...]) -> Boxes:
        """Plain boxes, with an axis for each tensor dim, by `numbers`; the arrays are made when one is read."""
        boxes = cls.__new__(cls)
        boxes.__dict__.update(_rows=rows, _contributors=contributors, axes=axes)
        return boxes

    def __getattr__(self, name: str) -> np.ndarray:
        """The arrays of a table `of_rows`."""
        given = self.__dict__
        if "_rows" not in given or name not in _COLUMNS:
            raise AttributeError(f"Boxes has no attribute {name!r}")
        n, widths = len(given["_rows"]), {"receiver": (), "sender": (given["_contributors"],)}
        columns = zip(*given["_rows"], strict=True) if n else [()] * len(_COLUMNS)
        for column, values in zip(_COLUMNS, columns, strict=True):
            shape = (n, *widths.get(column, (len(self.axes),)))
            given[column] = np.array(values, dtype=np.int64).reshape(shape)
        return given[name]

    def numbers(self) -> list[Row]:
        """The rows as Python numbers: a few take less time than arrays of them. Not to be written to."""
        if (rows := self.__dict__.get("_rows")) is not None:
            return rows
        return list(map(Row, *[getattr(self, column).tolist() for column in _COLUMNS]))

    def select(self, rows: np.ndarray) -> Boxes:
        return Boxes(
            self.receiver[rows],
            self.sender[rows],
            self.source_start[rows],
            self.target_start[rows],
            self.extent[rows],
            self.source_step[rows],
            self.target_step[rows],
            self.axes,
        )

    def elements_received(self, position: int) -> int:
        """Elements that `position` gets from others."""
        mine = self.receiver == position
        foreign = (self.sender[mine] != position) & (self.sender[mine] != FILL)
        return int((foreign.sum(axis=1) * self.elements[mine]).sum())

    @classmethod
    def of(cls, found: Overlay, receiver: np.ndarray, sender: np.ndarray) -> Boxes:
        """The boxes found, with the receiver and the senders of each."""
        starts = found.source_start, found.target_start
        steps = found.source_step, found.target_step
        return cls(receiver, sender, *starts, found.extent, *steps, found.axes)

    @classmethod
    def concatenate(cls, parts: Sequence[Boxes]) -> Boxes:
        if len(parts) == 1:
            return parts[0]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return cls(axes=parts[0].axes, **columns)


_COLUMNS = tuple([f.name for f in fields(Boxes) if f.name != "axes"])


class Change:
    """What one exchange does to each mesh dim, worked out from two layouts in which mesh dims of size 1 are replicated,
    for tensors of any shape.

    Attributes:
        closure: mesh dims whose cut, or an earlier cut of the same tensor dim, changed; the exchange stays inside them.
        reduced: mesh dims whose partial disappears.
        split: mesh dims that become partial.
        keepers: those of `split` where coordinate 0 keeps the whole value and the others hold zero (integers, bool).
        replicas: mesh dims of the closure along which the source is replicated: equal holders of a piece differ there.
        shards_split: those of `split` that were a shard: what is held stays with its owner's coordinate.
        contributors: ranks whose terms of a piece are reduced, 1 where nothing is.
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
        """Mesh dims that become a sum of what each rank there held."""
        whole = [m for m in self.split if m not in self.shards_split]
        return tuple([m for m in whole if self.target.placements[m] == Partial("sum")])

    @property
    def divisor(self) -> float:
        """What the value is divided by: averages that end, and floats that are split over a new sum. Below 1 where a
        shard becomes an average: its owner holds n times its part."""
        divided = [m for m in self.reduced if self.source.placements[m] == Partial("avg")]
        divided += self._new_sums if is_floating(self.dtype) else ()
        multiplied = [m for m in self.shards_split if self.target.placements[m] == Partial("avg")]
        divisor, multiplier = (math.prod(self.mesh.shape[m] for m in dims) for dims in (divided, multiplied))
        return divisor if multiplier == 1 else divisor / multiplier

    @property
    def op(self) -> str:
        """The reduction over contributors; an average is a sum with a divisor."""
        ops = {p.op for m, p in enumerate(self.source.placements) if m in self.reduced and isinstance(p, Partial)}
        return "sum" if not ops or "avg" in ops else ops.pop()

    def boxes(self, shape: tuple[int, ...], rank: int | None = None) -> Boxes:
        """Every row for a tensor of a shape, or those in which position `rank` receives or sends; a receiver's rows
        tile its target shard.

        Rows are in the order of receivers, then of the source's cells, tensor dim by tensor dim in cutting order.
        """
        if rank is None:
            return Boxes.concatenate([self._boxes(shape, *pairs) for pairs in self._all_pairs()])
        if math.prod([self.mesh.shape[m] for m in self.closure]) <= _MOST_KEPT:
            return _pairs_of_any_shape(self, rank).boxes(shape)
        sent = self._boxes(shape, *self._pairs_from(rank, shape))
        mine = (sent.sender == rank).any(axis=1) & (sent.receiver != rank)
        found = Boxes.concatenate([self._boxes(shape, *self._pairs_to(rank, shape)), sent.select(mine)])
        return found.select(np.argsort(found.receiver, kind="stable"))

    def pairs_of_any_shape(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Coordinates of receivers and of holders, [n, mesh dims] each, and the senders, [n, contributors], of all rows
        that position `rank` may have in a tensor of any shape, in their order."""
        received, sent = self._pairs_to(rank), self._pairs_from(rank)
        receivers, holders = (np.concatenate(both) for both in zip(received, sent, strict=True))
        senders, receiver = self._senders(receivers, holders), receivers @ self.mesh.strides
        mine = (senders == rank).any(axis=1) & (receiver != rank)
        mine[: len(received[0])] = True
        rows = np.flatnonzero(mine)
        rows = rows[np.argsort(receiver[rows], kind="stable")]
        return receivers[rows], holders[rows], senders[rows]

    def _all_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates of receivers and of holders of each cell that they may need, [n, mesh dims] each, in parts."""
        mesh, cut = self.mesh, self._cut(self.source)
        cells = grid([mesh.shape[m] for m in cut])
        at_once = max(1, _MOST_PAIRS // len(cells))
        for first in range(0, mesh.size, at_once):
            receivers = mesh.coordinates[:, first : first + at_once].T.repeat(len(cells), axis=0)
            holders = receivers.copy()
            holders[:, cut] = np.tile(cells, (len(receivers) // len(cells), 1))
            yield receivers, holders

    def _pairs_to(self, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of which `rank` is the receiver: of a tensor of a shape, or all that there are of any."""
        me = self.mesh.coordinate(rank)
        holders = self._places(self.source, me, shape, self.target)
        return np.broadcast_to(np.array(me), holders.shape), holders

    def _pairs_from(self, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in which the cell is that of `rank`, with every receiver whose target meets it."""
        me = self.mesh.coordinate(rank)
        free = [m for m in self.closure if not isinstance(self.target.placements[m], Shard)]
        receivers = self._places(self.target, me, shape, self.source, free)
        holders, cut = receivers.copy(), self._cut(self.source)
        holders[:, cut] = np.array(me)[cut]
        return receivers, holders

    def _cut(self, layout: Layout) -> list[int]:
        """The mesh dims of the closure that cut under a layout, tensor dim by tensor dim in cutting order. Shards that
        differ along another mesh dim that cuts have nothing in common."""
        return [m for _, order in layout.orders for m in order if m in self.closure]

    def _places(
        self, layout: Layout, me: Coordinate, shape: tuple[int, ...] | None, met: Layout, free: Sequence[int] = ()
    ) -> np.ndarray:
        """Coordinates whose shards under `layout` meet what `me` holds under the layout `met`, [n, mesh dims], in the
        order of cells; `me` elsewhere, and each coordinate along the mesh dims `free`. Without a shape all that do in
        a tensor of some shape."""
        if shape is None:
            cut = self._cut(layout)
            cells = grid([self.mesh.shape[m] for m in cut])
        else:
            box = held_box(shape, met, self.mesh.shape, me)
            cut = [m for _, order in layout.orders for m in order]
            found = [cells_meeting(n, layout.cuts(d), self.mesh.shape, box[d]) for d, n in enumerate(shape)]
            index = grid([len(of_dim) for of_dim in found])
            of_dims = [of_dim[index[:, d]] for d, of_dim in enumerate(found)]
            cells = np.concatenate([index[:, :0], *of_dims], axis=1)
        index = grid([len(cells), *(self.mesh.shape[m] for m in free)])
        places = np.tile(np.array(me, dtype=np.int64), (len(index), 1))
        places[:, cut] = cells[index[:, 0]]
        places[:, free] = index[:, 1:]
        return places

    def _boxes(
        self, shape: tuple[int, ...], receivers: np.ndarray, holders: np.ndarray, senders: np.ndarray | None = None
    ) -> Boxes:
        """The rows of pairs of a receiver and a holder of a cell, without those where nothing meets."""
        mesh = self.mesh
        found = overlay(shape, self.source, mesh.shape, holders, self.target, mesh.shape, receivers)
        receivers = receivers[found.pair]
        sender = self._senders(receivers, holders[found.pair]) if senders is None else senders[found.pair]
        return Boxes.of(found, receivers @ mesh.strides, sender)

    def _senders(self, receivers: np.ndarray, holders: np.ndarray) -> np.ndarray:
        """Positions [n, contributors]: the receiver itself where it holds the cell, else of equal holders, those of its
        node if there are any, the one whose turn it is."""
        mesh, reduced = self.mesh, list(self.reduced)
        fixed = [m for m in range(mesh.ndim) if m not in self.replicas and m not in reduced]
        terms = grid([mesh.shape[m] for m in reduced])
        itself = receivers @ mesh.strides
        alike = (holders[:, fixed] == receivers[:, fixed]).all(axis=1)
        own = alike[:, None] & (self._term(receivers)[:, None] == np.arange(len(terms)))
        base = holders[:, fixed] @ mesh.strides[fixed]
        if self.replicas:
            turn = digits = turn_of(receivers, self.target, mesh.shape, self.closure)
            for m in reversed(self.replicas):
                digits, digit = np.divmod(digits, mesh.shape[m])
                base = base + digit * mesh.strides[m]
        senders = base[:, None] + terms @ mesh.strides[reduced]
        if self.replicas and self.node_size is not None:
            near = mesh.on_node_of(mesh.rank_array[itself], self.node_size)
            places = np.stack(np.unravel_index(np.maximum(near, 0), mesh.shape), axis=2)
            holds = (places[:, :, fixed] == holders[:, None, fixed]).all(axis=2) & (near >= 0)
            holds = holds[:, None, :] & (self._term(places)[:, None, :] == np.arange(len(terms))[:, None])
            count = holds.sum(axis=2)
            nth = (holds.cumsum(axis=2) == (turn[:, None] % np.maximum(count, 1))[:, :, None] + 1).argmax(axis=2)
            senders = np.where(count > 0, np.take_along_axis(near, nth, axis=1), senders)
        senders = np.where(own, itself[:, None], senders)
        # A shard that becomes partial stays with its owner's coordinate; the others hold the identity there.
        filled = (holders != receivers)[:, self.shards_split].any(axis=1)
        filled |= (receivers[:, self.keepers] != 0).any(axis=1)
        senders[filled] = FILL
        return senders

    def _term(self, coordinates: np.ndarray) -> np.ndarray:
        """Which contribution ranks make, from coordinates [..., mesh dims]."""
        term = np.zeros(coordinates.shape[:-1], dtype=np.int64)
        for m in self.reduced:
            term = term * self.mesh.shape[m] + coordinates[..., m]
        return term

    def communicates(self, shape: tuple[int, ...]) -> bool:
        """Whether any rank at all must receive anything: the same answer on every rank."""
        if 0 in shape or not self.closure:
            return False
        if self.reduced:
            return True
        if self.closure == self.shards_split or self.stays:
            return False
        if self.shards_split:
            if self.mesh.size > _MOST_COUNTED:
                return True  # to be sure would take every rank's boxes
            boxes = self.boxes(shape)
            return bool(((boxes.sender != boxes.receiver[:, None]) & (boxes.sender != FILL)).any())
        if self.source.strided_dims or self.target.strided_dims:
            if self.mesh.size > _MOST_COUNTED:
                return True
            return not all(self._has_all(shape, self.mesh.coordinate(position)) for position in range(self.mesh.size))
        # Mostly the first rank tells, which has a part of every tensor.
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
    def stays(self) -> bool:
        """Whether every rank holds all that it ends with, partial values apart, whatever the shape."""
        return receivers_contribute(self.source, self.target)

    def _has_all(self, shape: tuple[int, ...], coordinate: Coordinate) -> bool:
        at = self.mesh.shape, coordinate
        return elements_in_common(shape, self.source, at, self.target, at) == math.prod(
            held_sizes(shape, self.target, *at)
        )


change_of = lru_cache(maxsize=4096)(Change)
"""The change between two layouts, made once."""


class _KeptPairs:
    """`Change.pairs_of_any_shape`, found once: tensors of new shapes then cost their own boxes alone."""

    def __init__(self, change: Change, rank: int) -> None:
        self.change, self.pairs = change, change.pairs_of_any_shape(rank)
        receivers, holders, senders = self.pairs
        self.few: FewPairs | None = None
        if len(receivers) <= _FEW_PAIRS and not (change.source.strided_dims or change.target.strided_dims):
            on = change.mesh.shape
            self.few = FewPairs(change.source, on, holders.tolist(), change.target, on, receivers.tolist())
            self.receivers, self.senders = (receivers @ change.mesh.strides).tolist(), senders.tolist()

    def boxes(self, shape: tuple[int, ...]) -> Boxes:
        if self.few is None:
            return self.change._boxes(shape, *self.pairs)
        ones = [1] * len(shape)
        rows = [
            Row(self.receivers[pair], self.senders[pair], source, target, extent, ones, ones)
            for pair, source, target, extent in self.few.overlay(shape)
        ]
        return Boxes.of_rows(rows, self.change.contributors, tuple(range(len(shape))))


_pairs_of_any_shape = lru_cache(maxsize=1024)(_KeptPairs)


def grid(sizes: Sequence[int]) -> np.ndarray:
    """Every index of an array of such sizes, row-major: [n, sizes]."""
    return np.indices(sizes, dtype=np.int64).reshape(len(sizes), math.prod(sizes)).T


def turn_of(receivers: np.ndarray, target: Layout, mesh_shape: Sequence[int], mesh_dims: Iterable[int]) -> np.ndarray:
    """A receiver's place among the ranks with its target set, plus that set's place: it spreads the load. [n]"""
    among = which = np.zeros(len(receivers), dtype=np.int64)
    for m in mesh_dims:
        if isinstance(target.placements[m], Shard):
            which = which * mesh_shape[m] + receivers[:, m]
        else:
            among = among * mesh_shape[m] + receivers[:, m]
    return among + which
