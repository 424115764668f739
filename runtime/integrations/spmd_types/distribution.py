"""The distribution that types of spmd_types give a tensor: the axes that they name, mesh dims or several of them
flattened, and which axes shard which tensor dim, in which order."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ....errors import ArgumentError, shown
from ...convert_specs import mesh_of, unordered_dims


class Distribution(NamedTuple):
    """The distribution of a tensor over axes.

    Attributes:
        kinds: for each axis "R", "I", "V", "P", the sharded tensor dim, or None for an axis that is not named.
        orders: the axes of more than one rank that shard each tensor dim, in the order of the cuts.
    """

    kinds: tuple[str | int | None, ...]
    orders: dict[int, tuple[int, ...]]


class Axes(NamedTuple):
    """The axes of a mesh: its dims, where those that a named axis flattens are one.

    Attributes:
        names, sizes, groups: of each axis.
        coordinate: of this rank.
        ranks: of the default process group, an array of shape `sizes`.
        unordered: the axes whose process groups may order their ranks differently.
        positions: the axis of each key that the types name.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]
    coordinate: tuple[int, ...]
    ranks: np.ndarray
    unordered: frozenset[int]
    positions: dict[Any, int]


class _Axis(NamedTuple):
    """An axis: a mesh dim, or the mesh dims of more than one rank that it flattens."""

    name: str
    dims: tuple[int, ...]
    group: dist.ProcessGroup


def types_of(value: Any) -> tuple[Any, Any]:
    """The types of the axes and the PartitionSpec of an argument; None if it has none."""
    if not isinstance(value, Mapping) and isinstance(value, spmd_types_package().SpmdType):
        return value.local_type, value.partition_spec
    return value, None


def axes_of(mesh: DeviceMesh, *values: Any) -> Axes:
    """The axes of a mesh for the types in `values`: mappings of axes or SpmdTypes. Others name no axes.

    Raises:
        ArgumentError: two axes have a mesh dim in common.
    """
    groups, names = mesh.get_all_groups(), mesh.mesh_dim_names or ()
    named = {key: axis for key in _keys(values) if (axis := _axis(key, mesh)) is not None}
    axes: list[_Axis] = []
    for axis in named.values():
        if not any(_is_same(axis, other) for other in axes):
            axes.append(axis)
    for axis, other in combinations(axes, 2):
        if common := [names[m] for m in axis.dims if m in other.dims]:
            raise ArgumentError(
                f"src, dst: axes {axis.name!r} and {other.name!r} have mesh dims {common} in common; allowed: axes of "
                f"different mesh dims, the same in src and dst"
            )
    taken = {m for axis in axes for m in axis.dims}
    axes += [_Axis(names[m], (m,), groups[m]) for m in range(mesh.ndim) if m not in taken]
    axes.sort(key=lambda axis: axis.dims or (mesh.ndim,))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shapes = [tuple(mesh.size(m) for m in axis.dims) for axis in axes]
    sizes = tuple(map(math.prod, shapes))
    table = mesh_of(mesh).rank_array.reshape(mesh.shape).transpose([m for axis in axes for m in axis.dims])
    ranks = table.reshape(sizes)
    at = [
        int(np.ravel_multi_index([coordinate[m] for m in axis.dims], shape)) if shape else 0
        for axis, shape in zip(axes, shapes, strict=True)
    ]
    unordered = unordered_dims(mesh)
    not_ascending = frozenset(
        a for a, axis in enumerate(axes)
        if any(m in unordered for m in axis.dims) or len(axis.dims) > 1 and _is_unordered(axis, a, ranks, at)
    )  # fmt: skip
    positions = {key: next(a for a, other in enumerate(axes) if _is_same(axis, other)) for key, axis in named.items()}
    return Axes(
        tuple(axis.name for axis in axes), sizes, tuple(axis.group for axis in axes), tuple(at), ranks, not_ascending,
        positions,
    )  # fmt: skip


