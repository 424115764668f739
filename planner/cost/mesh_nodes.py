"""The nodes of the ranks of a mesh."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ..layouts.mesh import Mesh
from .topology import Topology


@lru_cache(maxsize=4)
def nodes_of_mesh(mesh: Mesh, topology: Topology) -> np.ndarray:
    """[size] the index of the node of the rank at each position; cached."""
    return topology.nodes_of(mesh.rank_array)


@lru_cache(maxsize=64)
def block_on_node(mesh: Mesh, topology: Topology, mesh_dim: int) -> int:
    """The largest block of neighbours along a mesh dim that always share a node and divides the dim; cached.

    1 if there is none, the size of the mesh dim if it does not span nodes.
    """
    nodes, size, step = nodes_of_mesh(mesh, topology), mesh.shape[mesh_dim], int(mesh.strides[mesh_dim])
    first = nodes.reshape(-1, size, step)[:, :2]
    if (first[:, 1:] != first[:, :1]).any():
        return 1  # without a look at the others
    # Counted across the whole mesh: a multiple of `size` more changes no common divisor with it, and so no change from
    # the last coordinate to the first ones after it counts.
    places = 1 + np.flatnonzero(nodes[step:] != nodes[:-step]) // step
    return math.gcd(size, int(np.gcd.reduce(places)))
