"""Layouts between the steps of programs on nodes of different sizes, or on nodes that no mesh dim follows.

Where the nodes are not the product of mesh dims, no placement says "the ranks of a node share this". Such a layout cuts
the shard of a base layout once more, by the node of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from .layout import Layout
from .mesh import Coordinate, Mesh
from .nodes import Nodes, nodes_of
from .placements import Shard

Kind = Literal["node sums", "node shares", "shares"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_RANKS = 32
"""The mesh size up to which these layouts are used, since their steps are planned and priced box by box."""


class NodeLayout(Layout):
    """The shards of `base`, of which ranks that differ only along the mesh dims `along` hold a part each.

    Args:
        kind: "node sums": along `along`, `base` is partial, or replicated; the ranks of a node have added their terms,
            and each holds a part of the result, which is one term of the node; it has memory for all of it, so that a
            part begins at the same place on every node. Of the nodes that have replicas of a term, one adds it.
            "node shares": `base` is replicated along `along`; the
            ranks of a node hold a part of it each. "shares": the nodes hold a part each, and its ranks a part of that.
        tensor_dim: the tensor dim that is cut, after all cuts of `base`, as `torch.chunk` does.
        mesh: the mesh of `base`.
        nodes: the node of each rank.

    Attributes:
        summed: the mesh dims of `along` that are partial in `base`.
        node: [positions] the index of the node of each rank among those that hold parts of the same, or of "node sums"
            among those that add terms.
        number_of_nodes: [positions] their number.
        adds: [positions] of "node sums": whether the node of each rank adds the term of this rank.
        terms_on_node: [positions] of "node sums": the number of terms that the node of each rank adds.
    """

    def __init__(
        self,
        kind: Kind,
        base: Layout,
        tensor_dim: int,
        along: tuple[int, ...],
        mesh: Mesh,
        nodes: Nodes | None,
    ) -> None:
        identity = kind, base, tensor_dim, along, mesh, nodes
        names = "kind", "base", "tensor_dim", "along", "mesh", "nodes"
        for name, value in (*zip(names, identity, strict=True), ("_identity", identity)):
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

    @property
    def _places(self) -> tuple[np.ndarray, ...]:
        return _places(self.mesh, self.along, self.nodes)

    @property
    def group(self) -> np.ndarray:
        """[positions] a number for each rank, equal for those that differ only along `along`."""
        return _group(self.mesh, self.along)

    @property
    def summed(self) -> tuple[int, ...]:
        return tuple([m for m in self.along if m in self.base.partial_dims])

    @property
    def node(self) -> np.ndarray:
        return self._sums[2] if self.kind == "node sums" else self._places[2]

    @property
    def number_of_nodes(self) -> np.ndarray:
        return self._sums[3] if self.kind == "node sums" else self._places[3]

    @property
    def adds(self) -> np.ndarray:
        return self._sums[0]

    @property
    def terms_on_node(self) -> np.ndarray:
        return self._sums[1]

    @property
    def _sums(self) -> tuple[np.ndarray, ...]:
        return _sums(self.mesh, self.along, self.summed, self.nodes)

    def is_alike_along(self, mesh_dims: Sequence[int]) -> bool:
        """Of "node sums": whether the same terms are added, in the same order, at all coordinates along `mesh_dims`,
        which are not in `along`."""
        replicas, group = _group(self.mesh, (*self.along, *mesh_dims)), self.group
        sums = np.stack([replicas, group, _terms(self.mesh, self.summed), self.node])[:, self.adds]
        by_group: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for of_replicas, of_group, term, node in sums.T.tolist():
            by_group.setdefault((of_replicas, of_group), set()).add((term, node))
        first = {of_replicas: terms for (of_replicas, _), terms in by_group.items()}
        return all(terms == first[of_replicas] for (of_replicas, _), terms in by_group.items())

    def parts(self, coordinate: Coordinate) -> tuple[tuple[int, int, int], ...]:
        """The cuts besides those of `base` for the memory of the rank at `coordinate` (`index_sets.Parts`)."""
        if self.kind == "node sums":
            return ()
        position = int(np.array(coordinate) @ self.mesh.strides)
        index, ranks, node, nodes = (int(place[position]) for place in self._places)
        return ((nodes, 1, node), (ranks, 1, index)) if self.kind == "shares" else ((ranks, 1, index),)

    def narrowed(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut the spans [positions] that ranks hold of `tensor_dim` under `base` down to what they have values of."""
        index, ranks, node, nodes = self._places
        if self.kind == "shares":
            start, stop = _cut(start, stop, nodes, node)
        start, stop = _cut(start, stop, ranks, index)
        return start, np.where(self.terms_on_node > 0, stop, start) if self.kind == "node sums" else stop