def _is_same(axis: _Axis, other: _Axis) -> bool:
    return axis.dims == other.dims and (bool(axis.dims) or axis.name == other.name)


def _is_unordered(axis: _Axis, position: int, ranks: np.ndarray, at: Sequence[int]) -> bool:
    """Whether the process group of a flattened axis orders its ranks differently from the mesh."""
    line = ranks[tuple(slice(None) if a == position else c for a, c in enumerate(at))].tolist()
    return line != dist.get_process_group_ranks(axis.group)


def _keys(values: Iterable[Any]) -> Iterator[Any]:
    """The axes that arguments name."""
    for local, spec in map(types_of, values):
        if isinstance(local, Mapping):
            yield from local
            for entry in spec or ():
                yield from entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def distribution_of(argument: str, value: Any, axes: Axes, x: torch.Tensor) -> Distribution:
    """The distribution that an argument gives.

    Raises:
        ArgumentError: it is of another type, or names axes or tensor dims that are not there.
    """
    spmd, names = spmd_types_package(), axes.names
    local, spec = types_of(value)
    if not isinstance(local, Mapping):
        raise ArgumentError(f"{argument}: {shown(value)}; allowed: a mapping of axes to types, or an SpmdType")

    def position(axis: Any) -> int:
        if (a := axes.positions.get(axis)) is None:
            allowed = ", ".join(map(repr, names))
            raise ArgumentError(
                f"{argument}: axis {shown(axis)}; allowed: {allowed}, a flattened mesh dim if `mesh` is the root mesh, "
                f"or the process group of one of them"
            )
        return a

    kinds: list[str | int | None] = [None] * len(names)
    orders: dict[int, tuple[int, ...]] = {}
    for axis, kind in local.items():
        a = position(axis)
        if kinds[a] is not None:
            raise ArgumentError(f"{argument}: axis {names[a]!r} has two types; allowed: one")
        if isinstance(kind, spmd.Shard):
            if not -x.ndim <= kind.dim < x.ndim:
                allowed = f"{-x.ndim}..{x.ndim - 1}" if x.ndim else "none, the tensor has no dims"
                raise ArgumentError(f"{argument}: {kind} on axis {shown(axis)}; allowed dims: {allowed}")
            d = kinds[a] = kind.dim % x.ndim
            orders[d] = (*orders.get(d, ()), a)
        elif kind in (spmd.R, spmd.I, spmd.V, spmd.P):
            kinds[a] = kind.value
        else:
            raise ArgumentError(f"{argument}: {shown(kind)} on axis {shown(axis)}; allowed: R, I, V, P, S(dim)")
    for d, cuts in orders.items():
        if len([a for a in cuts if axes.sizes[a] > 1]) > 1:
            raise ArgumentError(
                f"{argument}: axes {[names[a] for a in cuts]} shard tensor dim {d}; allowed: one, or an SpmdType whose "
                f"PartitionSpec gives their order"
            )
    if spec is not None and len(spec) > x.ndim:
        raise ArgumentError(f"{argument}: a PartitionSpec of {len(spec)} dims; allowed: up to {x.ndim}")
    for d, entry in enumerate(spec or ()):
        cuts = tuple(position(axis) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None)
        for a in cuts:
            if kinds[a] not in (None, "V"):
                is_of = type_text(kinds[a])
                raise ArgumentError(
                    f"{argument}: axis {names[a]!r} is {is_of} and shards tensor dim {d}; allowed: V, once"
                )
            kinds[a] = d
        if cuts:
            orders[d] = cuts
    larger = {d: tuple(a for a in cuts if axes.sizes[a] > 1) for d, cuts in orders.items()}
    return Distribution(tuple(kinds), {d: cuts for d, cuts in larger.items() if cuts})


