"""The one primitive: from one assignment of index sets to another, inside subgroups of ranks, as a table of boxes.

Every rank computes its own rows alone: who holds a piece and who serves it are closed forms of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from .dtypes import is_floating
from .index_sets import Span, cells_meeting, elements_in_common, held_box, held_sizes, spans_at
from .layout import Layout, Partial, Shard, receivers_contribute
from .mesh import Coordinate, Mesh
from .overlay import Overlay, overlay

FILL = -1
"""In place of a sender: the box is filled with the identity of the target's partial op."""

_MOST_PAIRS = 1 << 18  # of receivers and holders that are looked at together
_MOST_COUNTED = 1024  # ranks of a mesh up to which all boxes of a shard that becomes partial are looked at


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
        return len(self.receiver)

    @property
    def elements(self) -> np.ndarray:
        """Elements of each box, [n]."""
        return self.extent.prod(axis=1)

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
        names = [f.name for f in fields(cls) if f.name != "axes"]
        return cls(axes=parts[0].axes, **{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


class Change:
    """What one exchange does to each mesh dim, worked out from two layouts in which mesh dims of size 1 are replicated.

    Attributes:
        closure: mesh dims whose cut, or an earlier cut of the same tensor dim, changed; the exchange stays inside them.
        reduced: mesh dims whose partial disappears.
        split: mesh dims that become partial.
        keepers: those of `split` where coordinate 0 keeps the whole value and the others hold zero (integers, bool).
        replicas: mesh dims of the closure along which the source is replicated: equal holders of a piece differ there.
        shards_split: those of `split` that were a shard: what is held stays with its owner's coordinate.
        contributors: ranks whose terms of a piece are reduced, 1 where nothing is.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        dtype: str,
        source: Layout,
        target: Layout,
        node_size: int | None = None,
    ) -> None:
        self.mesh, self.shape, self.dtype, self.source, self.target = mesh, shape, dtype, source, target
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

    def boxes(self, rank: int | None = None) -> Boxes:
        """Every row, or those in which position `rank` receives or sends; a receiver's rows tile its target shard.

        Rows are in the order of receivers, then of the source's cells, tensor dim by tensor dim in cutting order.
        """
        if rank is None:
            parts = [self._boxes(*pairs) for pairs in self._all_pairs()]
            return Boxes.concatenate(parts)
        me = self.mesh.coordinate(rank)
        sent = self._boxes(*self._pairs_from(me))
        mine = (sent.sender == rank).any(axis=1) & (sent.receiver != rank)
        found = Boxes.concatenate([self._boxes(*self._pairs_to(me)), sent.select(mine)])
        return found.select(np.argsort(found.receiver, kind="stable"))

    def _all_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates of receivers and of holders of each cell that they may need, [n, mesh dims] each, in parts."""
        mesh = self.mesh
        cut = [m for _, order in self.source.orders for m in order if m in self.closure]
        cells = grid([mesh.shape[m] for m in cut])
        at_once = max(1, _MOST_PAIRS // len(cells))
        for first in range(0, mesh.size, at_once):
            positions = np.arange(first, min(first + at_once, mesh.size))
            receivers = np.stack(np.unravel_index(positions, mesh.shape), axis=1).repeat(len(cells), axis=0)
            holders = receivers.copy()
            holders[:, cut] = np.tile(cells, (len(positions), 1))
            yield receivers, holders

    def _pairs_to(self, me: Coordinate) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of which `me` is the receiver."""
        box = held_box(self.shape, self.target, self.mesh.shape, me)
        holders = self._places(self.source, box, me)
        return np.broadcast_to(np.array(me), holders.shape), holders

    def _pairs_from(self, me: Coordinate) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in which the cell is that of `me`, with every receiver whose target meets it."""
        box = held_box(self.shape, self.source, self.mesh.shape, me)
        free = [m for m in self.closure if not isinstance(self.target.placements[m], Shard)]
        receivers = self._places(self.target, box, me, free)
        holders = receivers.copy()
        cut = [m for m in self.closure if isinstance(self.source.placements[m], Shard)]
        holders[:, cut] = np.array(me)[cut]
        return receivers, holders

    def _places(self, layout: Layout, box: tuple[Span, ...], start: Coordinate, free: Sequence[int] = ()) -> np.ndarray:
        """Coordinates whose shards under `layout` meet `box`, [n, mesh dims], in the order of cells; `start` elsewhere,
        and each coordinate along the mesh dims `free`."""
        cells = [
            cells_meeting(n, layout.cuts(d), self.mesh.shape, span)
            for d, (n, span) in enumerate(zip(self.shape, box, strict=True))
        ]
        sizes = [len(found) for found in cells] + [self.mesh.shape[m] for m in free]
        index = grid(sizes)
        places = np.tile(np.array(start, dtype=np.int64), (len(index), 1))
        for d, found in enumerate(cells):
            places[:, layout.order(d)] = found[index[:, d]]
        places[:, free] = index[:, len(cells) :]
        return places

    def _boxes(self, receivers: np.ndarray, holders: np.ndarray) -> Boxes:
        """The rows of pairs of a receiver and a holder of a cell, without those where nothing meets."""
        mesh = self.mesh
        found = overlay(self.shape, self.source, mesh.shape, holders, self.target, mesh.shape, receivers)
        receivers, holders = receivers[found.pair], holders[found.pair]
        return Boxes.of(found, receivers @ mesh.strides, self._senders(receivers, holders))

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

    def communicates(self) -> bool:
        """Whether any rank at all must receive anything: the same answer on every rank."""
        if 0 in self.shape or not self.closure:
            return False
        if self.reduced:
            return True
        if self.closure == self.shards_split:
            return False
        if self.shards_split:
            if self.mesh.size > _MOST_COUNTED:
                return True  # to be sure would take every rank's boxes
            boxes = self.boxes()
            return bool(((boxes.sender != boxes.receiver[:, None]) & (boxes.sender != FILL)).any())
        if self.source.strided_dims or self.target.strided_dims:
            if self.mesh.size > _MOST_COUNTED:
                return not receivers_contribute(self.source, self.target)
            return not all(self._has_all(self.mesh.coordinate(position)) for position in range(self.mesh.size))
        coordinates = np.stack(np.unravel_index(np.arange(self.mesh.size), self.mesh.shape))
        source, target = (spans_at(self.shape, x, self.mesh.shape, coordinates) for x in (self.source, self.target))
        wanted = (target[..., 0] < target[..., 1]).all(axis=0)
        inside = ((source[..., 0] <= target[..., 0]) & (target[..., 1] <= source[..., 1])).all(axis=0)
        return bool((wanted & ~inside).any())

    def _has_all(self, coordinate: Coordinate) -> bool:
        at = self.mesh.shape, coordinate
        wanted = math.prod(held_sizes(self.shape, self.target, *at))
        return elements_in_common(self.shape, self.source, at, self.target, at) == wanted


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
