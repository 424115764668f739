"""torch's meshes and placements, as the planner's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as torch_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..errors import UnsupportedError
from ..planner import Layout, Mesh, Partial, Placement, Replicate, Shard
from .group_caches import kept_with_group

_OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}
_meshes: dict[DeviceMesh, Mesh] = kept_with_group({})


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The planner's mesh, with the ranks of the default process group."""
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        table = device_mesh.mesh
        mesh = Mesh(tuple(table.shape), device_mesh.mesh_dim_names, table.flatten().tolist())
        if len(_meshes) > 256:
            _meshes.clear()
        _meshes[device_mesh] = mesh
    return mesh


def layout_of(placements: Sequence[Any], mesh_shape: Sequence[int], shard_order: Any = None) -> Layout:
    """The layout that torch's placements and shard order state; strided shards are read as an order.

    Raises:
        UnsupportedError: a placement that carries state or reduces bitwise, or a strided shard that is no order.
    """
    tokens: list[Placement | tuple[int, int]] = []
    for mesh_dim, p in enumerate(placements):
        if type(p) is torch_types.Shard:
            tokens.append(Shard(p.dim))
        elif type(p) is torch_types.Replicate:
            tokens.append(Replicate())
        elif type(p) is torch_types._StridedShard:
            tokens.append((p.dim, int(p.split_factor)))
        elif type(p) is torch_types.Partial and p.reduce_op in _OPS:
            tokens.append(Partial(_OPS[p.reduce_op]))
        else:
            raise UnsupportedError(
                f"placement {p} on mesh dim {mesh_dim}; allowed: Replicate, Shard, Partial of {list(_OPS)}"
            )
    if any(isinstance(token, tuple) for token in tokens):
        return Layout.from_strided(tokens, mesh_shape)
    order = {entry.tensor_dim: tuple(entry.mesh_dims) for entry in shard_order or ()}
    return Layout([token for token in tokens if not isinstance(token, tuple)], order)


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """The layout of a DTensor.

    Raises:
        UnsupportedError: as `layout_of`; or strided shards that are meant as index sets of their own.
    """
    strided = any(isinstance(p, torch_types._StridedShard) for p in spec.placements)
    if strided and not spec.use_strided_shard_as_shard_order:
        raise UnsupportedError(
            f"placements {spec.placements}: strided shards made by a view are index sets of their own"
        )
    return layout_of(spec.placements, spec.mesh.shape, None if strided else spec.shard_order)
