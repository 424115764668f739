"""What a step costs on a topology: bytes over each link, messages, copies, and the microseconds that follow.

Priced from index sets alone, before any box is made, so that a search can compare many steps. Where several ranks could
send a box, each is priced for its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .dtypes import ITEMSIZE
from .exchange import Change
from .index_sets import spans_at
from .layout import Layout, Shard
from .mesh import Mesh
from .topology import Topology

PRICED_WHOLE = 128
"""Ranks of a mesh up to which every rank is priced; of a larger one 16 spread over it are, by what they receive."""
_SAMPLED = 16


@dataclass(frozen=True)
class Price:
    """Of one step, in microseconds, on the rank that takes longest.

    Attributes:
        us: what the step takes.
        least_us: what no sequence of steps between its two layouts can beat.
        peak_bytes: what a rank holds at most while it runs: source, target, contributions, packed bytes.
    """

    us: float
    least_us: float
    peak_bytes: int


class Ranks:
    """The ranks of a mesh that are looked at: all of it, or some receivers and everyone on their nodes.

    Attributes:
        positions: [q] mesh positions.
        receivers: [r] indices into `positions`.
        near, own: [r, q] whether on the receiver's node, whether the receiver itself.
        one_node: whether there is but one node.
        crosses: for each mesh dim, whether ranks along it are on different nodes.
    """

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.mesh = mesh
        self.whole = mesh.size <= PRICED_WHOLE
        everyone = np.arange(mesh.size)
        ranks = mesh.rank_array
        nodes = np.zeros_like(ranks) if topology.node_size is None else ranks // topology.node_size
        self.one_node = bool((nodes == nodes[0]).all())
        sampled = everyone if self.whole else np.unique(np.linspace(0, mesh.size - 1, _SAMPLED).astype(np.int64))
        looked_at = np.isin(everyone, sampled) if self.one_node else np.isin(nodes, nodes[sampled])
        self.positions = everyone[looked_at]
        self.receivers = np.searchsorted(self.positions, sampled)
        self.nodes = np.unique(nodes[looked_at], return_inverse=True)[1]
        self.near = self.nodes[self.receivers][:, None] == self.nodes
        self.own = self.receivers[:, None] == np.arange(len(self.positions))
        self.coordinates = np.stack(np.unravel_index(self.positions, mesh.shape))
        self.node_sizes = np.bincount(self.nodes)
        table = nodes.reshape(mesh.shape)
        self.crosses = [bool((table != table.take([0], axis=m)).any()) for m in range(mesh.ndim)]
        self.inside = [m for m in range(mesh.ndim) if mesh.shape[m] > 1 and not self.crosses[m]]
        self._shares: dict[tuple, np.ndarray] = {}
        self._cuts: dict[tuple, np.ndarray] = {}

    def _kinds(self, mesh_dims: Iterable[int]) -> np.ndarray:
        """A number for each rank, equal where the coordinates along `mesh_dims` are."""
        kind = np.zeros(len(self.positions), dtype=np.int64)
        for m in mesh_dims:
            kind = kind * self.mesh.shape[m] + self.coordinates[m]
        return kind

    def shares(self, change: Change) -> np.ndarray:
        """[r, q] the share of what both have in common that rank q sends receiver r.

        A rank takes from itself what it holds, else from those of its node that hold it, else from all that do.
        """
        key = change.closure, change.replicas, change.shards_split, change.keepers
        found = self._shares.get(key)
        if found is None:
            kinds = self._kinds(m for m in range(self.mesh.ndim) if m not in change.replicas)
            alike = kinds[:, None] == kinds
            near = self.near.astype(np.float64) @ alike
            far = 1 / math.prod(self.mesh.shape[m] for m in change.replicas)
            found = np.where(alike[self.receivers], self.own, np.where(near > 0, self.near / np.maximum(near, 1), far))
            kinds = self._kinds(m for m in range(self.mesh.ndim) if m not in change.closure or m in change.shards_split)
            found = found * (kinds[self.receivers][:, None] == kinds)
            found = self._shares[key] = found * self.keeps(change)[:, None]
        return found

    def keeps(self, change: Change) -> np.ndarray:
        """[r] whether a receiver is one of those that keep a value which becomes a sum."""
        return (self.coordinates[list(change.keepers)].sum(axis=0) == 0)[self.receivers]

    def first_of_shard(self, layout: Layout) -> np.ndarray:
        """[q] whether a rank is the first of its node with its shard."""
        cuts = tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Shard))
        found = self._cuts.get(cuts)
        if found is None:
            _, first = np.unique(np.stack([self.nodes, self._kinds(cuts)]), axis=1, return_index=True)
            found = self._cuts[cuts] = np.isin(np.arange(len(self.nodes)), first)
        return found


@lru_cache(maxsize=64)
def ranks_of(mesh: Mesh, topology: Topology) -> Ranks:
    return Ranks(mesh, topology)


@lru_cache(maxsize=1024)
def _spans(
    mesh: Mesh, topology: Topology, shape: tuple[int, ...], layout: Layout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts and stops of the shards of the ranks that are looked at, [tensor dims, q], and their elements, [q]."""
    spans = spans_at(shape, layout, mesh.shape, ranks_of(mesh, topology).coordinates)
    start, stop = spans[..., 0].copy(), spans[..., 1].copy()
    return start, stop, (stop - start).prod(axis=0)


