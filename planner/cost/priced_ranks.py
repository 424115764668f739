"""The ranks of a mesh that prices are computed for: their nodes, and the elements that pairs of them have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from ..exchange.layout_change import LayoutChange
from ..layouts.distinct import distinct, is_among, numbered
from ..layouts.index_sets import (
    distinct_spans,
    is_strided,
    mesh_dims_of,
    overlaps_of_spans,
    spans_along,
)
from ..layouts.layout import Cuts, Layout, pairs_of
from ..layouts.mesh import Mesh
from ..layouts.spans import Spans, cut_shards
from .mesh_nodes import block_on_node, nodes_of_mesh
from .topology import Topology

PRICED_WHOLE = 128
"""The mesh size up to which every rank is priced. On larger meshes `SAMPLED` ranks are."""
SAMPLED = 16
_SMALL = 1024  # receivers times holders up to which many tables are cached

P = ParamSpec("P")
T = TypeVar("T")


class PricedRanks:
    """The priced ranks of a mesh: all of them, or sampled receivers and all ranks of their nodes.

    Attributes:
        positions: [q] mesh positions.
        receivers: [r] indices into `positions`.
        coordinates: [mesh dims, q].
        nodes: [q] the index of the node of each rank.
        members: [nodes, q] whether the rank is on the node.
        peers: [r, p] for each receiver the ranks whose common elements with it are computed: all, or on a sampled mesh
            of several nodes those of its node, the last one repeated.
        near, own: [r, p] whether the peer is on the receiver's node, whether it is the receiver itself; false where the
            last peer is repeated.
        own_at: [r] the index among its peers of the receiver itself.
        whole: whether these are all ranks of the mesh.
        one_node: whether the whole mesh is on one node.
        spans_nodes: for each mesh dim, whether ranks along it are on different nodes.
        inside: the mesh dims of size 2 and more that stay inside nodes.
        nics: [q] the index of the NIC of each rank; None if each rank has its own.
        nic_members: [nics, q] whether the rank uses the NIC.
        sharing: [r] the number of ranks of the mesh that use the NIC of the receiver.
        nics_on: [nodes] the number of NICs of each node that ranks of the mesh use.
    """

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.mesh = mesh
        self.whole = mesh.size <= PRICED_WHOLE
        nodes = nodes_of_mesh(mesh, topology)
        self.full_duplex = topology.full_duplex
        self.one_node = bool((nodes == nodes[0]).all())
        sampled = np.arange(mesh.size) if self.whole else _sample(mesh.size)
        all_sampled = self.whole or self.one_node
        self.positions = sampled if all_sampled else np.flatnonzero(is_among(nodes, nodes[sampled]))
        self.receivers = np.searchsorted(self.positions, sampled)
        self.nodes = numbered(nodes[self.positions])[1]
        self._set_peers()
        self.coordinates = np.stack(np.unravel_index(self.positions, mesh.shape))
        self.members = np.arange(self.nodes.max() + 1)[:, None] == self.nodes
        self._set_nics(mesh.rank_array[self.positions], topology)
        self.spans_nodes = [block_on_node(mesh, topology, m) < n for m, n in enumerate(mesh.shape)]
        self.inside = [m for m in range(mesh.ndim) if mesh.shape[m] > 1 and not self.spans_nodes[m]]

    def _set_peers(self) -> None:
        if self.whole or self.one_node:
            self.peers = np.broadcast_to(np.arange(len(self.positions)), (len(self.receivers), len(self.positions)))
            self.near = self.nodes[self.receivers][:, None] == self.nodes
        else:
            order = np.argsort(self.nodes, kind="stable")
            of_node = np.bincount(self.nodes)
            count = of_node[self.nodes[self.receivers]]
            index = np.arange(count.max())
            self.near = index < count[:, None]
            first = (of_node.cumsum() - of_node)[self.nodes[self.receivers]]
            self.peers = order[first[:, None] + np.minimum(index, count[:, None] - 1)]
        self.own = (self.receivers[:, None] == self.peers) & (self.near | self.whole)
        self.own_at = self.own.argmax(axis=1)

    def _set_nics(self, ranks: np.ndarray, topology: Topology) -> None:
        on_node = self.members.sum(axis=1)
        used = on_node if topology.nics_per_node is None else np.minimum(on_node, topology.nics_per_node)
        self.nics, self.sharing, self.nics_on = None, np.ones(len(self.receivers), dtype=np.int64), used
        if (used == on_node).all():
            return
        order = np.lexsort((ranks, self.nodes))
        index = np.empty_like(order)
        index[order] = np.arange(len(order)) - np.repeat(on_node.cumsum() - on_node, on_node)  # on its node
        on_nic = index * used[self.nodes] // on_node[self.nodes]
        self.nics = (used.cumsum() - used)[self.nodes] + on_nic
        self.nic_members = np.arange(used.sum())[:, None] == self.nics
        self.sharing = self.nic_members.sum(axis=1)[self.nics[self.receivers]]

    def on_nic(self, received: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """[..., r] the bytes that the NIC of each receiver takes time for, given the bytes [..., r] that ranks receive
        from other nodes and send to them; estimated from those of the receiver where not all ranks are priced."""
        both = self._through_nic(received), self._through_nic(sent)
        return np.maximum(*both) if self.full_duplex else both[0] + both[1]

    def _through_nic(self, nbytes: np.ndarray) -> np.ndarray:
        if self.nics is None:
            return nbytes
        return (nbytes @ self.nic_members.T)[..., self.nics] if self.whole else nbytes * self.sharing

    def kinds(self, mesh_dims: Iterable[int]) -> np.ndarray:
        """[q] an index for each rank, equal for ranks with equal coordinates along `mesh_dims`."""
        return self._kinds(np.zeros(len(self.positions), dtype=np.int64), mesh_dims)

    def kinds_on_nodes(self, mesh_dims: Iterable[int]) -> np.ndarray:
        """[q] the same, and equal for ranks of one node only: the index of the node times the number of kinds, plus
        that of the kind."""
        return self._kinds(self.nodes, mesh_dims)

    def _kinds(self, kind: np.ndarray, mesh_dims: Iterable[int]) -> np.ndarray:
        for m in mesh_dims:
            kind = kind * self.mesh.shape[m] + self.coordinates[m]
        return kind

    def alike_near(self, kinds: np.ndarray) -> np.ndarray:
        """[r, p] how many ranks of the receiver's node are of the kind of each peer, given the kind [q] of each."""
        found, kind = numbered(kinds)
        number = len(found)
        counts = np.bincount(self.nodes * number + kind, minlength=len(self.members) * number)
        return counts[self.nodes[self.receivers][:, None] * number + kind[self.peers]].astype(np.float64)

    def first_peers(self, layout: Layout) -> np.ndarray:
        """[1, r, p] 1 for peers on the receiver's node that are the first there with their shard, otherwise 0."""
        return _first_peers(self, _dims_of_shard(layout))

    def first_receivers(self, layout: Layout) -> np.ndarray:
        """[r] whether the receiver is the first of its node with its shard."""
        return _first_of_kind(self, _dims_of_shard(layout))[self.receivers]

    def terms_on_node(self, reduced: tuple[int, ...]) -> int:
        """The largest number of terms on one node of a value that is partial along the mesh dims `reduced`."""
        return _terms_on_node(self, reduced)