def _axis(key: Any, mesh: DeviceMesh) -> _Axis | None:
    """The axis that a key names: the name of a mesh dim or of a flattened mesh, a member of an enumeration of names, a
    process group, or the `MeshAxis` by which spmd_types identifies the groups of a mesh dim's strides. None if the mesh
    has no such axis."""
    groups, names = mesh.get_all_groups(), mesh.mesh_dim_names or ()
    name = getattr(key, "value", key)
    if isinstance(name, str):
        if name in names:
            m = names.index(name)
            return _Axis(name, (m,), groups[m])
        group = _flattened_group(name, mesh)
        return None if group is None else _flattened(group, mesh, name)
    spmd = spmd_types_package()
    if not isinstance(key, dist.ProcessGroup | spmd.MeshAxis):
        return None
    normalized = spmd.normalize_axis(key)
    for m, group in enumerate(groups):
        if key == group:
            return _Axis(names[m], (m,), group)
    for m, group in enumerate(groups):
        if normalized == spmd.normalize_axis(group):
            return _Axis(names[m], (m,), group)
    return _flattened(key, mesh) if isinstance(key, dist.ProcessGroup) else None


def _flattened_group(name: str, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of a flattened mesh; None if the mesh, which must be the root mesh, knows none of the name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prefers that callers keep the flattened mesh
            return mesh[name].get_group()
    except KeyError:
        return None


def _flattened(group: dist.ProcessGroup, mesh: DeviceMesh, name: str | None = None) -> _Axis | None:
    """The axis of a process group; None if its ranks are not those of mesh dims, of which it has each whole."""
    ranks, coordinate = sorted(dist.get_process_group_ranks(group)), mesh.get_coordinate()
    assert coordinate is not None
    table = mesh_of(mesh).rank_array.reshape(mesh.shape)
    wide = [m for m in range(mesh.ndim) if mesh.size(m) > 1]
    for count in range(len(wide) + 1):
        for dims in combinations(wide, count):
            at = tuple(slice(None) if m in dims else coordinate[m] for m in range(mesh.ndim))
            if sorted(np.ravel(table[at]).tolist()) == ranks:
                return _Axis(name or "_".join((mesh.mesh_dim_names or ())[m] for m in dims), dims, group)
    return None


def type_text(kind: str | int | None) -> str:
    """A kind of `Distribution` as spmd_types writes it."""
    return f"S({kind})" if isinstance(kind, int) else str(kind)


def spmd_types_package() -> Any:
    """The package.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return import_module("spmd_types")
    except ImportError as error:
        raise ArgumentError(f"src, dst: types of spmd_types, which cannot be imported ({error})") from error


def assert_types(x: torch.Tensor, mesh: DeviceMesh, value: Any, *, complete: bool = False) -> None:
    """While spmd_types checks types: check those of `x`, or give it these. With `complete`, `x` may have no others.

    Raises:
        ArgumentError: `x` has types of axes that are not named.
        spmd_types.SpmdTypeError: `x` has other types.
    """
    spmd = sys.modules["spmd_types"]
    if not spmd.is_type_checking():
        return
    with without_type_checks():
        axes = axes_of(mesh, value)

    def group(axis: Any) -> dist.ProcessGroup:
        return axes.groups[axes.positions[axis]]

    local, spec = types_of(value)
    kinds = {group(axis): kind for axis, kind in local.items()}
    if spec is not None:
        entries = (entry if entry is None or isinstance(entry, tuple) else (entry,) for entry in spec)
        spec = spmd.PartitionSpec(*(entry if entry is None else tuple(map(group, entry)) for entry in entries))
        kinds |= {axis: spmd.V for entry in spec if entry is not None for axis in entry}
    spmd.assert_type(x, kinds, partition_spec=spec)
    named = {spmd.normalize_axis(axis) for axis in kinds}
    if complete and (others := [axis for axis in spmd.get_local_type(x) if axis not in named]):
        raise ArgumentError(f"src: no type of axes {others}, of which x has one; allowed: all axes of x")


def without_type_checks() -> AbstractContextManager[Any]:
    """A context in which spmd_types does not check types: it would check those of the mesh's own tensor."""
    spmd = sys.modules.get("spmd_types")
    return spmd.no_typecheck() if spmd is not None and spmd.is_type_checking() else nullcontext()
