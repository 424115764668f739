"""The one primitive: from one assignment of index sets to another, inside subgroups of ranks, as a table of boxes.

Every rank computes its own rows alone: who holds a piece and who serves it are closed forms of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from .dtypes import is_floating
from .index_sets import Span, cells_meeting, held_box, spans_at
from .layout import Layout, Partial, Replicate, Shard
from .mesh import Coordinate, Mesh

FILL = -1
"""In place of a sender: the box is filled with the identity of the target's partial op."""


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
    def from_rows(cls, rows: Sequence[tuple], ndim: int, contributors: int) -> Boxes:
        """Rows of (receiver, senders, source start, target start, extent), all with unit steps."""
        n = len(rows)

        def column(index: int, width: int) -> np.ndarray:
            return np.array([row[index] for row in rows], dtype=np.int64).reshape(n, width)

        ones = np.ones((n, ndim), dtype=np.int64)
        return cls(
            np.array([row[0] for row in rows], dtype=np.int64),
            column(1, contributors),
            column(2, ndim),
            column(3, ndim),
            column(4, ndim),
            ones,
            ones,
            tuple(range(ndim)),
        )


class Change:
    """What one exchange does to each mesh dim, worked out from two layouts in which mesh dims of size 1 are replicated.

    Attributes:
        closure: mesh dims whose cut, or an earlier cut of the same tensor dim, changed; the exchange stays inside them.
        reduced: mesh dims whose partial disappears.
        split: mesh dims that become partial.
        keepers: those of `split` where coordinate 0 keeps the whole value and the others hold zero (integers, bool).
        replicas: mesh dims of the closure along which the source is replicated: equal holders of a piece differ there.
        shards_split: those of `split` that were a shard: what is held stays with its owner's coordinate.
        divisor: what the value is divided by: averages that end, and floats that are split over a new sum. Below 1
            where a shard becomes an average: its owner holds n times its part.
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
        pairs = list(enumerate(zip(source.placements, target.placements, strict=True)))
        self.closure = tuple(m for m, _ in pairs if _cut_prefix(source, m) != _cut_prefix(target, m))
        self.reduced = tuple(m for m, (a, b) in pairs if isinstance(a, Partial) and a != b)
        self.split = tuple(m for m, (a, b) in pairs if isinstance(b, Partial) and a != b)
        self.replicas = tuple(m for m in self.closure if isinstance(source.placements[m], Replicate))
        self.shards_split = tuple(m for m in self.split if isinstance(source.placements[m], Shard))
        split = [m for m in self.split if m not in self.shards_split]
        summed = [m for m in split if target.placements[m] == Partial("sum")]
        self.keepers = () if is_floating(dtype) else tuple(summed)
        divided = [m for m in self.reduced if source.placements[m] == Partial("avg")]
        divided += summed if is_floating(dtype) else []
        multiplied = [m for m in self.shards_split if target.placements[m] == Partial("avg")]
        divisor, multiplier = (math.prod(mesh.shape[m] for m in dims) for dims in (divided, multiplied))
        self.divisor: float = divisor if multiplier == 1 else divisor / multiplier

    @property
    def contributors(self) -> int:
        return math.prod(self.mesh.shape[m] for m in self.reduced)

    @property
    def op(self) -> str:
        """The reduction over contributors; an average is a sum with a divisor."""
        ops = {p.op for m, p in enumerate(self.source.placements) if m in self.reduced and isinstance(p, Partial)}
        return "sum" if not ops or "avg" in ops else ops.pop()

    def rows_for_receiver(self, receiver: Coordinate, within: tuple[Span, ...] | None = None) -> list[tuple]:
        """The rows that make up the target shard of `receiver`; their target boxes tile it exactly.

        With `within`, a source box, only those that its holders may send, in time that goes with their number.
        """
        mesh, shape = self.mesh, self.shape
        target_box = held_box(shape, self.target, mesh.shape, receiver)
        if any(low >= high for low, high in target_box):
            return []
        position = mesh.position(receiver)
        orders = dict(self.source.orders)
        sought = target_box
        if within is not None:
            sought = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(target_box, within, strict=True))
        per_dim = [
            cells_meeting(n, tuple(mesh.shape[m] for m in orders.get(d, ())), span)
            for d, (n, span) in enumerate(zip(shape, sought, strict=True))
        ]
        cut_by = [orders.get(d, ()) for d in range(len(shape))]
        turn = self._turn(receiver) if self.replicas else 0
        near = self._near(position) if self.replicas else []
        dropped = any(receiver[m] != 0 for m in self.keepers)
        rows: list[tuple] = []
        for cells in product(*per_dim):
            holder = list(receiver)
            for order, (coordinate, _) in zip(cut_by, cells, strict=True):
                for mesh_dim, index in zip(order, coordinate, strict=True):
                    holder[mesh_dim] = index
            spans = [span for _, span in cells]
            low = [max(a, t) for (a, _), (t, _) in zip(spans, target_box, strict=True)]
            high = [min(b, t) for (_, b), (_, t) in zip(spans, target_box, strict=True)]
            source_start = [a - s for a, (s, _) in zip(low, spans, strict=True)]
            target_start = [a - t for a, (t, _) in zip(low, target_box, strict=True)]
            extent = [b - a for a, b in zip(low, high, strict=True)]
            # A shard that becomes partial stays with its owner's coordinate; the others hold the identity there.
            elsewhere = any(holder[m] != receiver[m] for m in self.shards_split)
            if dropped or elsewhere:
                senders = [FILL] * self.contributors
            else:
                senders = [
                    self._server(holder, contributor, receiver, position, near, turn)
                    for contributor in product(*(range(mesh.shape[m]) for m in self.reduced))
                ]
            rows.append((position, senders, source_start, target_start, extent))
        return rows

    def _server(
        self,
        holder: list[int],
        contributor: Coordinate,
        receiver: Coordinate,
        position: int,
        near: list[Coordinate],
        turn: int,
    ) -> int:
        """Who sends: the receiver itself where it holds the piece, else of equal holders, those of its node if there
        are any, the one whose turn it is."""
        chosen = list(holder)
        for mesh_dim, index in zip(self.reduced, contributor, strict=True):
            chosen[mesh_dim] = index
        fixed = [m for m in range(self.mesh.ndim) if m not in self.replicas]
        if all(chosen[m] == receiver[m] for m in fixed):
            return position
        on_node = [c for c in near if all(c[m] == chosen[m] for m in fixed)]
        if on_node:
            return self.mesh.position(on_node[turn % len(on_node)])
        for mesh_dim in reversed(self.replicas):
            turn, chosen[mesh_dim] = divmod(turn, self.mesh.shape[mesh_dim])
        return self.mesh.position(chosen)

    def _near(self, position: int) -> list[Coordinate]:
        """The coordinates of the ranks on a receiver's node; none where all ranks are near each other."""
        if self.node_size is None:
            return []
        return [self.mesh.coordinate(p) for p in self.mesh.node_of(position, self.node_size)]

    def _turn(self, receiver: Coordinate) -> int:
        """The receiver's place among the ranks with its target set, plus that set's place: it spreads the load."""
        among = which = 0
        for mesh_dim in self.closure:
            n = self.mesh.shape[mesh_dim]
            if isinstance(self.target.placements[mesh_dim], Shard):
                which = which * n + receiver[mesh_dim]
            else:
                among = among * n + receiver[mesh_dim]
        return among + which

    def boxes(self, rank: int | None = None) -> Boxes:
        """Every row, or those in which position `rank` receives or sends."""
        mesh = self.mesh
        if rank is None:
            rows = [row for receiver in product(*map(range, mesh.shape)) for row in self.rows_for_receiver(receiver)]
        else:
            me = mesh.coordinate(rank)
            mine = held_box(self.shape, self.source, mesh.shape, me)
            near = self._receivers_near(me)
            rows = [row for r in near for row in self.rows_for_receiver(r, None if r == me else mine)]
        boxes = Boxes.from_rows(rows, len(self.shape), self.contributors)
        if rank is None:
            return boxes
        return boxes.select((boxes.receiver == rank) | (boxes.sender == rank).any(axis=1))

    def _receivers_near(self, rank: Coordinate) -> list[Coordinate]:
        """The rank itself and every receiver whose target meets the rank's source box."""
        source_box = held_box(self.shape, self.source, self.mesh.shape, rank)
        found = {rank}
        if all(low < high for low, high in source_box):
            orders = dict(self.target.orders)
            per_dim = [
                cells_meeting(n, tuple(self.mesh.shape[m] for m in orders.get(d, ())), source_box[d])
                for d, n in enumerate(self.shape)
            ]
            free = [m for m in self.closure if not isinstance(self.target.placements[m], Shard)]
            for cells in product(*per_dim):
                near = list(rank)
                for d, (coordinate, _) in enumerate(cells):
                    for mesh_dim, index in zip(orders.get(d, ()), coordinate, strict=True):
                        near[mesh_dim] = index
                for indices in product(*(range(self.mesh.shape[m]) for m in free)):
                    for mesh_dim, index in zip(free, indices, strict=True):
                        near[mesh_dim] = index
                    found.add(tuple(near))
        return sorted(found)

    def communicates(self) -> bool:
        """Whether any rank at all must receive anything: the same answer on every rank."""
        if 0 in self.shape or not self.closure:
            return False
        if self.reduced:
            return True
        if self.shards_split:
            boxes = self.boxes()
            return bool(((boxes.sender != boxes.receiver[:, None]) & (boxes.sender != FILL)).any())
        source, target = (
            spans_at(self.shape, layout, self.mesh, np.arange(self.mesh.size)) for layout in (self.source, self.target)
        )
        wanted = (target[..., 0] < target[..., 1]).all(axis=0)
        inside = ((source[..., 0] <= target[..., 0]) & (target[..., 1] <= source[..., 1])).all(axis=0)
        return bool((wanted & ~inside).any())


def _cut_prefix(layout: Layout, mesh_dim: int) -> tuple:
    """Equal for two layouts exactly if `mesh_dim` cuts the same tensor dim after the same earlier cuts, or never."""
    placement = layout.placements[mesh_dim]
    if isinstance(placement, Shard):
        order = layout.order(placement.dim)
        return placement, order[: order.index(mesh_dim)]
    return (placement,)
