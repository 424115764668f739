"""Converts torch's meshes, placements, specs and dtypes to the planner's, and layouts back to specs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as torch_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ArgumentError, UnsupportedError, shown, with_prefix
from ..planner import ITEMSIZE, Layout, Mesh, Partial, Placement, Replicate, Shard, StridedShard, resolve_layout
from .process_group_cache import ProcessGroupCache

_OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}
_meshes: ProcessGroupCache[DeviceMesh, Mesh] = ProcessGroupCache(256)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The planner's mesh of the same shape, names and ranks of the default process group."""
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        with _disable_current_modes():  # under those of a tracer the mesh's rank table could not be read
            table = device_mesh.mesh
            mesh = Mesh(tuple(table.shape), device_mesh.mesh_dim_names, table.flatten().tolist())
        _meshes[device_mesh] = mesh
    return mesh


def unordered_dims(device_mesh: DeviceMesh, mesh: Mesh | None = None) -> tuple[int, ...]:
    """The mesh dims whose process groups may order their ranks differently from the mesh.

    torch sorts the ranks of a group, so these are the mesh dims along which ranks do not ascend; there are none with
    `preserve_rank_order` of torch 2.15. The result is the same on all ranks.

    Args:
        mesh: `mesh_of(device_mesh)`; required where the process group may have been destroyed.
    """
    if getattr(device_mesh, "_preserve_rank_order", False):
        return ()
    return _dims_not_ascending(mesh_of(device_mesh) if mesh is None else mesh)


@lru_cache(256)
def _dims_not_ascending(mesh: Mesh) -> tuple[int, ...]:
    table = mesh.rank_array.reshape(mesh.shape)
    return tuple(m for m in range(mesh.ndim) if (np.diff(table, axis=m) < 0).any())


def normalize_placements(
    argument: str, placements: Sequence[Any], mesh_ndim: int, ndim: int
) -> tuple[torch_types.Placement, ...]:
    """Validate torch placements and make their tensor dims non-negative.

    Raises:
        ArgumentError: the number of placements is not that of the mesh dims, an element is not a placement, or a tensor
            dim is out of range; the text names `argument`.
    """
    if len(placements) != mesh_ndim:
        raise ArgumentError(
            f"{argument}: {len(placements)} given for a mesh of {mesh_ndim} dims; allowed: one per mesh dim"
        )
    normalized: list[torch_types.Placement] = []
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, torch_types.Placement):
            raise ArgumentError(
                f"{argument}: mesh dim {mesh_dim} has {placement!r}; allowed: Replicate, Shard, Partial"
            )
        dim = getattr(placement, "dim", None)
        if dim is not None and not -ndim <= dim < ndim:
            allowed = f"{-ndim}..{ndim - 1}" if ndim else "none, the tensor has no dims"
            raise ArgumentError(f"{argument}: mesh dim {mesh_dim} shards tensor dim {dim}; allowed: {allowed}")
        if dim is not None and dim < 0 and type(placement) is torch_types.Shard:
            placement = torch_types.Shard(dim + ndim)
        elif dim is not None and dim < 0 and type(placement) is torch_types._StridedShard:
            placement = torch_types._StridedShard(dim + ndim, split_factor=placement.split_factor)
        normalized.append(placement)
    return tuple(normalized)


def placements_or_layout(
    argument: str, value: Any, mesh: Mesh, ndim: int
) -> tuple[torch_types.Placement, ...] | Layout:
    """Check an argument that says how a tensor lies on a mesh. A sequence of torch's placements is returned with
    non-negative tensor dims; a `Layout`, its text form or a sequence of the planner's placements as a `Layout`.

    Raises:
        ArgumentError: another type, or what does not fit the mesh or the tensor; the text names `argument`.
        UnsupportedError: partial ops that do not mix.
    """
    if not isinstance(value, Layout | Sequence):
        raise ArgumentError(
            f"{argument}: {shown(value)}; allowed: a Layout, its text form, or a sequence of Replicate, Shard, Partial"
        )
    if not isinstance(value, Layout | str):
        if not value or not all(isinstance(p, Placement) for p in value):
            return normalize_placements(argument, value, mesh.ndim, ndim)
        try:
            value = Layout(value)
        except (ArgumentError, UnsupportedError) as error:
            raise with_prefix(error, argument) from None
    layout = resolve_layout(argument, value, mesh)
    layout.check(mesh.shape, ndim, argument)
    return layout