def _sample(size: int) -> np.ndarray:
    """`SAMPLED` positions of a mesh of `size`, ascending: the first, the last, and others spread by multiples of the
    golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4), so that they are not alike along a
    mesh dim as equally spaced positions are."""
    spread = np.arange(SAMPLED - 1) * 0x9E3779B9 % (1 << 32) * size >> 32
    return distinct(np.append(spread, size - 1))


@lru_cache(maxsize=64)
def priced_ranks(mesh: Mesh, topology: Topology) -> PricedRanks:
    """The priced ranks of a mesh; cached."""
    return PricedRanks(mesh, topology)


@lru_cache(maxsize=1024)
def _first_of_kind(ranks: PricedRanks, mesh_dims: tuple[int, ...]) -> np.ndarray:
    found, kind = numbered(ranks.kinds_on_nodes(mesh_dims))
    index = np.arange(len(kind))
    first = np.empty_like(found)
    first[kind[::-1]] = index[::-1]  # of equal indices the last assignment stays
    return first[kind] == index


def _dims_of_shard(layout: Layout) -> tuple[int, ...]:
    """The mesh dims that shard, ascending."""
    return tuple(sorted([m for _, order in layout.orders for m in order]))


@lru_cache(maxsize=1024)
def _terms_on_node(ranks: PricedRanks, reduced: tuple[int, ...]) -> int:
    if not reduced:
        return 1
    kinds = math.prod(ranks.mesh.shape[m] for m in reduced)
    return int(np.bincount(distinct(ranks.kinds_on_nodes(reduced)) // kinds).max())


def _cached(make: Callable[Concatenate[PricedRanks, P], T]) -> Callable[Concatenate[PricedRanks, P], T]:
    """Caches results of the size [r, p]: many that are small, few that are large."""
    many, few = lru_cache(maxsize=4096)(make), lru_cache(maxsize=256)(make)

    def cached(ranks: PricedRanks, *key: P.args, **_: P.kwargs) -> T:
        return (many if ranks.near.size <= _SMALL else few)(ranks, *key)

    return cached


@_cached
def _first_peers(ranks: PricedRanks, mesh_dims: tuple[int, ...]) -> np.ndarray:
    first = _first_of_kind(ranks, mesh_dims)
    return (ranks.near & (first if ranks.whole else first[ranks.peers]))[None].astype(float)


@_cached
def common_lengths(ranks: PricedRanks, extent: int, cuts: tuple[Cuts, Cuts]) -> np.ndarray:
    """[1, r, p] how many indices of a tensor dim receiver r wants and its peer holds; `cuts`: (wanted, held)."""
    wanted, held = cuts
    others = None if ranks.whole or ranks.one_node else ranks.peers
    if not wanted or not held:  # one of the two ranks has the whole of what the other has
        lengths = held_lengths(ranks, extent, held or wanted)
        if held:
            lengths = lengths if others is None else lengths[others]
        else:
            lengths = lengths[ranks.receivers, None]
        if ranks.near.size > _SMALL:
            return np.broadcast_to(lengths.astype(float), (1, *ranks.near.shape))
        return (lengths * np.ones(ranks.near.shape))[None]  # at less cost than `broadcast_to`
    if any(map(is_strided, cuts)):
        of_receivers, of_peers = _strided_spans_of_receivers(ranks, extent, wanted), _strided_spans(ranks, extent, held)
        return overlaps_of_spans(*of_receivers, *of_peers, others)[None].astype(float)
    (low, high), (start, stop) = _spans(ranks, extent, wanted), _spans_of_peers(ranks, extent, held)
    low, high = low[ranks.receivers, None], high[ranks.receivers, None]
    lengths = np.minimum(high, stop) - np.maximum(low, start)
    return np.maximum(lengths, 0)[None].astype(float)


@lru_cache(maxsize=4096)
def held_lengths(ranks: PricedRanks, extent: int, cuts: Cuts) -> np.ndarray:
    """[q] how many indices of a tensor dim each rank holds."""
    if is_strided(cuts):
        spans, shard = _distinct_spans(ranks, extent, cuts)
        return spans.sizes(int(shard.max()) + 1)[shard]
    start, stop = _spans(ranks, extent, cuts)
    return stop - start


@lru_cache(maxsize=4096)
def receiver_lengths(ranks: PricedRanks, extent: int, cuts: tuple[Cuts, Cuts]) -> np.ndarray:
    """float64 [3, r] for each receiver, how many indices of a tensor dim it wants, how many it holds, and how many of
    the shards that ranks hold its own meets if all are even (0 where all ranks are priced, as it is not needed);
    `cuts`: (wanted, held)."""
    wanted, held = (held_lengths(ranks, extent, x) for x in cuts)
    lengths = np.zeros((3, len(ranks.receivers)))
    lengths[:2] = wanted[ranks.receivers], held[ranks.receivers]
    if not ranks.whole:
        lengths[2] = _shards_met(ranks, cuts, lengths[0], max(int(held.max()), 1))
    return lengths


def _shards_met(ranks: PricedRanks, cuts: tuple[Cuts, Cuts], wanted: np.ndarray, most: int) -> np.ndarray:
    """[r] how many of the shards of a tensor dim that ranks hold a shard of `wanted` [r] indices meets, if all are
    even.

    Args:
        most: the indices of the largest shard that ranks hold.
    """
    if not any(map(is_strided, cuts)):
        return -(-wanted // most)
    shared = next((i for i, (a, b) in enumerate(zip(*cuts, strict=False)) if a != b), min(map(len, cuts)))
    (_, pieces), (shards, held_pieces) = (_shards_and_pieces(ranks, x[shared:]) for x in cuts)
    return np.minimum(pieces * -(-wanted * held_pieces // (pieces * most)), shards)


def _shards_and_pieces(ranks: PricedRanks, cuts: Cuts) -> tuple[int, int]:
    """The number of shards that cuts make, and of pieces that each has at most if all are even."""
    shards = pieces = 1
    for m, split in pairs_of(cuts):
        shards *= ranks.mesh.shape[m]
        pieces = max(split, -(-pieces // ranks.mesh.shape[m]))
    return shards, pieces


@lru_cache(maxsize=1024)
def _spans(ranks: PricedRanks, extent: int, cuts: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop [q] of what each rank holds of a tensor dim that no strided shard cuts."""
    if not cuts:
        number = len(ranks.positions)
        return np.zeros(number, dtype=np.int64), np.full(number, extent, dtype=np.int64)
    return spans_along(extent, mesh_dims_of(cuts), ranks.mesh.shape, ranks.coordinates)


@lru_cache(maxsize=256)
def _spans_of_peers(ranks: PricedRanks, extent: int, cuts: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """`_spans` of the peers of each receiver: [r, p], or [p] if those are all ranks."""
    start, stop = _spans(ranks, extent, cuts)
    return (start, stop) if ranks.whole or ranks.one_node else (start[ranks.peers], stop[ranks.peers])


@lru_cache(maxsize=1024)
def _strided_spans_of_receivers(ranks: PricedRanks, extent: int, cuts: Cuts) -> tuple[Spans, np.ndarray]:
    """`_strided_spans` of the receivers."""
    spans, shard = _distinct_spans(ranks, extent, cuts)
    receivers, shard = numbered(shard[ranks.receivers])
    return spans.select(receivers).by_start(), shard


@lru_cache(maxsize=1024)
def _strided_spans(ranks: PricedRanks, extent: int, cuts: Cuts) -> tuple[Spans, np.ndarray]:
    """`_distinct_spans` in ascending order of their starts."""
    spans, shard = _distinct_spans(ranks, extent, cuts)
    return spans.by_start(), shard


@lru_cache(maxsize=1024)
def _distinct_spans(ranks: PricedRanks, extent: int, cuts: Cuts) -> tuple[Spans, np.ndarray]:
    """The spans of the distinct shards along a tensor dim, and the index [q] of the shard of each rank."""
    if not cuts:
        return distinct_spans(extent, cuts, ranks.mesh.shape, ranks.coordinates)
    spans, shard = _distinct_spans(ranks, extent, cuts[:-1])
    ((m, split),) = pairs_of(cuts[-1:])
    number = ranks.mesh.shape[m]
    found, index = numbered(shard * number + ranks.coordinates[m])
    return cut_shards(extent, spans, (number, split), *np.divmod(found, number)), index


class SendShares:
    """The share of the common elements of a receiver and its peer that the peer sends.

    A receiver takes what it holds from itself, otherwise from the holders on its node in equal shares, otherwise from
    all holders in equal shares.

    Attributes:
        near, far: [1, r, p] the shares of ranks on the receiver's node, itself included, and of ranks on other nodes.
        keeps: [1, r] 0 for receivers that hold zero because a value becomes a partial sum elsewhere, otherwise 1.
    """

    def __init__(
        self,
        ranks: PricedRanks,
        closure: tuple[int, ...],
        replicas: tuple[int, ...],
        shards_split: tuple[int, ...],
        keepers: tuple[int, ...],
    ) -> None:
        mesh = ranks.mesh
        kinds = ranks.kinds(m for m in range(mesh.ndim) if m not in closure or m in shards_split)
        shares, keeps = kinds[ranks.receivers][:, None] == kinds[ranks.peers], np.ones(len(ranks.receivers), dtype=bool)
        if keepers:
            keeps = (ranks.coordinates[list(keepers)][:, ranks.receivers] == 0).all(axis=0)
            shares &= keeps[:, None]
        if replicas:
            kinds = ranks.kinds(m for m in range(mesh.ndim) if m not in replicas)
            alike = kinds[ranks.receivers][:, None] == kinds[ranks.peers]
            near = ranks.alike_near(kinds)
            far = 1 / math.prod(mesh.shape[m] for m in replicas)
            shares = shares * np.where(alike, ranks.own, np.where(near > 0, ranks.near / np.maximum(near, 1), far))
        self.near, self.far = (shares * ranks.near)[None].astype(float), (shares * ~ranks.near)[None].astype(float)
        self.keeps = keeps[None].astype(float)


@_cached
def _send_shares(
    ranks: PricedRanks,
    closure: tuple[int, ...],
    replicas: tuple[int, ...],
    shards_split: tuple[int, ...],
    keepers: tuple[int, ...],
) -> SendShares:
    return SendShares(ranks, closure, replicas, shards_split, keepers)


def send_shares(ranks: PricedRanks, change: LayoutChange) -> SendShares:
    """The shares of a change between layouts on one mesh; cached."""
    assert change.closure is not None
    return _send_shares(ranks, change.closure, change.replicas, change.shards_split, change.keepers)
