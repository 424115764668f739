"""torch's meshes, placements and dtypes, as the planner's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as torch_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from ..errors import ArgumentError, UnsupportedError, shown
from ..planner import ITEMSIZE, Layout, Mesh, Partial, Placement, Replicate, Shard, StridedShard
from .cache import kept_with_group

_OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}
_meshes: dict[DeviceMesh, Mesh] = kept_with_group({})


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The planner's mesh, with the ranks of the default process group."""
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        with unset_fake_temporarily():  # a mode that traces cannot read the mesh's real table
            table = device_mesh.mesh
            mesh = Mesh(tuple(table.shape), device_mesh.mesh_dim_names, table.flatten().tolist())
        if len(_meshes) > 256:
            _meshes.clear()
        _meshes[device_mesh] = mesh
    return mesh


def unordered_dims(device_mesh: DeviceMesh, mesh: Mesh | None = None) -> tuple[int, ...]:
    """The mesh dims along which some process group has its ranks in another order than the mesh.

    torch sorts the ranks of a group, so these are the mesh dims along which ranks do not ascend; with torch 2.15's
    `preserve_rank_order` there is none. It follows from what all ranks know, so that all come to the same answer.

    Args:
        mesh: `mesh_of(device_mesh)`, where the process group may be gone by now.
    """
    if getattr(device_mesh, "_preserve_rank_order", False):
        return ()
    return _dims_not_ascending(mesh_of(device_mesh) if mesh is None else mesh)


@lru_cache(256)
def _dims_not_ascending(mesh: Mesh) -> tuple[int, ...]:
    table = mesh.rank_array.reshape(mesh.shape)
    return tuple(m for m in range(mesh.ndim) if (np.diff(table, axis=m) < 0).any())


def normal_placements(
    argument: str, placements: Sequence[Any], mesh_ndim: int, ndim: int
) -> tuple[torch_types.Placement, ...]:
    """torch's placements, one per mesh dim, with tensor dims counted from the first.

    Raises:
        ArgumentError: not one per mesh dim, no placement, a tensor dim that is not there; the text names `argument`.
    """
    if len(placements) != mesh_ndim:
        raise ArgumentError(f"{argument}: {len(placements)} given for a mesh of {mesh_ndim} dims; allowed: one each")
    normal: list[torch_types.Placement] = []
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
        normal.append(placement)
    return tuple(normal)


def layout_given(argument: str, given: Any, mesh: Mesh, ndim: int) -> Layout | str:
    """A layout, or its text, as it is; a sequence of placements, torch's or the planner's own, as a layout.

    Strided shards are read as an order where there is one.

    Raises:
        ArgumentError: none of these, or placements that do not fit the mesh or the tensor; the text names `argument`.
        UnsupportedError: as `layout_of`.
    """
    if isinstance(given, Layout | str):
        return given
    if not isinstance(given, Sequence):
        raise ArgumentError(
            f"{argument}: {given!r}; allowed: a Layout, its text form, or a sequence of Replicate, Shard, Partial"
        )
    try:
        if given and all(isinstance(p, Placement) for p in given):
            return Layout(given)
        return layout_of(normal_placements(argument, given, mesh.ndim, ndim), mesh.shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{argument}: {error}") from None


def layout_of(placements: Sequence[Any], mesh_shape: Sequence[int], shard_order: Any = None) -> Layout:
    """The layout that torch's placements and shard order state; strided shards are read as an order where there is one.

    Raises:
        UnsupportedError: a placement that carries state or reduces bitwise.
    """
    return Layout(_planners(placements), _orders(shard_order)).decoded(mesh_shape)


def layout_of_spec(spec: DTensorSpec, mesh: Mesh | None = None) -> Layout:
    """The layout of a DTensor: which shard is whose goes by mesh coordinates.

    That is torch's meaning as well, except along mesh dims whose process groups have another order: there torch
    scatters, gathers and reduces by the order of the group, and cuts replicas by mesh coordinate.

    Args:
        mesh: as of `unordered_dims`.

    Raises:
        UnsupportedError: shards along such a mesh dim; as `layout_of`.
    """
    sharded = [m for m, p in enumerate(spec.placements) if isinstance(p, torch_types.Shard | torch_types._StridedShard)]
    if sharded and (odd := set(sharded).intersection(unordered_dims(spec.mesh, mesh))):
        raise UnsupportedError(
            f"shards along mesh dim {min(odd)}, whose ranks do not ascend: torch's own operations disagree about which "
            f"rank holds which; allowed: a mesh whose ranks ascend along it"
        )
    if not any(isinstance(p, torch_types._StridedShard) for p in spec.placements):
        return _unstrided(spec.placements, spec.shard_order)
    if spec.use_strided_shard_as_shard_order:
        return layout_of(spec.placements, spec.mesh.shape)
    # Made by a view: no order, also where one has the same split factors.
    own = [
        StridedShard(p.dim, p.split, own=True) if isinstance(p, StridedShard) else p for p in _planners(spec.placements)
    ]
    return Layout(own, _orders(spec.shard_order))


@lru_cache(maxsize=1024)
def _unstrided(placements: tuple[Any, ...], shard_order: Any) -> Layout:
    return Layout(_planners(placements), _orders(shard_order))


def _orders(shard_order: Any) -> dict[int, tuple[int, ...]]:
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in shard_order or ()}


def _planners(placements: Sequence[Any]) -> list[Placement]:
    found: list[Placement] = []
    for mesh_dim, p in enumerate(placements):
        if type(p) is torch_types.Shard:
            found.append(Shard(p.dim))
        elif type(p) is torch_types.Replicate:
            found.append(Replicate())
        elif type(p) is torch_types._StridedShard:
            found.append(StridedShard(p.dim, int(p.split_factor)))
        elif type(p) is torch_types.Partial and p.reduce_op in _OPS:
            found.append(Partial(_OPS[p.reduce_op]))
        else:
            raise UnsupportedError(
                f"placement {p} on mesh dim {mesh_dim}; allowed: Replicate, Shard, Partial of {list(_OPS)}"
            )
    return found


def spec_of_layout(layout: Layout, device_mesh: DeviceMesh, meta: TensorMeta) -> DTensorSpec:
    """The spec that says a layout: what `layout_of_spec` makes the same layout of again."""
    ops = {ours: theirs for theirs, ours in _OPS.items()}
    placements: list[torch_types.Placement] = []
    for p in layout.placements:
        if isinstance(p, StridedShard):
            placements.append(torch_types._StridedShard(p.dim, split_factor=p.split))
        elif isinstance(p, Shard):
            placements.append(torch_types.Shard(p.dim))
        elif isinstance(p, Partial):
            placements.append(torch_types.Partial(ops[p.op]))
        else:
            placements.append(torch_types.Replicate())
    if any(isinstance(p, StridedShard) and not p.own for p in layout.placements):
        return DTensorSpec(device_mesh, tuple(placements), meta, use_strided_shard_as_shard_order=True)
    order = tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=tuple(dims)) for d, dims in layout.orders)
    return DTensorSpec(device_mesh, tuple(placements), meta, shard_order=order, use_strided_shard_as_shard_order=False)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: torch.dtype | str) -> str:
    """The planner's name of a torch dtype, or of a name already.

    Raises:
        ArgumentError: a dtype whose elements are not whole bytes of their own, quantized types and the like.
    """
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    if name not in ITEMSIZE:
        raise ArgumentError(f"dtype: {shown(name)} is not supported; allowed: {', '.join(ITEMSIZE)}")
    return name
