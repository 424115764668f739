"""From a request to a program: one exchange, or as many as are cheapest where links differ or values are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..errors import ArgumentError, LayoutSyntaxError, UnsupportedError
from .cost import Price
from .crossing import Crossing, price_step, union
from .dtypes import ITEMSIZE, check_computed, check_dtype, check_reducible, identity
from .exchange import FILL, Change
from .index_sets import held_sizes
from .layout import Layout, Partial, Placement, Replicate, Shard
from .mesh import Mesh, whole_numbers
from .program import Exchange, Local, Program, Reduce, Step, check_shape
from .ranks import ranks_of
from .refinement import refined
from .search import Route, Search
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
        topology: what the ranks are linked by; the steps are those that take least time on it. A mesh dim that runs
            through several nodes is two in the program, between nodes and inside them, at the same positions. None: all
            ranks reach each other alike, and bytes alone decide.
        max_bytes: what a rank may hold at most at any time: input, output, and what lies between.

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
    source, target = _layout("src", src, mesh), _layout("dst", dst, other)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology, or None")
    if max_bytes is not None:
        max_bytes = whole_numbers("max_bytes", [max_bytes])[0]
    request = check_shape(shape), check_dtype(dtype), source, target, rank, topology, max_bytes
    return _plan(mesh, *request) if mesh.same_ranks(other) else _plan_crossing(mesh, other, *request)


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
    source, target = _layout("src", src, mesh), _layout("dst", dst, mesh)
    return _routed(mesh, check_shape(shape), check_dtype(dtype), source, target, topology, None)[3].us


def _layout(argument: str, given: Layout | str, mesh: Mesh) -> Layout:
    if isinstance(given, Layout):
        return given.decoded(mesh.shape) if len(given.placements) == mesh.ndim else given
    if not isinstance(given, str):
        raise ArgumentError(f"{argument}: {given!r}; allowed: a Layout or its text form")
    try:
        return Layout.parse(given, mesh.shape)
    except LayoutSyntaxError as error:
        raise LayoutSyntaxError(error.text, error.position, f"{argument}: {error.reason}") from None
    except (ArgumentError, UnsupportedError) as error:
        raise type(error)(f"{argument}: {error}") from None


@lru_cache(maxsize=4096)
def _plan(
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    src: Layout,
    dst: Layout,
    rank: int | None,
    topology: Topology | None,
    max_bytes: int | None,
) -> Program:
    others: tuple[Route, ...] = ()
    if topology is None and max_bytes is None:
        stops = _checked(mesh, shape, dtype, src, dst)
        if len(stops) == 2:
            stops = _cheapest_route(mesh, shape, dtype, *stops)
    else:
        topology = topology or NVLINK_NODE
        mesh, src, dst, route = _routed(mesh, shape, dtype, src, dst, topology, max_bytes)
        stops, others = route.stops, route.others
    node_size = None if topology is None else topology.node_size
    pairs = zip(stops, stops[1:], strict=False)
    steps = tuple(_step(Change(mesh, shape, dtype, a, b, node_size), rank) for a, b in pairs)
    return Program(mesh, shape, dtype, src, dst, steps, rank, topology, others)


@lru_cache(maxsize=4096)
def _plan_crossing(
    source_mesh: Mesh,
    target_mesh: Mesh,
    shape: tuple[int, ...],
    dtype: str,
    src: Layout,
    dst: Layout,
    rank: int | None,
    topology: Topology | None,
    max_bytes: int | None,
) -> Program:
    """Values that are partial are reduced on the source's mesh, and made partial on the target's; one exchange between.

    On a topology the target's mesh may also take in shards, which its nodes then gather inside.
    """
    _check("src", src, source_mesh, shape, dtype)
    _check("dst", dst, target_mesh, shape, dtype)
    _check_target(dst, [None] * target_mesh.ndim)
    if topology is not None or max_bytes is not None:
        topology = topology or NVLINK_NODE
        source_mesh, (src,) = refined(source_mesh, shape, (src,), topology)
        target_mesh, (dst,) = refined(target_mesh, shape, (dst,), topology)
        if source_mesh.same_ranks(target_mesh):
            return _plan(source_mesh, shape, dtype, src, dst, rank, topology, max_bytes)
    source, target = src.without_size_one(source_mesh.shape), dst.without_size_one(target_mesh.shape)
    partial = tuple(m for m, p in enumerate(source.placements) if isinstance(p, Partial))
    before = [source]
    if partial:
        before = [_scattered(source, partial, d) for d in range(len(shape)) if shape[d] > 1]
        before.append(source.with_placement(partial, Replicate()))
    whole = target.with_placement([m for m, p in enumerate(target.placements) if isinstance(p, Partial)], Replicate())
    after = [whole]
    if topology is not None:
        inside = ranks_of(target_mesh, topology).inside
        shared = [m for m in inside if whole.placements[m] == Replicate()]
        after += [whole.with_placement(shared, Shard(d)) for d in range(len(shape)) if shared]
    node_size = None if topology is None else topology.node_size

    def legs(first: Layout, last: Layout) -> list[tuple[Mesh, Layout, Mesh, Layout]]:
        stops: list[tuple[Mesh, Layout]] = [(source_mesh, source), (source_mesh, first), (target_mesh, last)]
        stops += [(target_mesh, whole), (target_mesh, target)]
        return [(*a, *b) for a, b in zip(stops, stops[1:], strict=False) if a != b]

    def price(route: list[tuple[Mesh, Layout, Mesh, Layout]]) -> Price:
        if topology is not None:
            prices = [price_step(*leg, shape, dtype, topology) for leg in route]
            return Price(sum(round(p.us, 3) for p in prices), 0.0, max(p.peak_bytes for p in prices))
        taken = 0
        for mesh, a, other, b in route:
            contributors = Change(mesh, shape, dtype, a, b).contributors if mesh == other else 1
            taken += math.prod(held_sizes(shape, b, other.shape, (0,) * other.ndim)) * contributors
        return Price(taken, 0.0, 0)

    routes = [(price(route), route) for route in (legs(a, b) for a in before for b in after)]
    fitting = [(p, route) for p, route in routes if max_bytes is None or p.peak_bytes <= max_bytes]
    if not fitting:
        least = min(p.peak_bytes for p, _ in routes)
        raise ArgumentError(f"max_bytes: {max_bytes}; the plan found that holds least needs {least}")
    _, chosen = min(fitting, key=lambda found: (found[0].us, len(found[1])))
    both = union(source_mesh, target_mesh)
    steps = []
    for mesh, a, other, b in chosen:
        if mesh == other:
            steps.append(_step_inside(both, Change(mesh, shape, dtype, a, b, node_size), rank))
            continue
        crossing = Crossing(shape, mesh, a, other, b, node_size)
        common = mesh, a, other, b, crossing.boxes(rank), None, 0
        steps.append(Exchange(*common, None) if crossing.communicates() else Local(*common))
    return Program(both, shape, dtype, src, dst, tuple(steps), rank, topology, (), source_mesh, target_mesh)


def _step_inside(both: Mesh, change: Change, rank: int | None) -> Step:
    """A step of one of two meshes, in positions of everyone."""
    mesh = change.mesh
    if rank is not None:
        (rank,) = mesh.positions_of(np.array([both.rank_at(rank)])).tolist()
    if rank == -1:
        step = _step(change, 0)
        return replace(step, boxes=step.boxes.select(np.zeros(len(step.boxes), dtype=bool)))
    step = _step(change, rank)
    places = both.positions_of(mesh.rank_array)
    sender = np.where(step.boxes.sender == FILL, FILL, places[step.boxes.sender])
    boxes = replace(step.boxes, receiver=places[step.boxes.receiver], sender=sender)
    return replace(step, boxes=boxes.select(np.argsort(boxes.receiver, kind="stable")))


@lru_cache(maxsize=4096)
def _routed(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, src: Layout, dst: Layout, topology: Topology, max_bytes: int | None
) -> tuple[Mesh, Layout, Layout, Route]:
    """The request on the mesh that is planned for, and the cheapest route."""
    _checked(mesh, shape, dtype, src, dst)
    mesh, (src, dst) = refined(mesh, shape, (src, dst), topology)
    source, target = src.without_size_one(mesh.shape), dst.without_size_one(mesh.shape)
    if source == target:
        return mesh, src, dst, Route((source,), 0.0, 0)
    return mesh, src, dst, Search(mesh, shape, dtype, source, target, topology).cheapest(max_bytes)


def _checked(mesh: Mesh, shape: tuple[int, ...], dtype: str, src: Layout, dst: Layout) -> tuple[Layout, ...]:
    """Source and target with mesh dims of size 1 replicated, only one where they are the same then."""
    _check("src", src, mesh, shape, dtype)
    _check("dst", dst, mesh, shape, dtype)
    _check_target(dst, src.placements)
    source, target = src.without_size_one(mesh.shape), dst.without_size_one(mesh.shape)
    return (source,) if source == target else (source, target)


def _check(name: str, layout: Layout, mesh: Mesh, shape: tuple[int, ...], dtype: str) -> None:
    layout.check(mesh.shape, len(shape), name)
    for placement in layout.placements:
        if isinstance(placement, Partial):
            check_reducible(dtype, placement.op)


def _check_target(dst: Layout, before: Sequence[Placement | None]) -> None:
    for mesh_dim, (a, b) in enumerate(zip(before, dst.placements, strict=True)):
        if b == Partial("prod") and a != b:
            raise UnsupportedError(f"dst: mesh dim {mesh_dim} becomes a partial product; allowed: sum, avg, max, min")


def _step(change: Change, rank: int | None) -> Step:
    plain = change.contributors == 1 and change.divisor == 1
    reduce = None if plain else Reduce(change.op, change.contributors, change.divisor)
    if reduce is not None:
        check_computed(change.dtype)
    partials = [p for p in change.target.placements if isinstance(p, Partial)]
    fill = identity(change.dtype, partials[0].op) if partials else 0
    common = (change.mesh, change.source, change.mesh, change.target, change.boxes(rank), reduce, fill)
    return Exchange(*common, change.closure) if change.communicates() else Local(*common)


def _cheapest_route(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout
) -> tuple[Layout, ...]:
    """The layouts to pass through: the direct exchange, or a stop where partial mesh dims are scattered first.

    Priced by the bytes that the largest shards take in, their own included, so that every rank prices alike. Among
    equals a stop wins where a reduced mesh dim ends up replicated: it reduces every element once, not once per replica.
    """
    change = Change(mesh, shape, dtype, source, target)
    if not change.reduced:
        return source, target
    routes: list[tuple[Layout, ...]] = [(source, target)]
    bases = [source]
    if set(change.split) <= set(change.reduced):
        bases.append(target)
    for base in bases:
        for dim in range(len(shape)):
            if shape[dim] > 1 and (stop := _scattered(base, change.reduced, dim)) not in (source, target):
                routes.append((source, stop, target))
    replicated = any(target.placements[m] == Replicate() for m in change.reduced)

    def price(route: tuple[Layout, ...]) -> tuple[int, int]:
        taken = 0
        for a, b in zip(route, route[1:], strict=False):
            elements = math.prod(held_sizes(shape, b, mesh.shape, (0,) * mesh.ndim))
            taken += elements * Change(mesh, shape, dtype, a, b).contributors * ITEMSIZE[dtype]
        return taken, -len(route) if replicated else len(route)

    return min(routes, key=price)


def _scattered(base: Layout, mesh_dims: Sequence[int], tensor_dim: int) -> Layout:
    """`base` with `mesh_dims` cutting `tensor_dim` last; where they cut something in `base` already, that is left."""
    return base.with_placement([m for m in mesh_dims if not isinstance(base.placements[m], Shard)], Shard(tensor_dim))


def check_local_shape(program: Program, position: int, given: Sequence[int], name: str = "local tensor") -> None:
    """Raise ArgumentError unless `given` is the shape of the source shard at a mesh position."""
    needed = program.source_shape(position)
    if tuple(given) != needed:
        raise ArgumentError(
            f"{name}: rank at mesh position {position} gave shape {tuple(given)}; layout {program.src} of global shape "
            f"{program.shape} on mesh {program.source_mesh.shape} allows only {needed}"
        )
