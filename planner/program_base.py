"""The data of a program and what follows from it: participating ranks, shapes, bytes, cost and digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .cost.byte_bound import bytes_bound
from .cost.cross_mesh_cost import step_price_between
from .cost.topology import Topology
from .exchange.steps import Exchange, Step, Traffic
from .layouts.dtypes import ITEMSIZE
from .layouts.index_sets import held_sizes
from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.node_layout import NodeLayout
from .layouts.nodes import Nodes, nodes_of
from .path import Path


class Requested(NamedTuple):
    """The ends of a redistribution as a caller named them, before mesh dims were split."""

    source_mesh: Mesh
    source: Layout
    target_mesh: Mesh
    target: Layout


@dataclass(frozen=True, eq=False)
class ProgramBase:
    """A program without its text, SVG and JSON forms, which `Program` adds; `Program` documents the fields."""

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    rank: int | None = None
    topology: Topology | None = None
    others: tuple[Path, ...] = ()
    source_mesh: Mesh = None  # type: ignore[assignment]
    target_mesh: Mesh = None  # type: ignore[assignment]
    requested: Requested | None = None
    ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("source_mesh", "target_mesh"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.mesh)
        object.__setattr__(self, "ranks", tuple(range(self.mesh.size)) if self.rank is None else (self.rank,))

    @property
    def exchanges(self) -> int:
        """The number of steps with communication."""
        return sum(isinstance(step, Exchange) for step in self.steps)

    @property
    def is_cross_mesh(self) -> bool:
        """Whether source and target are on different meshes."""
        return self.source_mesh != self.target_mesh

    @property
    def is_identity(self) -> bool:
        """Whether the output is the input: nothing moves and nothing changes."""
        return not self.steps

    def members(self, step: Step, position: int) -> tuple[int, ...]:
        """The positions that take part in a step together with `position`, itself included, ascending."""
        if not isinstance(step, Exchange):
            return (position,)
        if step.group is not None:
            along = self._positions_along(step.target_mesh, position, step.group)
            nodes = _nodes_of_step(step)
            if nodes is None:
                return along
            node = nodes_of(self.mesh.rank_array, nodes)
            return tuple([p for p in along if node[p] == node[position]])
        boxes = step.boxes
        peers = np.concatenate(
            [boxes.sender[boxes.receiver == position, 0], boxes.receiver[boxes.sender[:, 0] == position]]
        )
        return tuple(sorted({position, *peers.tolist()}))

    def first_group(self, position: int) -> tuple[int, ...]:
        """The ranks that take part in the first exchange of `position`, itself included, ascending; only itself if it
        exchanges nothing."""
        for step in self.steps:
            members = self.members(step, position)
            if len(members) > 1:
                return self._ranks_at(members)
        return self._ranks_at([position])

    def all_meet(self, position: int) -> bool:
        """Whether the first exchange of `position` is among all participants, on each of them. Between meshes
        participants may have different peers."""
        step = next((step for step in self.steps if len(self.members(step, position)) > 1), None)
        in_group = isinstance(step, Exchange) and step.group is not None
        return in_group and self.first_group(position) == self.participants(position)

    def participants(self, position: int) -> tuple[int, ...]:
        """The ranks that must run the program together with `position`, itself included, ascending."""
        exchanges = [step for step in self.steps if isinstance(step, Exchange)]
        if not exchanges:
            return (self.mesh.rank_at(position),)
        if self.is_cross_mesh:
            return self._ranks_at(range(self.mesh.size))
        mesh_dims = {m for step in exchanges for m in step.group or ()}
        return self._ranks_at(self._positions_along(self.mesh, position, mesh_dims))

    def _positions_along(self, mesh: Mesh, position: int, mesh_dims: Collection[int]) -> tuple[int, ...]:
        """The positions along some dims of `mesh`, the program's or another; only itself if it is not in the mesh."""
        if mesh is self.mesh or mesh == self.mesh:
            return _subgroup(mesh, position, frozenset(mesh_dims))
        (at,) = mesh.positions_of(np.array([self.mesh.rank_at(position)])).tolist()
        if at < 0:
            return (position,)
        ranks = mesh.rank_array[list(mesh.subgroup(at, sorted(mesh_dims)))]
        return tuple(sorted(self.mesh.positions_of(ranks).tolist()))

    def _ranks_at(self, positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(map(self.mesh.rank_at, positions)))

    def coordinate_in(self, mesh: Mesh, position: int) -> tuple[int, ...] | None:
        """The coordinate of `position` in `mesh`, the program's or another; None if it is not in the mesh."""
        return mesh.coordinate_of(position, self.mesh)

    def local_shape(self, layout: Layout, position: int, mesh: Mesh | None = None) -> tuple[int, ...]:
        """The shape of the shard of `position` under `layout` on `mesh` (default: the program's).

        For a rank that is not in the mesh, (0,) * max(tensor dims, 1).
        """
        mesh = mesh or self.mesh
        key = layout, position, mesh
        shape = self._local_shapes.get(key)
        if shape is None:
            at = self.coordinate_in(mesh, position)
            shape = (0,) * max(len(self.shape), 1) if at is None else held_sizes(self.shape, layout, mesh.shape, at)
            if self.rank is not None:  # bounded: only the shapes of this rank and its peers
                self._local_shapes[key] = shape
        return shape

    @cached_property
    def _local_shapes(self) -> dict[tuple[Layout, int, Mesh], tuple[int, ...]]:
        """A cache of `local_shape`, which binding a program calls repeatedly."""
        return {}

    def source_shape(self, position: int) -> tuple[int, ...]:
        """The shape of the source shard of `position`."""
        return self.local_shape(self.source, position, self.source_mesh)

    def target_shape(self, position: int) -> tuple[int, ...]:
        """The shape of the target shard of `position`."""
        return self.local_shape(self.target, position, self.target_mesh)

    def shape_before(self, step: Step, position: int) -> tuple[int, ...]:
        """The shape of the shard of `position` before a step."""
        return self.local_shape(step.source, position, step.source_mesh)

    def shape_after(self, step: Step, position: int) -> tuple[int, ...]:
        """The shape of the shard of `position` after a step."""
        return self.local_shape(step.target, position, step.target_mesh)

    def local_bytes(self, layout: Layout, position: int) -> int:
        """The size in bytes of the shard of `position` under `layout`."""
        return self._bytes_of(self.local_shape(layout, position))

    def _bytes_of(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * ITEMSIZE[self.dtype]

    @cached_property
    def bytes_received(self) -> list[int]:
        """The bytes that each rank receives from other ranks in all steps."""
        size = ITEMSIZE[self.dtype]
        exchanges = [step for step in self.steps if isinstance(step, Exchange)]
        return [sum([step.boxes.elements_received(r) for step in exchanges]) * size for r in self.ranks]

    @cached_property
    def bytes_over_network(self) -> list[int]:
        """The bytes that each rank receives from other nodes; 0 without a topology."""
        size = ITEMSIZE[self.dtype]
        return [sum(self.traffic(step, r).received_far for step in self.steps) * size for r in self.ranks]

    @cached_property
    def bytes_bound(self) -> list[int] | None:
        """The bytes that each rank must receive at least: its target shard without what it already holds. None if a
        layout is partial."""
        source, target = self.source_mesh, self.target_mesh
        coordinates = ((self.coordinate_in(source, r), self.coordinate_in(target, r)) for r in self.ranks)
        return bytes_bound(self.shape, self.dtype, source, self.source, target, self.target, coordinates)

    @cached_property
    def cost_us(self) -> float | None:
        """The estimated microseconds on the slowest rank under the topology; None without a topology."""
        topology = self.topology
        if topology is None:
            return None
        prices = (
            step_price_between(
                step.source_mesh, step.source, step.target_mesh, step.target, self.shape, self.dtype, topology
            )
            for step in self.steps
        )
        return sum(price.us for price in prices) + (topology.call_us if self.steps else 0.0)

    def traffic(self, step: Step, position: int) -> Traffic:
        """The elements that `position` receives and sends in a step, inside its node and between nodes."""
        nodes = None
        if self.topology is not None and self.topology.rank_nodes is not None:
            nodes = self.topology.nodes_of(self.mesh.rank_array)
        return Traffic.of(step.boxes, position, nodes)

    @cached_property
    def peak_bytes(self) -> list[int]:
        """The bytes that each rank holds at most: input, output, intermediate layouts, staged partial terms, and send
        and receive buffers on links that are not one-sided."""
        size = ITEMSIZE[self.dtype]
        peaks = []
        for r in self.ranks:
            original = self._bytes_of(self.source_shape(r))
            peak = original
            for i, step in enumerate(self.steps):
                before = self._bytes_of(self.shape_before(step, r)) if i else 0
                traffic = self.traffic(step, r)
                packed = 0
                if self.topology is not None:
                    packed += 0 if self.topology.node.one_sided else traffic.received_near + traffic.sent_near
                    packed += 0 if self.topology.network.one_sided else traffic.received_far + traffic.sent_far
                after = self._bytes_of(self.shape_after(step, r))
                peak = max(peak, original + before + packed * size + (1 + step.staged_terms) * after)
            peaks.append(peak)
        return peaks

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the request, which ranks compare to detect that they disagree."""
        request: list[object] = [
            self.mesh.shape,
            self.mesh.ranks,
            self.shape,
            self.dtype,
            str(self.source),
            str(self.target),
        ]
        if self.is_cross_mesh:
            request += [(mesh.shape, mesh.ranks) for mesh in (self.source_mesh, self.target_mesh)]
        if self.topology is not None or len(self.steps) > 1:
            request += [self.topology, *(str(step.target) for step in self.steps)]
            if self.topology is not None:  # its `repr` leaves these out
                request += [tuple(self.topology.nodes or ()), self.topology.nics_per_node, self.topology.full_duplex]
        return int.from_bytes(hashlib.blake2b(repr(request).encode(), digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=4096)
def _subgroup(mesh: Mesh, position: int, mesh_dims: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(mesh.subgroup(position, sorted(mesh_dims))))


def format_bytes(n: int | float) -> str:
    """A number of bytes as text, in binary units, with up to four significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"


def _nodes_of_step(step: Exchange) -> Nodes | None:
    """The node of each rank, if only ranks of a node exchange in a step, by its layouts: they add their terms, or
    gather what the node holds."""
    before, after = step.source, step.target
    if isinstance(after, NodeLayout) and after.kind == "node sums" and after.base == before:
        return after.nodes
    if isinstance(before, NodeLayout) and before.kind == "node shares" and before.base == after:
        return before.nodes
    return None