def _terms(mesh: Mesh, summed: tuple[int, ...]) -> np.ndarray:
    """[positions] the index of the term of each rank along the mesh dims `summed`."""
    return _group(mesh, tuple([m for m in range(mesh.ndim) if m not in summed]))


@lru_cache(maxsize=256)
def _sums(mesh: Mesh, along: tuple[int, ...], summed: tuple[int, ...], nodes: Nodes | None) -> tuple[np.ndarray, ...]:
    """`NodeLayout.adds`, `terms_on_node`, `node` and `number_of_nodes` of "node sums".

    Of the nodes that lack the fewest terms of a sum, each in turn adds all those that no other one adds yet.
    """
    group, term, node = _group(mesh, along), _terms(mesh, summed), nodes_of(mesh.rank_array, nodes)
    adds = np.zeros(mesh.size, dtype=bool)
    terms_on_node, index, number = np.zeros((3, mesh.size), dtype=np.int64)
    for g in range(int(group.max()) + 1):
        here = group == g
        left, adding = set(term[here].tolist()), []
        while left:
            has = {n: left.intersection(term[here & (node == n)].tolist()) for n in sorted(set(node[here].tolist()))}
            chosen = max(has, key=lambda n: len(has[n]))
            adding.append(chosen)
            ranks = here & (node == chosen)
            terms_on_node[ranks] = len(has[chosen])
            adds |= ranks & np.isin(term, list(has[chosen]))
            left -= has[chosen]
        for i, n in enumerate(sorted(adding)):
            index[here & (node == n)] = i
        number[here] = len(adding)
    return adds, terms_on_node, index, number


def _group(mesh: Mesh, along: tuple[int, ...]) -> np.ndarray:
    group = np.zeros(mesh.size, dtype=np.int64)
    for m in range(mesh.ndim):
        if m not in along:
            group = group * mesh.shape[m] + mesh.coordinates[m]
    return group


@lru_cache(maxsize=256)
def _places(mesh: Mesh, along: tuple[int, ...], nodes: Nodes | None) -> tuple[np.ndarray, ...]:
    """[positions] the index of each rank on its node, the number of ranks there, the index of its node, and the number
    of nodes, each among the ranks that differ only along `along`."""
    node, ranks = nodes_of(mesh.rank_array, nodes), mesh.rank_array
    alike = _group(mesh, along)[:, None] == _group(mesh, along)
    near = alike & (node[:, None] == node)
    lower = ranks < ranks[:, None]
    first = ~(near & (np.arange(mesh.size) < np.arange(mesh.size)[:, None])).any(axis=1)  # one rank of each node
    others = alike & first
    return (
        (near & lower).sum(axis=1),
        near.sum(axis=1),
        (others & (node < node[:, None])).sum(axis=1),
        others.sum(axis=1),
    )


def _cut(start: np.ndarray, stop: np.ndarray, parts: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`index_sets.cut` of many spans."""
    size = -(-(stop - start) // parts)
    return np.minimum(start + index * size, stop), np.minimum(start + (index + 1) * size, stop)


def parse_node_layout(text: str, mesh: Mesh, nodes: Nodes | None) -> NodeLayout | None:
    """The inverse of `str` on a `NodeLayout`; None if `text` is not one.

    Raises:
        ArgumentError: the text of the base layout is not valid.
    """
    base, _, rest = text.partition(" | ")
    words = rest.rsplit(" ", 3)
    if len(words) != 4 or (kind := words[0]) not in KINDS or words[2] != "along" or not words[1][1:].isdecimal():
        return None
    along = tuple(int(m) for m in words[3].split(",") if m.isdecimal())
    layout = Layout.parse(base, mesh.shape)
    if not all(m < mesh.ndim for m in along) or len(layout.placements) != mesh.ndim:
        return None
    if kind == "node sums" and (any(isinstance(layout.placements[m], Shard) for m in along) or not layout.has_partial):
        return None
    return NodeLayout(kind, layout, int(words[1][1:]), along, mesh, nodes)  # type: ignore[arg-type]
