"""The exchange that performs a layout change: which ranks send which boxes to which.

A holder is a rank whose source shard has a box that a receiver wants. Of equal holders one is the sender; where values
are reduced, one for each term. Each rank computes its own rows without the others: holders and senders are closed forms
of coordinates. An exchange on one mesh is the case in which every receiver also has a source shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from ..layouts.distinct import distinct, is_among
from ..layouts.mesh import Mesh
from ..layouts.nodes import nodes_of
from .intersection import FewPairs, common_length, intersect
from .layout_change import LayoutChange
from .node_change import NodeChange, node_transfer_table
from .pairs import Coordinates, Pairs, all_equal, all_pairs, joined, pairs_from, pairs_to, round_robin_index, row_major
from .transfer_table import FILL, Part, Row, TransferTable

_MAX_CACHED_GROUP = 64  # ranks that exchange with each other, up to which the pairs for any shape are cached
_MAX_SCALAR_PAIRS = 64  # pairs up to which Python numbers are faster than arrays
_MAX_JOINED_PAIRS = 2048  # pairs up to which one list of all is faster than the grids of those received and sent
_MAX_EXACT_RANKS = 1024  # ranks of a mesh up to which `communicates` looks at all shards where it has no closed form

Ends = tuple[np.ndarray, np.ndarray]
"""The positions of the receiver [n] and of the senders [n, contributors] of each pair."""


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
        table = TransferTable.of_parts([_part(change, shape, pairs) for pairs in all_pairs(change)])
        return table if change.positions is change.target_mesh else _by_receiver(table)
    if change.group_size <= _MAX_CACHED_GROUP:
        return _cached_pairs(change, rank).table(shape)
    return _PairsOfRank(change, rank, shape).table(shape)


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
    received, sent = (joined([pairs(change, rank, shape) for rank in ranks]) for pairs in (pairs_to, pairs_from))
    # Ranks with equal shards have pairs in common.
    receiver, holder = row_major(sent.receivers, change.target_mesh), row_major(sent.holders, change.source_mesh)
    first = np.unique(receiver * change.source_mesh.size + holder, return_index=True)[1]
    to, by = (TransferTable.of_parts([_part(change, shape, pairs)]) for pairs in (received, sent.select(first)))
    return to, by.select(np.isin(by.sender[:, 0], ranks))


def _by_receiver(table: TransferTable) -> TransferTable:
    return table.select(np.argsort(table.receiver, kind="stable"))


def _part(change: LayoutChange, shape: tuple[int, ...], pairs: Pairs, ends: Ends | None = None) -> Part:
    """The rows of pairs, without pairs that have nothing in common.

    Args:
        ends: the ends of the pairs, if they are known.
    """
    boxes = intersect(shape, change.source, change.source_mesh.shape, change.target, change.target_mesh.shape, pairs)
    if ends is None:
        return Part(boxes, *_ends(change, pairs if boxes.pair is None else pairs.select(boxes.pair)))
    return Part(boxes, *(ends if boxes.pair is None else [x[boxes.pair] for x in ends]))


class _PairsOfRank:
    """The pairs in which position `rank` receives, and those in which it sends to others, sorted by receiver; for
    tensors of `shape` or (None) of any shape, from which the table for each shape is made."""

    def __init__(self, change: LayoutChange, rank: int, shape: tuple[int, ...] | None = None) -> None:
        self.change = change
        received, sent = pairs_to(change, rank, shape), pairs_from(change, rank, shape)
        received_ends, (receiver, sender) = _ends(change, received), _ends(change, sent)
        rows = np.flatnonzero((sender == rank).any(axis=1) & (receiver != rank))
        rows = rows[np.argsort(receiver[rows], kind="stable")]
        before = int(np.searchsorted(receiver[rows], rank))

        def of_sent(rows: np.ndarray) -> tuple[Pairs, Ends]:
            return sent.select(rows), (receiver[rows], sender[rows])

        self.parts = [of_sent(rows[:before]), (received, received_ends), of_sent(rows[before:])]
        number = len(received) + len(rows)
        if number <= _MAX_JOINED_PAIRS:
            pairs, ends = zip(*self.parts, strict=True)
            of_receivers, of_senders = zip(*ends, strict=True)
            self.parts = [(joined(pairs), (np.concatenate(of_receivers), np.concatenate(of_senders)))]
        self.few: FewPairs | None = None
        if shape is None and number <= _MAX_SCALAR_PAIRS and not change.is_strided:
            ((every, (of_receiver, of_sender)),) = self.parts
            holders, receivers = (np.stack(x, axis=1).tolist() for x in (every.holders, every.receivers))
            self.few = FewPairs(
                change.source, change.source_mesh.shape, holders, change.target, change.target_mesh.shape, receivers
            )
            self.receiver, self.sender = of_receiver.tolist(), of_sender.tolist()

    def table(self, shape: tuple[int, ...]) -> TransferTable:
        if self.few is None:
            return TransferTable.of_parts([_part(self.change, shape, *part) for part in self.parts])
        ones = [1] * len(shape)
        rows = [
            Row(self.receiver[pair], self.sender[pair], source, target, extent, ones, ones)
            for pair, source, target, extent in self.few.intersections(shape)
        ]
        return TransferTable.from_rows(rows, self.change.contributors, tuple(range(len(shape))))


_cached_pairs = lru_cache(maxsize=1024)(_PairsOfRank)


def _ends(change: LayoutChange, pairs: Pairs) -> Ends:
    """The positions of the receiver [n] and of the senders [n, contributors] of each pair."""
    pairs = pairs.flattened
    receiver = row_major(pairs.receivers, change.target_mesh)
    sender = _senders(change, pairs.receivers, receiver, pairs.holders)
    receiver, sender = change.at_positions(receiver, sender)
    if sender.shape[:-1] != pairs.shape:
        sender = np.broadcast_to(sender, (*pairs.shape, change.contributors))
    return pairs.values(receiver), sender.reshape(-1, change.contributors)


def _senders(change: LayoutChange, receivers: Coordinates, receiver: np.ndarray, holders: Coordinates) -> np.ndarray:
    """[..., contributors] the positions on the source mesh of the senders of each pair.

    The receiver itself if it holds the box; otherwise one of the equal holders, of its node if there are any, chosen
    round robin.

    Args:
        receivers, receiver: the coordinates and positions of the receivers on the target mesh.
        holders: coordinates on the source mesh.
    """
    mesh, replicas = change.source_mesh, change.replicas
    fixed = [m for m in range(mesh.ndim) if m not in replicas and m not in change.reduced]
    base = sum((holders[m] * mesh.strides[m] for m in fixed), np.zeros((), dtype=np.int64))
    terms = _offsets(mesh, change.reduced)
    senders = base[..., None] + terms
    # The receivers on the source mesh; -1 for those that are not there.
    itself, at = receiver, receivers
    if change.is_cross_mesh:
        itself = mesh.positions_of(change.target_mesh.rank_array[receiver])
        at = np.unravel_index(np.maximum(itself, 0), mesh.shape)
    if replicas:
        turn = digits = round_robin_index(change, receivers)
        for m in reversed(replicas):
            digits, digit = np.divmod(digits, mesh.shape[m])
            senders = senders + (digit * mesh.strides[m])[..., None]
        if change.nodes is not None:
            ranks = change.target_mesh.rank_array[receiver]
            senders = _near_senders(change, ranks, base, turn, senders)
        own = (all_equal(holders, at, fixed) & (itself >= 0))[..., None]
        own = own & (row_major(at, mesh, change.reduced)[..., None] == np.arange(change.contributors))
        senders = np.where(own, itself[..., None], senders)
    # A shard that becomes partial stays at its coordinate; the other coordinates hold the identity.
    if change.shards_split or change.keepers:
        stays = all_equal(holders, at, change.shards_split) & (row_major(at, mesh, change.keepers) == 0)
        senders = np.where(stays[..., None], senders, FILL)
    return senders


def _near_senders(
    change: LayoutChange, ranks: np.ndarray, base: np.ndarray, turn: np.ndarray, senders: np.ndarray
) -> np.ndarray:
    """[..., contributors] `senders`, but of the holders of a box on the node of its receiver one if there are any.

    Args:
        ranks: [...] the ranks of the receivers.
        base: [...] the position of the holder of the first term that is first among equal holders.
        turn: [...] the index of the holder to be chosen, modulo their number.

    The number of a node times the ranks of the mesh fits in an int64: nodes are below 2**31.
    """
    mesh, nodes = change.source_mesh, change.nodes
    node = nodes_of(ranks, nodes)
    # The holders of each term on those nodes: sorted by node, then by term, then by rank.
    firsts = distinct(base.reshape(-1))[:, None] + _offsets(mesh, change.reduced)
    holders = (firsts[..., None] + _offsets(mesh, change.replicas)).reshape(-1)
    of_node = nodes_of(mesh.rank_array[holders], nodes)
    near = of_node == node if node.ndim == 0 else is_among(of_node, node)
    first = firsts.repeat(math.prod(mesh.shape[m] for m in change.replicas))[near]
    holders, keys = holders[near], of_node[near] * mesh.size + first
    order = np.lexsort((mesh.rank_array[holders], keys))
    holders, keys = holders[order], keys[order]
    wanted = node[..., None] * mesh.size + base[..., None] + _offsets(mesh, change.reduced)
    low = np.searchsorted(keys, wanted)
    count = np.searchsorted(keys, wanted, side="right") - low
    if not count.any():
        return senders
    at = low + turn[..., None] % np.maximum(count, 1)
    return np.where(count > 0, holders[np.minimum(at, len(holders) - 1)], senders)


def _offsets(mesh: Mesh, mesh_dims: Sequence[int]) -> np.ndarray:
    """[n] the differences in position from the first of the ranks along some mesh dims, row-major."""
    offsets = np.zeros(1, dtype=np.int64)
    for m in mesh_dims:
        offsets = (offsets[:, None] + np.arange(mesh.shape[m]) * mesh.strides[m]).reshape(-1)
    return offsets


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
    if change.is_strided and is_large:
        return True
    # If some rank lacks anything, so does one of a few ranks, usually.
    sizes = change.target_mesh.shape
    few = [_first_tried(n) for n in sizes]
    if _any_lacks(change, shape, few):
        return True
    return any(len(tried) < n for tried, n in zip(few, sizes, strict=True)) and _any_lacks(
        change, shape, map(np.arange, sizes)
    )


@lru_cache(maxsize=1024)
def _first_tried(size: int) -> np.ndarray:
    """Coordinates along a mesh dim of `size`: 0, powers of two and the last one. Read-only."""
    return distinct(np.array([0, *(1 << i for i in range((size - 1).bit_length())), size - 1]))


def _any_lacks(change: LayoutChange, shape: tuple[int, ...], coordinates: Iterable[np.ndarray]) -> bool:
    """Whether any rank does not hold all of its target shard, of those at some coordinates along each dim of the target
    mesh."""
    mesh, other = change.target_mesh, change.source_mesh
    at = held_at = np.ix_(*coordinates)
    lacks = np.array(False)
    if change.is_cross_mesh:
        itself = other.positions_of(mesh.rank_array[row_major(at, mesh)])
        held_at, lacks = np.unravel_index(np.maximum(itself, 0), other.shape), itself < 0
    by_dim = []
    for d, extent in enumerate(shape):
        held, wanted = (change.source.cuts(d), other.shape, held_at), (change.target.cuts(d), mesh.shape, at)
        common, length = common_length(extent, *held, *wanted)
        by_dim.append((length > 0, common < length))
    if not (lacks.any() or any(of_dim.any() for _, of_dim in by_dim)):
        return False  # usual, and before arrays with an entry for each rank
    wants = np.array(True)
    for wants_of_dim, lacks_of_dim in by_dim:
        wants, lacks = wants & wants_of_dim, lacks | lacks_of_dim
    return bool((wants & lacks).any())
