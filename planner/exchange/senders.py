"""The exchange that performs a layout change: which ranks send which boxes to which.

A holder is a rank whose source shard has a box that a receiver wants. Of equal holders one is the sender; where values
are reduced, one for each term. Each rank computes its own rows without the others: holders and senders are closed forms
of coordinates. An exchange on one mesh is the case in which every receiver also has a source shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from ..layouts.index_sets import cells_meeting, elements_in_common, held_sizes, spans_at, spans_by_dim
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..layouts.nodes import nodes_of
from ..layouts.placements import Shard
from ..layouts.spans import Span
from .intersection import FewPairs, intersect
from .layout_change import LayoutChange
from .node_change import NodeChange, node_transfer_table
from .transfer_table import FILL, Row, TransferTable

_MAX_PAIRS_AT_ONCE = 1 << 18  # pairs of receiver and holder that are intersected together
_MAX_CACHED_GROUP = 64  # ranks that exchange with each other, up to which the pairs for any shape are cached
_MAX_SCALAR_PAIRS = 64  # pairs up to which Python numbers are faster than arrays
_MAX_EXACT_RANKS = 1024  # ranks of a mesh up to which `communicates` looks at all shards where it has no closed form
_FIRST_TRIED = 3  # coordinates of the ranks at which it looks first: they hold most, and usually decide


def transfer_table(change: LayoutChange, shape: tuple[int, ...], rank: int | None = None) -> TransferTable:
    """The transfer table of `change` for a tensor of `shape`: all rows, or those in which position `rank` receives or
    sends.

    The rows of a receiver tile its target shard. Rows are sorted by receiver, then by the shards of the source, tensor
    dim by tensor dim in cutting order.
    """
    if isinstance(change, NodeChange):
        table = node_transfer_table(change, shape)
        if rank is None:
            return table
        return table.select((table.receiver == rank) | (table.sender == rank).any(axis=1))
    if rank is None:
        table = TransferTable.concatenate([_table(change, shape, *pairs) for pairs in _all_pairs(change)])
        return table if change.positions is change.target_mesh else _by_receiver(table)
    if change.group_size <= _MAX_CACHED_GROUP:
        return _cached_pairs(change, rank).table(shape)
    return _table(change, shape, *_pairs_of_rank(change, rank, shape))


def tables_of_ranks(
    change: LayoutChange, shape: tuple[int, ...], ranks: Sequence[int] | None
) -> tuple[TransferTable, TransferTable]:
    """The rows in which one of the positions `ranks` receives, and those in which one of them sends, without a
    reduction; None: all rows, twice.

    Faster than a table for each rank.
    """
    if ranks is None:
        table = transfer_table(change, shape)
        return table, table
    (to, held), (receivers, holders) = (
        map(np.concatenate, zip(*[pairs(change, rank, shape) for rank in ranks], strict=True))
        for pairs in (_pairs_to, _pairs_from)
    )
    # Ranks with equal shards have pairs in common.
    key = (receivers @ change.target_mesh.strides) * change.source_mesh.size + holders @ change.source_mesh.strides
    first = np.unique(key, return_index=True)[1]
    sent = _table(change, shape, receivers[first], holders[first])
    return _table(change, shape, to, held), sent.select(np.isin(sent.sender[:, 0], ranks))


def _by_receiver(table: TransferTable) -> TransferTable:
    return table.select(np.argsort(table.receiver, kind="stable"))


def _table(
    change: LayoutChange,
    shape: tuple[int, ...],
    receivers: np.ndarray,
    holders: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray] | None = None,
) -> TransferTable:
    """The rows of pairs of a receiver and a holder, without pairs that have nothing in common.

    Args:
        receivers: [n, target mesh dims] coordinates.
        holders: [n, source mesh dims] coordinates.
        ends: `_ends` of the pairs, if it is known.
    """
    source_mesh, target_mesh = change.source_mesh.shape, change.target_mesh.shape
    common = intersect(shape, change.source, source_mesh, holders, change.target, target_mesh, receivers)
    pair = common.pair
    receiver, sender = (x[pair] for x in ends) if ends else _ends(change, receivers[pair], holders[pair])
    return TransferTable.of_intersection(common, receiver, sender)


class _PairsOfRank:
    """All pairs of position `rank` for tensors of any shape, from which the table for each shape is made."""

    def __init__(self, change: LayoutChange, rank: int) -> None:
        self.change = change
        self.receivers, self.holders, self.ends = _pairs_of_rank(change, rank)
        self.few: FewPairs | None = None  # if Python numbers are faster than arrays
        if len(self.receivers) <= _MAX_SCALAR_PAIRS and not change.is_strided:
            self.few = FewPairs(
                change.source, change.source_mesh.shape, self.holders.tolist(),
                change.target, change.target_mesh.shape, self.receivers.tolist(),
            )  # fmt: skip
            self.receiver, self.sender = (x.tolist() for x in self.ends)

    def table(self, shape: tuple[int, ...]) -> TransferTable:
        if self.few is None:
            return _table(self.change, shape, self.receivers, self.holders, self.ends)
        ones = [1] * len(shape)
        rows = [
            Row(self.receiver[pair], self.sender[pair], source, target, extent, ones, ones)
            for pair, source, target, extent in self.few.intersections(shape)
        ]
        return TransferTable.from_rows(rows, self.change.contributors, tuple(range(len(shape))))


_cached_pairs = lru_cache(maxsize=1024)(_PairsOfRank)


def _pairs_of_rank(
    change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The pairs in which `rank` receives or sends, sorted by receiver, for a tensor of `shape` or (None) of any shape:
    the coordinates of receivers and holders, and the `_ends`."""
    received, sent = _pairs_to(change, rank, shape), _pairs_from(change, rank, shape)
    receivers, holders = (np.concatenate(both) for both in zip(received, sent, strict=True))
    receiver, sender = _ends(change, receivers, holders)
    mine = (sender == rank).any(axis=1) & (receiver != rank)
    mine[: len(received[0])] = True
    rows = np.flatnonzero(mine)
    rows = rows[np.argsort(receiver[rows], kind="stable")]
    return receivers[rows], holders[rows], (receiver[rows], sender[rows])