def as_layout(argument: str, value: Any, mesh: Mesh, ndim: int) -> Layout:
    """The layout that an argument says, in any of the forms of `placements_or_layout`. Strided shards are decoded to a
    shard order where one exists.

    Raises:
        ArgumentError: as `placements_or_layout`.
        UnsupportedError: as `layout_of`.
    """
    given = placements_or_layout(argument, value, mesh, ndim)
    if isinstance(given, Layout):
        return given
    try:
        return layout_of(given, mesh.shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{argument}: {error}") from None


def layout_of(placements: Sequence[Any], mesh_shape: Sequence[int], shard_order: Any = None) -> Layout:
    """The layout of torch placements and a shard order; strided shards are decoded to an order where one exists.

    Raises:
        UnsupportedError: a placement with state, or a bitwise reduction.
    """
    return Layout(_planner_placements(placements), _orders(shard_order)).decoded(mesh_shape)


def layout_of_spec(spec: DTensorSpec, mesh: Mesh | None = None) -> Layout:
    """The layout of a DTensor. Shards are assigned to ranks by mesh coordinate.

    torch does the same, except along mesh dims whose process groups have another order: there it scatters, gathers and
    reduces in the order of the group, and slices replicas by mesh coordinate.

    Args:
        mesh: as for `unordered_dims`.

    Raises:
        UnsupportedError: shards along such a mesh dim, and as `layout_of`.
    """
    sharded = [m for m, p in enumerate(spec.placements) if isinstance(p, torch_types.Shard | torch_types._StridedShard)]
    if sharded and (unordered := set(sharded).intersection(unordered_dims(spec.mesh, mesh))):
        raise UnsupportedError(
            f"shards along mesh dim {min(unordered)}, whose ranks do not ascend: torch's own operations disagree about "
            f"which rank holds which shard; allowed: a mesh whose ranks ascend along it"
        )
    if not any(isinstance(p, torch_types._StridedShard) for p in spec.placements):
        return _unstrided(spec.placements, spec.shard_order)
    if spec.use_strided_shard_as_shard_order:
        return layout_of(spec.placements, spec.mesh.shape)
    # Strided shards of a view are not a shard order, even where an order has the same split factors.
    placements = [
        StridedShard(p.dim, p.split, own=True) if isinstance(p, StridedShard) else p
        for p in _planner_placements(spec.placements)
    ]
    return Layout(placements, _orders(spec.shard_order))


@lru_cache(maxsize=1024)
def _unstrided(placements: tuple[Any, ...], shard_order: Any) -> Layout:
    return Layout(_planner_placements(placements), _orders(shard_order))


def _orders(shard_order: Any) -> dict[int, tuple[int, ...]]:
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in shard_order or ()}


def _planner_placements(placements: Sequence[Any]) -> list[Placement]:
    converted: list[Placement] = []
    for mesh_dim, p in enumerate(placements):
        if type(p) is torch_types.Shard:
            converted.append(Shard(p.dim))
        elif type(p) is torch_types.Replicate:
            converted.append(Replicate())
        elif type(p) is torch_types._StridedShard:
            converted.append(StridedShard(p.dim, int(p.split_factor)))
        elif type(p) is torch_types.Partial and p.reduce_op in _OPS:
            converted.append(Partial(_OPS[p.reduce_op]))
        else:
            raise UnsupportedError(
                f"placement {p} on mesh dim {mesh_dim}; allowed: Replicate, Shard, Partial of {list(_OPS)}"
            )
    return converted


def torch_placements(layout: Layout) -> tuple[torch_types.Placement, ...]:
    """The placements of a layout, without its shard order."""
    torch_ops = {planner_op: torch_op for torch_op, planner_op in _OPS.items()}
    placements: list[torch_types.Placement] = []
    for p in layout.placements:
        if isinstance(p, StridedShard):
            placements.append(torch_types._StridedShard(p.dim, split_factor=p.split))
        elif isinstance(p, Shard):
            placements.append(torch_types.Shard(p.dim))
        elif isinstance(p, Partial):
            placements.append(torch_types.Partial(torch_ops[p.op]))
        else:
            placements.append(torch_types.Replicate())
    return tuple(placements)


def spec_of_layout(layout: Layout, device_mesh: DeviceMesh, meta: TensorMeta) -> DTensorSpec:
    """The spec of a layout, the inverse of `layout_of_spec`."""
    placements = torch_placements(layout)
    if any(isinstance(p, StridedShard) and not p.own for p in layout.placements):
        return DTensorSpec(device_mesh, placements, meta, use_strided_shard_as_shard_order=True)
    order = tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=tuple(dims)) for d, dims in layout.orders)
    return DTensorSpec(device_mesh, placements, meta, shard_order=order, use_strided_shard_as_shard_order=False)


def with_placements(spec: DTensorSpec, placements: tuple[torch_types.Placement, ...]) -> DTensorSpec:
    """The spec with other placements and the same shard order; the same mesh dims must be sharded."""
    return with_placements_and_meta(spec, placements, spec.tensor_meta)


def with_placements_and_meta(
    spec: DTensorSpec, placements: tuple[torch_types.Placement, ...], meta: TensorMeta | None
) -> DTensorSpec:
    strided = spec.use_strided_shard_as_shard_order
    order = {} if strided else {"shard_order": spec.shard_order}
    return DTensorSpec(spec.mesh, placements, meta, use_strided_shard_as_shard_order=strided, **order)  # type: ignore[arg-type]


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without "torch."; not validated."""
    return str(dtype).removeprefix("torch.")


def check_dtype_argument(argument: str, dtype: object) -> None:
    """
    Raises:
        ArgumentError: `dtype` is neither None nor a torch dtype that the planner supports.
    """
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{argument}: {dtype!r}; allowed: a torch.dtype, or None")
        dtype_name(dtype, argument)


def dtype_name(dtype: torch.dtype | str, argument: str = "dtype") -> str:
    """The planner's name of a dtype, which is a torch dtype or its name; `argument` is named in the error.

    Raises:
        ArgumentError: not supported by the planner, such as quantized dtypes and those of less than a byte.
    """
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    if name not in ITEMSIZE:
        raise ArgumentError(f"{argument}: {shown(name)} is not supported; allowed: {', '.join(ITEMSIZE)}")
    return name
