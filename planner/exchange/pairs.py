"""The pairs of a receiver and a holder between which a layout change may transfer a box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from ..layouts.index_sets import cells_meeting, mesh_dims_of, spans_by_dim
from ..layouts.layout import Layout
from ..layouts.mesh import Coordinate, Mesh
from ..layouts.nodes import nodes_of
from ..layouts.placements import Shard
from ..layouts.spans import Span
from .layout_change import LayoutChange

Coordinates = Sequence[np.ndarray]
"""The coordinates of several ranks: for each mesh dim an array; these broadcast to one shape."""
_MAX_PAIRS_AT_ONCE = 1 << 18  # pairs of receiver and holder that are intersected together


class Pairs:
    """Pairs of a receiver and a holder: entries of a grid whose axes are independent choices, such as the shard of one
    tensor dim.

    A coordinate varies along few axes. What follows from a few coordinates is computed for these alone, by
    broadcasting, and not once for each pair. An array without axes is a value that all pairs have.

    Args:
        shape: the shape of the grid.
        receivers, holders: the coordinates, each on its own mesh; each array broadcasts to `shape`, and has as many
            axes or none.
        entries: [n] the flat indices of the pairs in the grid; None: every entry.
    """

    def __init__(
        self, shape: tuple[int, ...], receivers: Coordinates, holders: Coordinates, entries: np.ndarray | None = None
    ) -> None:
        self.shape, self.receivers, self.holders, self.entries = shape, receivers, holders, entries

    def __len__(self) -> int:
        return math.prod(self.shape) if self.entries is None else len(self.entries)

    def select(self, index: np.ndarray) -> Pairs:
        """The pairs at `index` [n]."""
        return Pairs(self.shape, self.receivers, self.holders, index if self.entries is None else self.entries[index])

    @cached_property
    def _index(self) -> tuple[np.ndarray, ...]:
        """For each axis of the grid the index of each pair."""
        assert self.entries is not None
        return np.unravel_index(self.entries, self.shape) if len(self.shape) > 1 else (self.entries,)

    def compact(self, of_grid: np.ndarray) -> np.ndarray:
        """[n] the value of each pair, given an array that broadcasts to the grid; a single one as it is. Read-only."""
        if of_grid.ndim == 0:
            return of_grid
        if self.entries is None:
            whole = of_grid if of_grid.shape == self.shape else np.broadcast_to(of_grid, self.shape)
            return whole.reshape(-1)
        return of_grid[tuple([0 if n == 1 else i for n, i in zip(of_grid.shape, self._index, strict=True)])]

    def values(self, of_grid: np.ndarray) -> np.ndarray:
        """[n] the value of each pair, given an array that broadcasts to the grid. Read-only."""
        compact = self.compact(of_grid)
        return compact if compact.ndim else np.broadcast_to(compact, len(self))

    @cached_property
    def flattened(self) -> Pairs:
        """The same pairs as a grid of one axis, unless they are a whole grid."""
        if self.entries is None:
            return self
        receivers, holders = ([self.compact(x) for x in at] for at in (self.receivers, self.holders))
        return Pairs((len(self),), receivers, holders)


def joined(parts: Sequence[Pairs]) -> Pairs:
    """The pairs of all parts, one part after the other, as a grid of one axis."""
    n = sum(map(len, parts))
    receivers, holders = (np.empty((len(at), n), dtype=np.int64) for at in (parts[0].receivers, parts[0].holders))
    first = 0
    for pairs in parts:
        rows = slice(first, first := first + len(pairs))
        for to, at in ((receivers, pairs.receivers), (holders, pairs.holders)):
            for m, x in enumerate(at):
                to[m, rows] = pairs.compact(x)
    return Pairs((n,), list(receivers), list(holders))


def all_pairs(change: LayoutChange) -> Iterator[Pairs]:
    """All receivers, and a holder of each source shard, in chunks."""
    cut, mesh = _cut(change.source, change.source_dims), change.target_mesh
    sizes = [change.source_mesh.shape[m] for m in cut]
    at_once = max(1, _MAX_PAIRS_AT_ONCE // math.prod(sizes))
    cells = dict(zip(cut, np.indices((1, *sizes), dtype=np.int64, sparse=True)[1:], strict=True))
    for first in range(0, mesh.size, at_once):
        chunk = mesh.coordinates[:, first : first + at_once]
        receivers = [x.reshape(-1, *[1] * len(cut)) for x in chunk]
        holders = _on_other_mesh(change, receivers, change.source_mesh)
        yield Pairs((chunk.shape[1], *sizes), receivers, [cells.get(m, x) for m, x in enumerate(holders)])


def pairs_to(change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None) -> Pairs:
    """The pairs whose receiver is position `rank`, for a tensor of `shape` or (None) of any shape."""
    mesh = change.target_mesh
    at = mesh.coordinate_of(rank, change.positions)
    if at is None:
        return _no_pairs(change)
    held = None if shape is None else spans_by_dim(shape, change.target, mesh.shape, at)
    me = _of_one(at)
    start = _on_other_mesh(change, me, change.source_mesh)
    size, holders = _coordinates_meeting(change.source_mesh, change.source, change.source_dims, start, shape, held)
    return Pairs(size, me, holders)


def pairs_from(change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None) -> Pairs:
    """The pairs whose holder has the shard of position `rank`, for a tensor of `shape` or (None) of any shape, without
    most of those in which another rank is the sender."""
    mesh = change.source_mesh
    at = mesh.coordinate_of(rank, change.positions)
    if at is None:
        return _no_pairs(change)
    held = None if shape is None else spans_by_dim(shape, change.source, mesh.shape, at)
    me = _of_one(at)
    start = _on_other_mesh(change, me, change.target_mesh)
    free = [m for m in change.target_dims if not isinstance(change.target.placements[m], Shard)]
    size, receivers = _coordinates_meeting(
        change.target_mesh, change.target, change.target_dims, start, shape, held, free
    )
    cut = _cut(change.source, change.source_dims)
    holders = [me[m] if m in cut else x for m, x in enumerate(_on_other_mesh(change, receivers, mesh))]
    pairs = Pairs(size, receivers, holders)
    may_send = np.asarray(_may_send(change, me, receivers, holders))
    return pairs if may_send.all() else pairs.select(np.flatnonzero(pairs.values(may_send)))


def _may_send(change: LayoutChange, me: Coordinates, receivers: Coordinates, holders: Coordinates) -> np.ndarray:
    """False for pairs in which the rank at coordinate `me` is not among the senders.

    In time proportional to the pairs, of which there may be one for each rank, however many terms are reduced.
    """
    mesh, replicas = change.source_mesh, change.replicas
    fixed = [m for m in range(mesh.ndim) if m not in replicas and m not in change.reduced]
    sends = all_equal(holders, me, fixed)
    if replicas:
        turn = round_robin_index(change, receivers) % math.prod(mesh.shape[m] for m in replicas)
        own_turn = row_major(me, mesh, replicas)
        ranks = change.target_mesh.rank_array[row_major(receivers, change.target_mesh)]
        own_rank = mesh.rank_array[row_major(me, mesh)]
        may = (turn == own_turn) | (ranks == own_rank)
        if change.nodes is not None:
            may |= nodes_of(ranks, change.nodes) == nodes_of(own_rank, change.nodes)
        sends = sends & may
    return sends


def _no_pairs(change: LayoutChange) -> Pairs:
    nowhere = np.zeros(0, dtype=np.int64)
    return Pairs((0,), [nowhere] * change.target_mesh.ndim, [nowhere] * change.source_mesh.ndim)


def _of_one(coordinate: Coordinate) -> Coordinates:
    return [np.array(c, dtype=np.int64) for c in coordinate]


def _on_other_mesh(change: LayoutChange, coordinates: Coordinates, mesh: Mesh) -> Coordinates:
    """Coordinates on `mesh`, the mesh at the other end of the change: the same on one mesh, 0 on another."""
    return _of_one((0,) * mesh.ndim) if change.is_cross_mesh else coordinates


def _cut(layout: Layout, mesh_dims: Sequence[int]) -> list[int]:
    """The mesh dims among `mesh_dims` that shard under a layout, tensor dim by tensor dim in cutting order.

    Along the other mesh dims of a closure that shard, different coordinates have nothing in common.
    """
    return [m for _, order in layout.orders for m in order if m in mesh_dims]


def _coordinates_meeting(
    mesh: Mesh,
    layout: Layout,
    mesh_dims: Sequence[int],
    start: Coordinates,
    shape: tuple[int, ...] | None,
    held: Sequence[Sequence[Span]] | None,
    free: Sequence[int] = (),
) -> tuple[tuple[int, ...], Coordinates]:
    """The shape and the coordinates of a grid of the ranks on `mesh` whose shards under `layout` meet another shard.

    Mesh dims that do not shard have the coordinate of `start`; the mesh dims `free` have every coordinate.

    Args:
        mesh_dims: the mesh dims along which ranks exchange.
        shape, held: the global shape, and the spans of the shard along each tensor dim. None: for any shape.
    """
    axes: list[tuple[Sequence[int], np.ndarray]]  # mesh dims, and [n, mesh dims] their coordinates
    if shape is None or held is None:
        axes = [((m,), np.arange(mesh.shape[m])[:, None]) for m in _cut(layout, mesh_dims)]
    else:
        cuts = map(layout.cuts, range(len(shape)))
        axes = [
            (mesh_dims_of(c), cells_meeting(n, c, mesh.shape, spans))
            for c, n, spans in zip(cuts, shape, held, strict=True)
        ]
    axes += [((m,), np.arange(mesh.shape[m])[:, None]) for m in free]
    ndim = sum(len(cells) != 1 for _, cells in axes)
    coordinates, size = list(start), list[int]()
    for along, cells in axes:
        place = [1] * ndim if len(cells) != 1 else []
        if len(cells) != 1:
            place[len(size)] = len(cells)
            size.append(len(cells))
        for m, of_dim in zip(along, cells.T, strict=True):
            coordinates[m] = of_dim.reshape(place)
    return tuple(size), coordinates


def all_equal(a: Coordinates, b: Coordinates, mesh_dims: Sequence[int]) -> np.ndarray:
    """Whether coordinates are equal along some mesh dims."""
    equal = np.array(True)
    for m in mesh_dims:
        equal = equal & (a[m] == b[m])
    return equal


def row_major(coordinates: Coordinates, mesh: Mesh, mesh_dims: Sequence[int] | None = None) -> np.ndarray:
    """The row-major index of coordinates along some mesh dims (None: all)."""
    index = np.zeros((), dtype=np.int64)
    for m in range(mesh.ndim) if mesh_dims is None else mesh_dims:
        index = index * mesh.shape[m] + coordinates[m]
    return index


def round_robin_index(change: LayoutChange, receivers: Coordinates) -> np.ndarray:
    """The index of each receiver among the ranks with its target shard, plus the index of that shard.

    Choosing the sender by this index modulo the number of equal holders spreads the load over them.
    """
    placements = change.target.placements
    shard = [m for m in change.target_dims if isinstance(placements[m], Shard)]
    among = [m for m in change.target_dims if not isinstance(placements[m], Shard)]
    return row_major(receivers, change.target_mesh, among) + row_major(receivers, change.target_mesh, shard)