def _all_pairs(change: LayoutChange) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Coordinates [n, mesh dims] of all receivers, and of a holder of each source shard, in chunks."""
    cut, mesh = _cut(change.source, change.source_dims), change.target_mesh
    cells = grid([change.source_mesh.shape[m] for m in cut])
    at_once = max(1, _MAX_PAIRS_AT_ONCE // len(cells))
    for first in range(0, mesh.size, at_once):
        receivers = mesh.coordinates[:, first : first + at_once].T.repeat(len(cells), axis=0)
        holders = _on_other_mesh(change, receivers, change.source_mesh)
        holders[:, cut] = np.tile(cells, (len(receivers) // len(cells), 1))
        yield receivers, holders


def _pairs_to(change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The pairs whose receiver is `rank`, for a tensor of `shape` or (None) of any shape."""
    mesh = change.target_mesh
    at = mesh.coordinate_of(rank, change.positions)
    if at is None:
        return _no_pairs(change)
    held = None if shape is None else spans_by_dim(shape, change.target, mesh.shape, at)
    me = np.array([at], dtype=np.int64)
    start = _on_other_mesh(change, me, change.source_mesh)
    holders = _coordinates_meeting(change.source_mesh, change.source, change.source_dims, start, shape, held)
    return me.repeat(len(holders), axis=0), holders


