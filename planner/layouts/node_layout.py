"""Layouts between the steps of programs on nodes of different sizes, or on nodes that no mesh dim follows.

Where the nodes are not the product of mesh dims, no placement says "the ranks of a node share this". Such a layout cuts
the shard of a base layout once more, by the node of each rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

import numpy as np

from .layout import Layout
from .mesh import Coordinate, Mesh
from .nodes import Nodes, nodes_of

Kind = Literal["node sums", "node shares", "shares"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_RANKS = 32
"""The mesh size up to which these layouts are used, since their steps are planned and priced box by box."""


class NodeLayout(Layout):
    """The shards of `base`, of which ranks that differ only along the mesh dims `along` hold a part each.

    Args:
        kind: "node sums": along `along`, `base` is partial; the ranks of a node have added their terms, and each holds
            a part of the result, which is one term of the node; it has memory for all of it, so that a part begins at
            the same place on every node. "node shares": `base` is replicated along `along`; the
            ranks of a node hold a part of it each. "shares": the nodes hold a part each, and its ranks a part of that.
        tensor_dim: the tensor dim that is cut, after all cuts of `base`, as `torch.chunk` does.
        mesh: the mesh of `base`.
        nodes: the node of each rank.

    Attributes:
        node: [positions] the index of the node of each rank among those that hold parts of the same.
        number_of_nodes: [positions] their number.
    """

    def __init__(
        self, kind: Kind, base: Layout, tensor_dim: int, along: tuple[int, ...], mesh: Mesh, nodes: Nodes | None
    ) -> None:
        identity = kind, base, tensor_dim, along, mesh, nodes
        for name, value in (*zip(("kind", "base", "tensor_dim", "along", "mesh", "nodes"), identity, strict=True),
                            ("_identity", identity)):  # fmt: skip
            object.__setattr__(self, name, value)
        self._set(base.placements, base.orders)
        prefixes = list(base.prefixes)
        for m in along:
            prefixes[m] = (*prefixes[m], kind, tensor_dim)
        object.__setattr__(self, "prefixes", tuple(prefixes))
        object.__setattr__(self, "_hash", hash(identity))

    kind: Kind
    base: Layout
    tensor_dim: int
    along: tuple[int, ...]
    mesh: Mesh
    nodes: Nodes | None
    _identity: tuple

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeLayout) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"{self.base} | {self.kind} S{self.tensor_dim} along {','.join(map(str, self.along))}"

    def without_size_one(self, mesh_shape: object) -> Layout:
        return self

    @cached_property
    def _places(self) -> tuple[np.ndarray, ...]:
        """[positions] the index of each rank on its node and the number of ranks there, the index of its node and the
        number of nodes, each among the ranks that differ only along `along`."""
        mesh, node = self.mesh, nodes_of(self.mesh.rank_array, self.nodes)
        group = np.zeros(mesh.size, dtype=np.int64)
        for m in range(mesh.ndim):
            if m not in self.along:
                group = group * mesh.shape[m] + mesh.coordinates[m]
        places = np.zeros((4, mesh.size), dtype=np.int64)
        for members in (np.flatnonzero(group == g) for g in np.unique(group)):
            present, index = np.unique(node[members], return_inverse=True)
            places[2, members], places[3, members] = index.reshape(-1), len(present)
            for n in present:
                there = members[node[members] == n]
                there = there[np.argsort(mesh.rank_array[there])]
                places[0, there], places[1, there] = np.arange(len(there)), len(there)
        return tuple(places)

    @property
    def node(self) -> np.ndarray:
        return self._places[2]

    @property
    def number_of_nodes(self) -> np.ndarray:
        return self._places[3]

    @property
    def ranks_on_node(self) -> np.ndarray:
        """[positions] the number of ranks of the node that hold parts of the same."""
        return self._places[1]

    def parts(self, coordinate: Coordinate) -> tuple[tuple[int, int, int], ...]:
        """The cuts besides those of `base` for the memory of the rank at `coordinate` (`index_sets.Parts`)."""
        return () if self.kind == "node sums" else self.valid_parts(coordinate)

    def valid_parts(self, coordinate: Coordinate) -> tuple[tuple[int, int, int], ...]:
        """The cuts besides those of `base` for what the rank at `coordinate` has values of."""
        position = int(np.array(coordinate) @ self.mesh.strides)
        index, ranks, node, nodes = (int(place[position]) for place in self._places)
        return ((nodes, 1, node),) * (self.kind == "shares") + ((ranks, 1, index),)


def parse_node_layout(text: str, mesh: Mesh, nodes: Nodes | None) -> NodeLayout | None:
    """The inverse of `str` on a `NodeLayout`; None if `text` is not one.

    Raises:
        ArgumentError: the text of the base layout is not valid.
    """
    base, _, rest = text.partition(" | ")
    words = rest.rsplit(" ", 3)
    if len(words) != 4 or words[0] not in KINDS or words[2] != "along" or not words[1][1:].isdecimal():
        return None
    along = tuple(int(m) for m in words[3].split(",") if m.isdecimal())
    layout = Layout.parse(base, mesh.shape)
    if not all(m < mesh.ndim for m in along) or len(layout.placements) != mesh.ndim:
        return None
    return NodeLayout(words[0], layout, int(words[1][1:]), along, mesh, nodes)  # type: ignore[arg-type]
