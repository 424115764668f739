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
    nodes = nodes_of_mesh(mesh, topology).reshape(math.prod(mesh.shape[:mesh_dim]), mesh.shape[mesh_dim], -1)
    if (nodes[:, 1:2] != nodes[:, :1]).any():
        return 1  # without a look at the others
    changes = np.flatnonzero(nodes[:, 1:] != nodes[:, :-1])
    places = 1 + changes // nodes.shape[2] % (mesh.shape[mesh_dim] - 1)
    return math.gcd(mesh.shape[mesh_dim], int(np.gcd.reduce(places)))