def _pairs_from(change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The pairs whose holder has the shard of `rank`, for a tensor of `shape` or (None) of any shape, without most of
    those in which another rank is the sender."""
    mesh = change.source_mesh
    at = mesh.coordinate_of(rank, change.positions)
    if at is None:
        return _no_pairs(change)
    held = None if shape is None else spans_by_dim(shape, change.source, mesh.shape, at)
    me = np.array([at], dtype=np.int64)
    start = _on_other_mesh(change, me, change.target_mesh)
    free = [m for m in change.target_dims if not isinstance(change.target.placements[m], Shard)]
    receivers = _coordinates_meeting(change.target_mesh, change.target, change.target_dims, start, shape, held, free)
    holders, cut = _on_other_mesh(change, receivers, mesh), _cut(change.source, change.source_dims)
    holders[:, cut] = me[:, cut]
    may_send = _may_send(change, me, receivers, holders)
    return receivers[may_send], holders[may_send]


def _may_send(change: LayoutChange, me: np.ndarray, receivers: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """[pairs] false for pairs in which the rank at coordinate `me` [1, mesh dims] is not among the senders.

    In time proportional to the pairs, of which there may be one for each rank, however many terms are reduced.
    """
    mesh, replicas = change.source_mesh, list(change.replicas)
    fixed = [m for m in range(mesh.ndim) if m not in replicas and m not in change.reduced]
    sends = (holders[:, fixed] == me[:, fixed]).all(axis=1)
    if replicas:
        turn = _round_robin_index(change, receivers) % math.prod(mesh.shape[m] for m in replicas)
        own_turn = np.ravel_multi_index(tuple(me[0, replicas]), [mesh.shape[m] for m in replicas])
        ranks = change.target_mesh.rank_array[receivers @ change.target_mesh.strides]
        own_rank = mesh.rank_array[me @ mesh.strides]
        may = (turn == own_turn) | (ranks == own_rank)
        if change.nodes is not None:
            may |= nodes_of(ranks, change.nodes) == nodes_of(own_rank, change.nodes)
        sends &= may
    return sends


def _no_pairs(change: LayoutChange) -> tuple[np.ndarray, np.ndarray]:
    receivers, holders = (np.zeros((0, mesh.ndim), dtype=np.int64) for mesh in (change.target_mesh, change.source_mesh))
    return receivers, holders


def _on_other_mesh(change: LayoutChange, coordinates: np.ndarray, mesh: Mesh) -> np.ndarray:
    """[n, dims of `mesh`] new coordinates on `mesh`, the mesh at the other end of the change: the same on one mesh, 0
    on another."""
    if change.is_cross_mesh:
        return np.zeros((len(coordinates), mesh.ndim), dtype=np.int64)
    return coordinates.copy()


def _cut(layout: Layout, mesh_dims: Sequence[int]) -> list[int]:
    """The mesh dims among `mesh_dims` that shard under a layout, tensor dim by tensor dim in cutting order.

    Along the other mesh dims of a closure that shard, different coordinates have nothing in common.
    """
    return [m for _, order in layout.orders for m in order if m in mesh_dims]


def _coordinates_meeting(
    mesh: Mesh,
    layout: Layout,
    mesh_dims: Sequence[int],
    start: np.ndarray,
    shape: tuple[int, ...] | None,
    held: Sequence[Sequence[Span]] | None,
    free: Sequence[int] = (),
) -> np.ndarray:
    """[n, mesh dims] coordinates on `mesh` whose shards under `layout` meet another shard.

    Mesh dims that do not shard have the coordinate of `start` [1, mesh dims]; the mesh dims `free` have every
    coordinate.

    Args:
        mesh_dims: the mesh dims along which ranks exchange.
        shape, held: the global shape, and the spans of the shard along each tensor dim. None: for any shape.
    """
    if shape is None or held is None:
        cut = _cut(layout, mesh_dims)
        cells = grid([mesh.shape[m] for m in cut])
    else:
        cut = [m for _, order in layout.orders for m in order]
        by_dim = [cells_meeting(n, layout.cuts(d), mesh.shape, held[d]) for d, n in enumerate(shape)]
        index = grid([len(of_dim) for of_dim in by_dim])
        cells = np.concatenate([index[:, :0], *(of_dim[index[:, d]] for d, of_dim in enumerate(by_dim))], axis=1)
    index = grid([len(cells), *(mesh.shape[m] for m in free)])
    coordinates = start.repeat(len(index), axis=0)
    coordinates[:, cut] = cells[index[:, 0]]
    coordinates[:, free] = index[:, 1:]
    return coordinates


def _ends(change: LayoutChange, receivers: np.ndarray, holders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the receiver [n] and of the senders [n, contributors] of each pair."""
    source_mesh, target_mesh, positions = change.source_mesh, change.target_mesh, change.positions
    receiver = receivers @ target_mesh.strides
    sender = _senders(change, receivers, receiver, holders)
    if positions is source_mesh and positions is target_mesh:
        return receiver, sender
    named = positions.positions_of(source_mesh.rank_array[sender])
    return positions.positions_of(target_mesh.rank_array[receiver]), np.where(sender == FILL, FILL, named)


def _senders(change: LayoutChange, receivers: np.ndarray, receiver: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """[n, contributors] the positions on the source mesh of the senders of each pair.

    The receiver itself if it holds the box; otherwise one of the equal holders, of its node if there are any, chosen
    round robin.

    Args:
        receivers, receiver: the coordinates and positions of the receivers on the target mesh.
        holders: coordinates on the source mesh.
    """
    mesh, reduced = change.source_mesh, list(change.reduced)
    fixed = [m for m in range(mesh.ndim) if m not in change.replicas and m not in reduced]
    terms = np.arange(change.contributors)
    # The receivers on the source mesh; -1 for those that are not there.
    itself, at = receiver, receivers
    if change.is_cross_mesh:
        itself = mesh.positions_of(change.target_mesh.rank_array[receiver])
        at = _coordinates(mesh, itself)
    alike = (holders[:, fixed] == at[:, fixed]).all(axis=1) & (itself >= 0)
    own = alike[:, None] & (_term(change, at)[:, None] == terms)
    base = holders[:, fixed] @ mesh.strides[fixed]
    if change.replicas:
        turn = digits = _round_robin_index(change, receivers)
        for m in reversed(change.replicas):
            digits, digit = np.divmod(digits, mesh.shape[m])
            base = base + digit * mesh.strides[m]
    senders = base[:, None] + grid([mesh.shape[m] for m in reduced]) @ mesh.strides[reduced]
    if change.replicas and change.nodes is not None:
        near = mesh.on_node_of(change.target_mesh.rank_array[receiver], change.nodes)
        coordinates = _coordinates(mesh, near)
        holds = (coordinates[:, :, fixed] == holders[:, None, fixed]).all(axis=2) & (near >= 0)
        holds = holds[:, None, :] & (_term(change, coordinates)[:, None, :] == terms[:, None])
        count = holds.sum(axis=2)
        nth = (holds.cumsum(axis=2) == (turn[:, None] % np.maximum(count, 1))[:, :, None] + 1).argmax(axis=2)
        senders = np.where(count > 0, np.take_along_axis(near, nth, axis=1), senders)
    senders = np.where(own, itself[:, None], senders)
    # A shard that becomes partial stays at its coordinate; the other coordinates hold the identity.
    filled = (holders != at)[:, change.shards_split].any(axis=1) | (at[:, change.keepers] != 0).any(axis=1)
    senders[filled] = FILL
    return senders


def _term(change: LayoutChange, coordinates: np.ndarray) -> np.ndarray:
    """[...] the index of the term that the ranks at `coordinates` [..., source mesh dims] contribute."""
    term = np.zeros(coordinates.shape[:-1], dtype=np.int64)
    for m in change.reduced:
        term = term * change.source_mesh.shape[m] + coordinates[..., m]
    return term


def _round_robin_index(change: LayoutChange, receivers: np.ndarray) -> np.ndarray:
    """[n] the index of each receiver among the ranks with its target shard, plus the index of that shard.

    Choosing the sender by this index modulo the number of equal holders spreads the load over them.
    """
    among = shard = np.zeros(len(receivers), dtype=np.int64)
    for m in change.target_dims:
        if isinstance(change.target.placements[m], Shard):
            shard = shard * change.target_mesh.shape[m] + receivers[:, m]
        else:
            among = among * change.target_mesh.shape[m] + receivers[:, m]
    return among + shard


def _coordinates(mesh: Mesh, positions: np.ndarray) -> np.ndarray:
    """[..., mesh dims] the coordinates of positions [...]; those of position 0 for -1."""
    return np.stack(np.unravel_index(np.maximum(positions, 0), mesh.shape), axis=-1)


def communicates(change: LayoutChange, shape: tuple[int, ...], table: TransferTable | None = None) -> bool:
    """Whether any rank receives anything from another. Every rank computes the same answer.

    Args:
        table: the transfer table of all ranks or of one, if it is at hand; it usually decides.
    """
    if 0 in shape or change.closure == ():
        return False
    if isinstance(change, NodeChange):
        return node_transfer_table(change, shape).has_foreign_rows()
    if change.reduced:
        return True
    if change.is_local or change.closure == change.shards_split:
        return False
    if table is not None and table.has_foreign_rows():
        return True
    is_large = not change.is_cross_mesh and change.source_mesh.size > _MAX_EXACT_RANKS
    if change.shards_split:
        # An exact answer for a large mesh would take the boxes of all ranks.
        return is_large or transfer_table(change, shape).has_foreign_rows()
    if change.is_strided:
        return is_large or not all(_is_local_at(change, shape, p) for p in range(change.target_mesh.size))
    mesh = change.target_mesh
    first = grid([min(size, _FIRST_TRIED) for size in mesh.shape]) @ mesh.strides
    return any(_any_lacks(change, shape, positions) for positions in (first, np.arange(mesh.size)))


def _any_lacks(change: LayoutChange, shape: tuple[int, ...], positions: np.ndarray) -> bool:
    """Whether one of the ranks at `positions` [n] of the target mesh does not hold all of its target shard, without
    strided shards."""
    mesh, other = change.target_mesh, change.source_mesh
    itself = other.positions_of(mesh.rank_array[positions]) if change.is_cross_mesh else positions
    wanted_from, wanted_to = spans_at(shape, change.target, mesh.shape, _coordinates(mesh, positions).T)
    held_from, held_to = spans_at(shape, change.source, other.shape, _coordinates(other, itself).T)
    wanted = (wanted_from < wanted_to).all(axis=0)
    inside = ((held_from <= wanted_from) & (wanted_to <= held_to)).all(axis=0) & (itself >= 0)
    return bool((wanted & ~inside).any())


def _is_local_at(change: LayoutChange, shape: tuple[int, ...], position: int) -> bool:
    """Whether the rank at `position` of the target mesh already holds its target shard."""
    mesh, other = change.target_mesh, change.source_mesh
    at, held_at = mesh.coordinate(position), other.coordinate_of(position, mesh)
    wanted = math.prod(held_sizes(shape, change.target, mesh.shape, at))
    if held_at is None:
        return wanted == 0
    held = other.shape, held_at
    return elements_in_common(shape, change.source, held, change.target, (mesh.shape, at)) == wanted


def grid(sizes: Sequence[int]) -> np.ndarray:
    """[n, dims] every index of an array of the given sizes, row-major."""
    return np.indices(sizes, dtype=np.int64).reshape(len(sizes), math.prod(sizes)).T
