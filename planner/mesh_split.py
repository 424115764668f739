"""Splits mesh dims in two: those that span several nodes, into between and inside nodes; and those along which too many
terms are reduced."""

from __future__ import annotations

import math

from . import bounded_fan_in
from .cost.mesh_nodes import block_on_node
from .cost.topology import Topology
from .layouts.layout import Layout, pairs_of
from .layouts.mesh import Mesh
from .layouts.placements import Partial, Placement, Shard, StridedShard


def split_by_nodes(
    mesh: Mesh, shape: tuple[int, ...], layouts: tuple[Layout, ...], topology: Topology
) -> tuple[Mesh, tuple[Layout, ...]]:
    """Split the mesh dims that nodes divide into equal blocks, so that a step can stay inside nodes or between them.

    Ranks, positions and shards stay the same. A mesh dim is left whole if it shards a tensor dim unevenly, as cutting
    in two steps would then give other shards.

    Returns:
        The mesh, and the layouts on it.
    """
    for m in reversed(range(mesh.ndim)):
        can_split = mesh.shape[m] > 1 and all(_even(mesh, shape, layout, m) for layout in layouts)
        block = block_on_node(mesh, topology, m) if can_split else 1
        if 1 < block < mesh.shape[m]:
            names = None
            if mesh.names is not None:
                names = (f"{mesh.names[m]} nodes", f"{mesh.names[m]} inside")
            layouts = tuple(_split(layout, m) for layout in layouts)
            mesh = mesh.unflatten(m, (mesh.shape[m] // block, block), names)
    return mesh, layouts


def split_by_fan_in(
    mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout, uneven: bool = False
) -> tuple[Mesh, Layout, Layout]:
    """Split mesh dims along which more than `MAX_FAN_IN` terms are reduced, so that they can be reduced in stages.

    Ranks and positions stay the same. A mesh dim is left whole if its size is prime.

    Args:
        uneven: whether also mesh dims that shard a tensor dim unevenly are split, if the target has no partial. The
            parts of such a dim cut one after the other, and the target that is returned has other shards. Otherwise
            shards stay the same.

    Returns:
        The mesh, the source and the target.
    """
    uneven = uneven and not target.partial_dims
    for m in reversed(range(mesh.ndim)):
        while mesh.shape[m] > bounded_fan_in.MAX_FAN_IN and isinstance(source.placements[m], Partial):
            inner, even = _divisor(mesh.shape[m]), _even(mesh, shape, target, m)
            if source.placements[m] == target.placements[m] or not (even or uneven) or inner == 1:
                break
            if not even and isinstance(strided := target.placements[m], StridedShard):
                target = target.with_placement([m], Shard(strided.dim))
            names = None if mesh.names is None else (f"{mesh.names[m]} groups", f"{mesh.names[m]} of a group")
            source, target = _split(source, m), _split(target, m)
            mesh = mesh.unflatten(m, (mesh.shape[m] // inner, inner), names)
    return mesh, source, target


def on_parts(mesh: Mesh, layout: Layout, parts: Mesh) -> Layout | None:
    """The layout of the same shards on `parts`, a mesh made of `mesh` by splitting dims; None if it is no such mesh."""
    if (mesh.names is None) != (parts.names is None):
        return None
    first = 0
    for m, size in enumerate(mesh.shape):
        end = first + 1
        while end < parts.ndim and math.prod(parts.shape[first:end]) < size:
            end += 1
        if math.prod(parts.shape[first:end]) != size or (end - first > 1 and 1 in parts.shape[first:end]):
            return None
        if mesh.names is not None and parts.names is not None:
            name, made = mesh.names[m], parts.names[first:end]
            if made != (name,) and not (len(made) > 1 and all(one.startswith(f"{name} ") for one in made)):
                return None
        for _ in range(first + 1, end):
            layout = _split(layout, first)
        first = end
    return layout if first == parts.ndim else None


def _divisor(n: int) -> int:
    """The largest divisor of n that exceeds neither the square root of n nor `MAX_FAN_IN`."""
    return next(k for k in range(min(math.isqrt(n), bounded_fan_in.MAX_FAN_IN), 0, -1) if n % k == 0)


def _even(mesh: Mesh, shape: tuple[int, ...], layout: Layout, mesh_dim: int) -> bool:
    """Whether the cuts of a tensor dim up to that of `mesh_dim` are even; true if it shards nothing."""
    for d, order in layout.orders:
        if mesh_dim in order:
            before = pairs_of(layout.cuts(d))[: order.index(mesh_dim) + 1]
            return all(
                shape[d] % (split * math.prod(mesh.shape[m] for m, _ in before[: i + 1])) == 0
                for i, (_, split) in enumerate(before)
            )
    return True


def _split(layout: Layout, mesh_dim: int) -> Layout:
    """The same shards with `mesh_dim` replaced by two mesh dims, of which the outer cuts first."""
    placements: list[Placement] = []
    for m, p in enumerate(layout.placements):
        placements += [p, p] if m == mesh_dim else [p]
    orders = {}
    for d, order in layout.orders:
        moved: list[int] = []
        for m in order:
            moved += [m, m + 1] if m == mesh_dim else [m + (m > mesh_dim)]
        orders[d] = tuple(moved)
    return Layout(placements, orders)
