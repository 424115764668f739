"""`plan`, `plan_batch` and `redistribute_cost` with torch's meshes, placements and dtypes as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ... import planner
from ...errors import ArgumentError, UnsupportedError, with_prefix
from ...planner import (
    NVLINK_NODE,
    Batch,
    Layout,
    Mesh,
    Program,
    Request,
    Topology,
    TopologyName,
    check_shape,
    topology_argument,
)
from ..convert_specs import as_layout, dtype_name, mesh_of
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..transports.select import has_topologies, known_topology


def plan(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    source: Layout | str | Sequence[Placement],
    target: Layout | str | Sequence[Placement],
    *,
    target_mesh: Mesh | DeviceMesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | TopologyName | None = None,
    max_bytes: int | None = None,
) -> Program:
    """Plan the redistribution of a tensor from layout `source` to layout `target`.

    Args:
        mesh: a mesh shape, a `Mesh` or a `DeviceMesh`.
        shape: the global shape of the tensor.
        dtype: a torch dtype or its name.
        source, target: a `Layout`, its text form such as "S0 S1" (`Layout.parse`), or torch placements, one per mesh
            dim; a `_StridedShard` among these is decoded to a shard order where one exists.
        target_mesh: the mesh of `target`, if it is another. It may have the same ranks, some of them, or none.
            Positions are then counted over the ranks of both meshes, those of `mesh` first (`Program.mesh`).
        rank: a row-major position in the mesh whose program is returned. None: the program of all ranks.
        topology: the links between ranks; the program with the least time on it is chosen. "nvlink" is `NVLINK_NODE`,
            "nvlink-infiniband" is `NVLINK_INFINIBAND`. None: for a `DeviceMesh` the topology that its ranks have found,
            once all of them have exchanged data together; otherwise all links are alike, and the program minimises
            bytes.
        max_bytes: the most bytes that a rank may hold at any time, for input, output and intermediates together.

    Returns:
        The program: its steps, their bytes and costs; `explain()` prints it.

    Raises:
        ArgumentError: an argument is invalid, or no plan within `max_bytes` was found; the text names the argument, its
            value and what is allowed.
        UnsupportedError: a reduction that is undefined for the dtype, or a target that is refused.
    """
    topology = topology_argument(topology)
    if topology is None:
        topology = _known_topology(mesh, target_mesh)
    *request, destination_mesh = _request(mesh, shape, dtype, source, target, target_mesh).fields()
    return planner.plan(*request, target_mesh=destination_mesh, rank=rank, topology=topology, max_bytes=max_bytes)


def plan_batch(
    requests: Sequence[Request | tuple],
    *,
    rank: int | None = None,
    topology: Topology | TopologyName | None = None,
    max_bytes: int | None = None,
) -> Batch:
    """Plan the redistribution of several tensors that are carried out together, as by `redistribute_batch`.

    In each round ranks meet once, or exchange one message per pair, whatever the number of tensors.

    Args:
        requests: tuples (mesh, shape, dtype, source, target) or (mesh, shape, dtype, source, target, target_mesh), each
            as for `plan`; meshes and dtypes may differ.
        rank: the rank whose part is returned (not a position, since meshes may differ). None: the parts of all ranks.
        topology: as for `plan`; the tensors share the latency of a round.
        max_bytes: the most bytes that a rank may hold of all tensors together at any time. Where they need more, the
            limit of each is lowered in proportion.

    Returns:
        The programs by request, and their rounds.

    Raises:
        ArgumentError: as for `plan`, prefixed with the number of the request; or no plans within `max_bytes` were
            found.
        UnsupportedError: as for `plan`.
    """
    if not isinstance(requests, Sequence):
        raise ArgumentError(f"requests: {requests!r}; allowed: a list of requests")
    converted = []
    for number, request in enumerate(requests):
        fields = request.fields() if isinstance(request, Request) else request
        if not isinstance(fields, tuple | list) or not 5 <= len(fields) <= 6:
            raise ArgumentError(
                f"requests[{number}]: {request!r}; allowed: mesh, shape, dtype, source, target and optionally "
                "target_mesh"
            )
        try:
            converted.append(_request(*fields))
        except (ArgumentError, UnsupportedError) as error:
            raise with_prefix(error, f"requests[{number}]") from None
    return planner.plan_batch(converted, rank=rank, topology=topology, max_bytes=max_bytes)


def redistribute_cost(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    source: Layout | str | Sequence[Placement],
    target: Layout | str | Sequence[Placement],
    topology: Topology | TopologyName | None = None,
) -> float:
    """The cost of a redistribution, in microseconds on the rank that takes longest, without making a program.

    Results are cached, since solvers repeat their queries.

    Args:
        mesh, shape, dtype, source, target: as for `plan`.
        topology: the links between ranks, from which the costs of bytes, messages and steps follow, or a name as for
            `plan`. None: for a `DeviceMesh` the topology that its ranks have found, as for `plan`; otherwise
            `NVLINK_NODE`.

    Returns:
        The microseconds of the cheapest program; 0 where nothing has to be done. A program without communication costs
        as much as its copies.

    Raises:
        ArgumentError: an argument is invalid; the text names it, its value and what is allowed.
        UnsupportedError: as for `plan`.
    """
    topology = topology_argument(topology)
    if topology is None:
        topology = _known_topology(mesh) or NVLINK_NODE
    key: tuple[Any, ...] | None = (mesh, shape, dtype, source, target, topology)
    try:
        return _costs[key]
    except KeyError:
        pass
    except TypeError:
        key = _hashable(mesh, shape, dtype, source, target, topology)
        if key in _costs:
            return _costs[key]
    forget_dead_groups()
    request = _request(mesh, shape, dtype, source, target)
    cost = planner.redistribute_cost(
        request.mesh, request.shape, request.dtype, request.source, request.target, topology
    )
    if key is not None:
        _costs[key] = cost
    return cost


def _known_topology(*meshes: object) -> Topology | None:
    """The topology that all ranks of the meshes have found together; None without a DeviceMesh."""
    device_meshes = [mesh for mesh in meshes if isinstance(mesh, DeviceMesh)]
    if not device_meshes or not has_topologies() or any(isinstance(mesh, Mesh | Sequence) for mesh in meshes):
        return None
    forget_dead_groups()
    ranks = {rank for mesh in device_meshes for rank in mesh_of(mesh).rank_array.tolist()}
    return known_topology(tuple(sorted(ranks)), device_meshes[0].device_type)


_costs: ProcessGroupCache[tuple[Any, ...] | None, float] = ProcessGroupCache(65536)


def _hashable(*arguments: Any) -> tuple[Any, ...] | None:
    """The arguments with lists converted to tuples; None if one still cannot be hashed."""
    key = tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _request(mesh: Any, shape: Any, dtype: Any, source: Any, target: Any, target_mesh: Any = None) -> Request:
    """Convert a request to the planner's types."""
    source_mesh = _mesh(mesh)
    destination_mesh = source_mesh if target_mesh is None else _mesh(target_mesh)
    shape = check_shape(shape)
    source = as_layout("source", source, source_mesh, len(shape))
    target = as_layout("target", target, destination_mesh, len(shape))
    other_mesh = None if target_mesh is None else destination_mesh
    return Request(source_mesh, shape, dtype_name(dtype), source, target, other_mesh)


def _mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    return mesh_of(mesh) if isinstance(mesh, DeviceMesh) else Mesh(mesh)
