"""The node of each rank: nodes of equally many consecutive ranks, or any assignment."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class RankNodes(tuple[int, ...]):
    """The node of each rank, by rank. Its hash and its array are computed once, since it is part of many cache keys.

    Args:
        nodes: the node of each rank.
        array: the same as an int64 array, if it is at hand.
    """

    _hash: int
    array: np.ndarray

    def __new__(cls, nodes: Iterable[int] = (), array: np.ndarray | None = None) -> RankNodes:
        self = super().__new__(cls, nodes)
        self._hash = super(RankNodes, self).__hash__()
        self.array = np.array(self, dtype=np.int64) if array is None else array
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankNodes):  # as arrays: there may be many ranks
            return self is other or self._hash == other._hash and np.array_equal(self.array, other.array)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


Nodes = int | RankNodes
"""The number of consecutive ranks of a node, or the node of each rank."""


def nodes_of(ranks: np.ndarray, nodes: Nodes | None) -> np.ndarray:
    """[n] the node of each of `ranks` [n]; 0 for all if `nodes` is None."""
    if nodes is None:
        return np.zeros_like(ranks)
    return nodes.array[ranks] if isinstance(nodes, RankNodes) else ranks // nodes
