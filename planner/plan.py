"""From a request to a program: one exchange, or as many as are cheapest where links differ or values are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..errors import ArgumentError
from .arguments import Asked, check_layout, check_shape, check_target, checked, layout_of
from .bounded_fan_in import staged
from .cross_mesh_exchange import union
from .cross_mesh_plan import plan_crossing
from .dtypes import ITEMSIZE, check_dtype
from .exchange import Change, change_of
from .index_sets import held_sizes
from .layout import Layout
from .local_slice import LocalSlice
from .mesh import Mesh, whole_numbers
from .mesh_split import narrowed, refined
from .placements import Shard
from .program import Program
from .ranks import PRICED_WHOLE
from .search import Route, Search
from .steps import step_of
from .topology import NVLINK_NODE, Topology


def plan(
    mesh: Mesh | Sequence[int],
    shape: Sequence[int],
    dtype: str,
    src: Layout | str,
    dst: Layout | str,
    *,
    target_mesh: Mesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Program:
    """The program that takes a tensor of the global `shape` from layout `src` to layout `dst`.

    Args:
        mesh: a `Mesh`, or its shape.
        dtype: a name such as "bfloat16".
        src, dst: layouts, or their text form (`Layout.parse`).
        target_mesh: the mesh that `dst` is on, if it is another: of the same ranks, of some of them, of none. Positions
            are then counted over everyone, the ranks of `mesh` first (`Program.mesh`).
        rank: a mesh position: only its own program, in time proportional to its peers. None: the program of all ranks.
        topology: what the ranks are linked by; the steps are those that are found to take least time on it. A mesh
            dim that runs through several nodes is two in the program, between nodes and inside them, at the same
            positions (as is one along which over 512 terms are summed). None: all ranks reach each other alike, and
            bytes alone decide.
        max_bytes: what a rank may hold at most at any time: input, output, and what lies between. Above 128 ranks as
            the prices of 16 of them say.

    Raises:
        ArgumentError: something does not fit, or no plan that was found keeps to `max_bytes`; the text names the
            argument, its value and what is allowed.
        UnsupportedError: a reduction that has no meaning for the dtype, or a target that is refused (partial products).
    """
    shape = check_shape(shape)
    return planner_of(
        mesh, len(shape), dtype, src, dst, target_mesh=target_mesh, rank=rank, topology=topology, max_bytes=max_bytes
    ).program(shape)


def planner_of(
    mesh: Mesh | Sequence[int],
    ndim: int,
    dtype: str,
    src: Layout | str,
    dst: Layout | str,
    *,
    target_mesh: Mesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Planner:
    """What makes the programs of tensors of `ndim` dims, whatever their sizes. Args and errors as for `plan`."""
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    other = mesh if target_mesh is None else target_mesh if isinstance(target_mesh, Mesh) else Mesh(target_mesh)
    if rank is not None:
        rank = whole_numbers("rank", [rank])[0]
        union(mesh, other).coordinate(rank)
    source, target = layout_of("src", src, mesh), layout_of("dst", dst, other)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology, or None")
    if max_bytes is not None:
        (max_bytes,) = whole_numbers("max_bytes", [max_bytes])
        if max_bytes < 0:
            raise ArgumentError(f"max_bytes: {max_bytes}; allowed: 0 and up, or None")
    return _planner(mesh, other, ndim, check_dtype(dtype), source, target, rank, topology, max_bytes)


class Planner:
    """Makes the programs of one request for tensors of ever new shapes: what the layouts alone decide is worked out
    once.

    Attributes:
        local_slice: of a request by which each rank keeps a part of what it holds, which needs no program; else None.
    """

    def __init__(
        self,
        mesh: Mesh,
        other: Mesh,
        ndim: int,
        dtype: str,
        src: Layout,
        dst: Layout,
        rank: int | None,
        topology: Topology | None,
        max_bytes: int | None,
    ) -> None:
        self.mesh, self.other, self.rank = mesh, other, rank
        self.crosses = not mesh.same_ranks(other)
        self.dtype, self.src, self.dst = dtype, src, dst
        self._asked = dtype, src, dst, rank, topology, max_bytes
        self._changes: tuple[Change, ...] | None = None
        """Of a route that is the same for tensors of all shapes."""
        self.local_slice: LocalSlice | None = None
        if not self.crosses and topology is None and max_bytes is None:
            stops = checked(mesh, ndim, dtype, src, dst)
            if len(stops) == 1 or not change_of(mesh, dtype, *stops).reduced:
                self._changes = changes_along(mesh, dtype, stops)
            if self._changes and rank is not None and LocalSlice.applies(self._changes[0]):
                self.local_slice = LocalSlice(self._changes[0], rank)

    def program(self, shape: tuple[int, ...]) -> Program:
        """The program for a tensor of a shape, whole numbers of 0 and up; kept.

        Raises:
            ArgumentError, UnsupportedError: as `plan`.
        """
        return _kept_program(self, shape)

    def make(self, shape: tuple[int, ...]) -> Program:
        """A new program for a tensor of a shape."""
        if self._changes is not None:
            steps = tuple([step_of(change, shape, self.rank) for change in self._changes])
            return Program(self.mesh, shape, self.dtype, self.src, self.dst, steps, self.rank)
        asked = Asked(shape, *self._asked)
        return _plan_crossing(self.mesh, self.other, asked) if self.crosses else _plan(self.mesh, asked)


_planner = lru_cache(maxsize=4096)(Planner)
_kept_program = lru_cache(maxsize=4096)(Planner.make)


def redistribute_cost(
    mesh: Mesh | Sequence[int],
    shape: Sequence[int],
    dtype: str,
    src: Layout | str,
    dst: Layout | str,
    topology: Topology = NVLINK_NODE,
) -> float:
    """Microseconds that the cheapest program takes on the rank that takes longest; no program is made.

    Args and errors as for `plan`. Answers are kept.
    """
    mesh = mesh if isinstance(mesh, Mesh | tuple) else whole_numbers("mesh", mesh)
    return _cost(mesh, shape if isinstance(shape, tuple) else check_shape(shape), dtype, src, dst, topology)


@lru_cache(maxsize=65536)
def _cost(
    mesh: Mesh | tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
    src: Layout | str,
    dst: Layout | str,
    topology: Topology,
) -> float:
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    source, target = layout_of("src", src, mesh), layout_of("dst", dst, mesh)
    return _routed(mesh, check_shape(shape), check_dtype(dtype), source, target, topology, None).route.us


def _plan(mesh: Mesh, asked: Asked) -> Program:
    shape, dtype, topology = asked.shape, asked.dtype, asked.topology
    if topology is None and asked.max_bytes is None:
        # Something is reduced, else the direct exchange is all that is to be considered.
        mesh, src, dst = narrowed(mesh, shape, asked.src, asked.dst)
        stops = _cheapest_route(mesh, shape, dtype, *checked(mesh, len(shape), dtype, src, dst))
        return _program(mesh, shape, dtype, src, dst, Route(stops, 0.0, 0), asked.rank, None)
    topology = topology or NVLINK_NODE
    found = _routed(mesh, shape, dtype, asked.src, asked.dst, topology, asked.max_bytes)
    return _program(found.mesh, shape, dtype, found.src, found.dst, found.route, asked.rank, topology)


def _plan_crossing(mesh: Mesh, other: Mesh, asked: Asked) -> Program:
    check_layout("src", asked.src, mesh, asked.shape, asked.dtype)
    check_layout("dst", asked.dst, other, asked.shape, asked.dtype)
    check_target(asked.dst, [None] * other.ndim)
    if asked.topology is not None or asked.max_bytes is not None:
        topology = asked.topology or NVLINK_NODE
        mesh, (src,) = refined(mesh, asked.shape, (asked.src,), topology)
        other, (dst,) = refined(other, asked.shape, (asked.dst,), topology)
        asked = replace(asked, src=src, dst=dst, topology=topology)
        if mesh.same_ranks(other):
            return _plan(mesh, asked)
    return plan_crossing(mesh, other, asked)


class _Routed(NamedTuple):
    """A request on the mesh that is planned for, and the cheapest route."""

    mesh: Mesh
    src: Layout
    dst: Layout
    route: Route


@lru_cache(maxsize=4096)
def _routed(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, src: Layout, dst: Layout, topology: Topology, max_bytes: int | None
) -> _Routed:
    checked(mesh, len(shape), dtype, src, dst)
    mesh, (src, dst) = refined(mesh, shape, (src, dst), topology)
    mesh, src, dst = narrowed(mesh, shape, src, dst)
    source, target = src.without_size_one(mesh.shape), dst.without_size_one(mesh.shape)
    if source == target:
        held = math.prod(held_sizes(shape, source, mesh.shape, (0,) * mesh.ndim)) * ITEMSIZE[dtype]
        if max_bytes is not None and held > max_bytes:
            raise ArgumentError(f"max_bytes: {max_bytes}; the tensor itself, ({source}), needs {held}")
        return _Routed(mesh, src, dst, Route((source,), 0.0, held))
    search = Search(mesh, shape, dtype, source, target, topology)
    if max_bytes is None:
        return _Routed(mesh, src, dst, search.cheapest())

    def held_by(route: Route) -> int:
        """What a rank holds at most: as the program's boxes say, on a large mesh as its price says."""
        if mesh.size > PRICED_WHOLE:
            return route.peak_bytes
        return max(_program(mesh, shape, dtype, src, dst, route, None, topology).peak_bytes)

    return _Routed(mesh, src, dst, search.cheapest_within(max_bytes, held_by))