def price(change: Change, topology: Topology) -> Price:
    """The price of doing `change` in one step."""
    size, node, network = ITEMSIZE[change.dtype], topology.node, topology.network
    at = ranks_of(change.mesh, topology)
    held_start, held_stop, held = _spans(change.mesh, topology, change.shape, change.source)
    start, stop, wanted = _spans(change.mesh, topology, change.shape, change.target)
    start, stop = start[:, at.receivers, None], stop[:, at.receivers, None]
    width = np.minimum(stop, held_stop[:, None]) - np.maximum(start, held_start[:, None])
    overlap = np.maximum(width, 0).prod(axis=0) * size
    shares = at.shares(change)
    moved = overlap * shares

    before, after = held[at.receivers] * size, wanted[at.receivers] * size
    own = (moved * at.own).sum(axis=1)
    near = moved if at.one_node else moved * at.near
    near_in = near.sum(axis=1) - own
    far_in = 0 * own if at.one_node else moved.sum(axis=1) - near_in - own
    near_out, far_out = near_in, far_in
    near_peers = far_peers = 0 * own
    if at.whole:
        near_out = near.sum(axis=0) - own
        far_out = far_in if at.one_node else moved.sum(axis=0) - near_out - own
    else:
        # Only the receivers' nodes were looked at: what these have not comes from elsewhere.
        owned = math.prod(change.mesh.shape[m] for m in change.shards_split)
        missing = np.maximum(after * change.contributors / owned - own - near_in, 0) * at.keeps(change)
        if at.one_node:
            near_in = near_in + missing
        else:
            far_in = missing
        near_out, far_out = near_in, far_in
        far_peers = np.ceil(far_in / np.maximum(before, 1))
    if not (node.one_sided and (network.one_sided or at.one_node)):
        peers = shares * (overlap > 0)
        near_peers = (peers * at.near).sum(axis=1) - (peers * at.own).sum(axis=1)
        far_peers = (peers * ~at.near).sum(axis=1) if at.whole else far_peers

    over_node = node.us(np.maximum(near_in, near_out), near_peers)
    over_network = network.us(np.maximum(far_in, far_out), far_peers)
    packed = (0 * own if node.one_sided else near_in + near_out) + (0 if network.one_sided else far_in + far_out)
    staged = packed if change.contributors == 1 else packed + near_in + far_in
    filled = after - (own + near_in + far_in) / change.contributors if change.split else 0
    copies = topology.copy_us(own + packed + (change.contributors - 1) * after + filled / 2)
    us = float((np.maximum(over_node, over_network) + copies).max())
    return Price(us, _least_us(change, topology, at, overlap, after, own), math.ceil((before + after + staged).max()))


def _least_us(
    change: Change, topology: Topology, at: Ranks, overlap: np.ndarray, wanted: np.ndarray, own: np.ndarray
) -> float:
    """A bound from below: what a rank lacks comes in at the faster link, what its node lacks over the network.

    Of a value that is reduced, at least one term or one sum of terms has to come from elsewhere.
    """
    if change.split or not at.whole:
        return 0.0
    node, network = topology.node, topology.network
    lacking = float((wanted if change.reduced else wanted - own).max())
    least = min(node.latency_us, network.latency_us) if lacking else 0.0
    least += lacking / (max(node.gigabytes_per_s, network.gigabytes_per_s) * 1e3)
    if at.one_node:
        return least
    missing = wanted * at.first_of_shard(change.target)
    if not any(at.crosses[m] for m in change.reduced):
        # Of ranks of a node that want the same one can bring it in, and of those that hold the same each has it all.
        held = (overlap * (at.near & at.first_of_shard(change.source))).sum(axis=1)
        missing = np.maximum(wanted - held, 0) * at.first_of_shard(change.target)
    entering = float((np.bincount(at.nodes, missing) / at.node_sizes).max())
    return max(least, entering / (network.gigabytes_per_s * 1e3) + network.latency_us if entering else 0.0)
