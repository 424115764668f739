"""The ranks of a mesh that are looked at when a step is priced: on which nodes they are, what two of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from .exchange import Change
from .index_sets import overlaps
from .layout import Cuts, Layout
from .mesh import Mesh
from .topology import Topology

PRICED_WHOLE = 128
"""Ranks of a mesh up to which every rank is priced; of a larger one 16 spread over it are, by what they receive."""
SAMPLED = 16
_SMALL = 1024  # receivers times holders up to which many tables are kept

P = ParamSpec("P")
T = TypeVar("T")


class Ranks:
    """The ranks of a mesh that are looked at: all of it, or some receivers and everyone on their nodes.

    Attributes:
        positions: [q] mesh positions.
        receivers: [r] indices into `positions`.
        coordinates: [mesh dims, q].
        nodes: [q] a number for each node, from 0.
        members: [nodes, q] whether on the node.
        near, own: [r, q] whether on the receiver's node, whether the receiver itself.
        one_node: whether there is but one node.
        crosses: for each mesh dim, whether ranks along it are on different nodes.
        inside: mesh dims of more than one rank that stay inside nodes.
    """

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.mesh = mesh
        self.whole = mesh.size <= PRICED_WHOLE
        everyone = np.arange(mesh.size)
        ranks = mesh.rank_array
        nodes = np.zeros_like(ranks) if topology.node_size is None else ranks // topology.node_size
        self.one_node = bool((nodes == nodes[0]).all())
        sampled = everyone if self.whole else np.unique(np.linspace(0, mesh.size - 1, SAMPLED).astype(np.int64))
        looked_at = np.isin(everyone, sampled) if self.one_node else np.isin(nodes, nodes[sampled])
        self.positions = everyone[looked_at]
        self.receivers = np.searchsorted(self.positions, sampled)
        self.nodes = np.unique(nodes[looked_at], return_inverse=True)[1]
        self.near = self.nodes[self.receivers][:, None] == self.nodes
        self.own = self.receivers[:, None] == np.arange(len(self.positions))
        self.coordinates = np.stack(np.unravel_index(self.positions, mesh.shape))
        self.members = np.arange(self.nodes.max() + 1)[:, None] == self.nodes
        table = nodes.reshape(mesh.shape)
        self.crosses = [bool((table != table.take([0], axis=m)).any()) for m in range(mesh.ndim)]
        self.inside = [m for m in range(mesh.ndim) if mesh.shape[m] > 1 and not self.crosses[m]]

    def kinds(self, mesh_dims: Iterable[int]) -> np.ndarray:
        """[q] a number for each rank, equal where the coordinates along `mesh_dims` are."""
        kind = np.zeros(len(self.positions), dtype=np.int64)
        for m in mesh_dims:
            kind = kind * self.mesh.shape[m] + self.coordinates[m]
        return kind

    def first_of_shard(self, layout: Layout) -> np.ndarray:
        """[q] whether a rank is the first of its node with its shard."""
        return _first_of_kind(self, tuple(sorted([m for _, order in layout.orders for m in order])))

    def terms_on_node(self, reduced: tuple[int, ...]) -> int:
        """The most terms that there are on one node of a value that is partial along some mesh dims."""
        return _terms_on_node(self, reduced)


@lru_cache(maxsize=64)
def ranks_of(mesh: Mesh, topology: Topology) -> Ranks:
    return Ranks(mesh, topology)


@lru_cache(maxsize=1024)
def _first_of_kind(at: Ranks, mesh_dims: tuple[int, ...]) -> np.ndarray:
    _, first = np.unique(np.stack([at.nodes, at.kinds(mesh_dims)]), axis=1, return_index=True)
    return np.isin(np.arange(len(at.nodes)), first)


@lru_cache(maxsize=1024)
def _terms_on_node(at: Ranks, reduced: tuple[int, ...]) -> int:
    nodes = np.unique(np.stack([at.nodes, at.kinds(reduced)]), axis=1)[0]
    return int(np.bincount(nodes).max())


def _kept(make: Callable[Concatenate[Ranks, P], T]) -> Callable[Concatenate[Ranks, P], T]:
    """Keeps answers of the size of [r, q]: many that are small, few that are large."""
    many, few = lru_cache(maxsize=4096)(make), lru_cache(maxsize=256)(make)

    def kept(at: Ranks, *key: P.args, **_: P.kwargs) -> T:
        return (many if at.near.size <= _SMALL else few)(at, *key)

    return kept


@_kept
def overlap(at: Ranks, extent: int, cuts: tuple[Cuts, Cuts]) -> np.ndarray:
    """[1, r, q] indices of a tensor dim that receiver r wants and rank q holds; `cuts`: of what is wanted, and held."""
    found = overlaps(extent, *cuts, at.mesh.shape, at.coordinates[:, at.receivers], at.coordinates)
    return found[None].astype(float)


@lru_cache(maxsize=4096)
def lengths(at: Ranks, extent: int, cuts: Cuts) -> np.ndarray:
    """[1, q] indices of a tensor dim that each rank holds."""
    return overlaps(extent, cuts, (), at.mesh.shape, at.coordinates, at.coordinates[:, :1]).T


class Shares:
    """What share of that which both have in common rank q sends receiver r.

    A rank takes from itself what it holds, else from those of its node that hold it, else from all that do.

    Attributes:
        near, far: [1, r, q] of ranks on the receiver's node, itself included, and of those elsewhere.
        keeps: [1, r] 1 for receivers that keep a value which becomes a sum, else 0.
    """

    def __init__(
        self,
        at: Ranks,
        closure: tuple[int, ...],
        replicas: tuple[int, ...],
        shards_split: tuple[int, ...],
        keepers: tuple[int, ...],
    ) -> None:
        mesh = at.mesh
        kinds = at.kinds(m for m in range(mesh.ndim) if m not in replicas)
        alike = kinds[:, None] == kinds
        near = at.near.astype(np.float64) @ alike
        far = 1 / math.prod(mesh.shape[m] for m in replicas)
        found = np.where(alike[at.receivers], at.own, np.where(near > 0, at.near / np.maximum(near, 1), far))
        kinds = at.kinds(m for m in range(mesh.ndim) if m not in closure or m in shards_split)
        keeps = (at.coordinates[list(keepers)].sum(axis=0) == 0)[at.receivers]
        found = found * (kinds[at.receivers][:, None] == kinds) * keeps[:, None]
        self.near, self.far = (found * at.near)[None], (found * ~at.near)[None]
        self.keeps = keeps[None].astype(float)


@_kept
def _shares(
    at: Ranks,
    closure: tuple[int, ...],
    replicas: tuple[int, ...],
    shards_split: tuple[int, ...],
    keepers: tuple[int, ...],
) -> Shares:
    return Shares(at, closure, replicas, shards_split, keepers)


def shares(at: Ranks, change: Change) -> Shares:
    return _shares(at, change.closure, change.replicas, change.shards_split, change.keepers)