def _program(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    src: Layout,
    dst: Layout,
    route: Route,
    rank: int | None,
    topology: Topology | None,
) -> Program:
    changes = changes_along(mesh, dtype, route.stops, None if topology is None else topology.node_size)
    steps = tuple([step_of(change, shape, rank) for change in changes])
    return Program(mesh, shape, dtype, src, dst, steps, rank, topology, route.others)


def _cheapest_route(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """The layouts to pass through: the direct exchange, or a stop where partial mesh dims are scattered first; steps of
    very many terms in stages.

    Priced by the bytes that the largest shards take in, their own included, so that every rank prices alike. Among
    equals the direct exchange wins: two ranks that each take in the other's whole value bring as many bytes as two that
    reduce a half each and then exchange halves, and meet once.
    """
    change = change_of(mesh, dtype, source, target)
    if not change.reduced:
        return source, target
    size, first = ITEMSIZE[dtype], (0,) * mesh.ndim

    def price(route: _Scattered) -> tuple[int, int]:
        taken = 0
        for layout, contributors in route.takes:
            taken += math.prod(held_sizes(shape, layout, mesh.shape, first)) * contributors * size
        return taken, len(route.stops)

    routes = [route for route in _routes(change, len(shape)) if route.dim is None or shape[route.dim] > 1]
    return min(routes, key=price).staged


class _Scattered(NamedTuple):
    """A route for a value that is reduced.

    `dim`: the tensor dim that it is scattered along, None for the direct one; `takes`: of each step the layout that it
    ends with, and the ranks whose terms it takes in; `staged`: `stops` with steps of very many terms in stages.
    """

    dim: int | None
    stops: tuple[Layout, ...]
    takes: tuple[tuple[Layout, int], ...]
    staged: tuple[Layout, ...]


@lru_cache(maxsize=1024)
def _routes(change: Change, ndim: int) -> list[_Scattered]:
    """The direct route, and all others that a tensor of `ndim` dims may take."""
    mesh, source, target = change.mesh, change.source, change.target
    found: dict[tuple[Layout, ...], int | None] = {(source, target): None}
    for base in (source, target) if set(change.split) <= set(change.reduced) else (source,):
        for dim in range(ndim):
            if (stop := scattered(base, change.reduced, dim)) not in (source, target):
                found.setdefault((source, stop, target), dim)
    return [
        _Scattered(
            dim,
            stops,
            tuple([(b, change_of(mesh, change.dtype, a, b).contributors) for a, b in pairwise(stops)]),
            staged(mesh, stops),
        )
        for stops, dim in found.items()
    ]


@lru_cache(maxsize=4096)
def changes_along(
    mesh: Mesh, dtype: str, stops: tuple[Layout, ...], node_size: int | None = None
) -> tuple[Change, ...]:
    """The changes from each layout to the next."""
    return tuple([change_of(mesh, dtype, a, b, node_size) for a, b in pairwise(stops)])


def scattered(base: Layout, mesh_dims: Sequence[int], tensor_dim: int) -> Layout:
    """`base` with `mesh_dims` cutting `tensor_dim` last; where they cut something in `base` already, that is left."""
    return base.with_placement([m for m in mesh_dims if not isinstance(base.placements[m], Shard)], Shard(tensor_dim))
