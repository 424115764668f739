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
from .between_meshes import plan_crossing
from .crossing import union
from .dtypes import ITEMSIZE, check_dtype
from .exchange import Change, change_of
from .index_sets import held_sizes
from .layout import Layout, Replicate, Shard
from .mesh import Mesh, whole_numbers
from .program import Program
from .ranks import PRICED_WHOLE
from .refinement import narrowed, refined
from .search import Route, Search
from .stages import staged
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
    asked = Asked(check_shape(shape), check_dtype(dtype), source, target, rank, topology, max_bytes)
    return _plan(mesh, asked) if mesh.same_ranks(other) else _plan_crossing(mesh, other, asked)


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


@lru_cache(maxsize=4096)
def _plan(mesh: Mesh, asked: Asked) -> Program:
    shape, dtype, topology = asked.shape, asked.dtype, asked.topology
    if topology is None and asked.max_bytes is None:
        stops = checked(mesh, len(shape), dtype, asked.src, asked.dst)
        src, dst = asked.src, asked.dst
        if len(stops) == 2 and src.has_partial:  # else the direct exchange is all that is to be considered
            mesh, src, dst = narrowed(mesh, shape, src, dst)
            stops = staged(mesh, _cheapest_route(mesh, shape, dtype, *checked(mesh, len(shape), dtype, src, dst)))
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
    node_size = None if topology is None else topology.node_size
    changes = (change_of(mesh, dtype, a, b, node_size) for a, b in pairwise(route.stops))
    steps = tuple([step_of(change, shape, rank) for change in changes])
    return Program(mesh, shape, dtype, src, dst, steps, rank, topology, route.others)


def _cheapest_route(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """The layouts to pass through: the direct exchange, or a stop where partial mesh dims are scattered first.

    Priced by the bytes that the largest shards take in, their own included, so that every rank prices alike. Among
    equals a stop wins where a reduced mesh dim ends up replicated: it reduces every element once, not once per replica.
    """
    change = change_of(mesh, dtype, source, target)
    if not change.reduced:
        return source, target
    replicated = any(target.placements[m] == Replicate() for m in change.reduced)

    def price(route: tuple[Layout, ...]) -> tuple[int, int]:
        taken = 0
        for a, b in pairwise(route):
            elements = math.prod(held_sizes(shape, b, mesh.shape, (0,) * mesh.ndim))
            taken += elements * change_of(mesh, dtype, a, b).contributors * ITEMSIZE[dtype]
        return taken, -len(route) if replicated else len(route)

    routes = [route for dim, route in _routes(change, len(shape)) if dim is None or shape[dim] > 1]
    return min(routes, key=price)


@lru_cache(maxsize=1024)
def _routes(change: Change, ndim: int) -> list[tuple[int | None, tuple[Layout, ...]]]:
    """Routes for a value that is reduced, and the tensor dim that each is scattered along; None for the direct one."""
    source, target = change.source, change.target
    routes: list[tuple[int | None, tuple[Layout, ...]]] = [(None, (source, target))]
    for base in (source, target) if set(change.split) <= set(change.reduced) else (source,):
        for dim in range(ndim):
            if (stop := scattered(base, change.reduced, dim)) not in (source, target):
                routes.append((dim, (source, stop, target)))
    return routes


def scattered(base: Layout, mesh_dims: Sequence[int], tensor_dim: int) -> Layout:
    """`base` with `mesh_dims` cutting `tensor_dim` last; where they cut something in `base` already, that is left."""
    return base.with_placement([m for m in mesh_dims if not isinstance(base.placements[m], Shard)], Shard(tensor_dim))
