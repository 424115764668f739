"""A request to the planner: one tensor, its source and target layouts, and the options of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from .arguments import check_shape, resolve_layout
from .cost.topology import Topology, TopologyName, topology_argument
from .layouts.dtypes import check_dtype
from .layouts.layout import Layout
from .layouts.mesh import Mesh, union_mesh, whole_numbers


@dataclass(frozen=True, init=False)
class Request:
    """The redistribution of one tensor, with meshes, layouts and numbers in their final types.

    Args: as for `plan`.

    Raises:
        ArgumentError: an argument has the wrong type or range. Whether the layouts fit the shape and the dtype is
            checked when the request is planned.
    """

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout
    target_mesh: Mesh
    rank: int | None
    topology: Topology | None
    max_bytes: int | None

    def __init__(
        self,
        mesh: Mesh | Sequence[int],
        shape: Sequence[int],
        dtype: str,
        source: Layout | str,
        target: Layout | str,
        target_mesh: Mesh | Sequence[int] | None = None,
        rank: int | None = None,
        topology: Topology | TopologyName | None = None,
        max_bytes: int | None = None,
    ) -> None:
        shape = check_shape(shape)
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        other = mesh if target_mesh is None else target_mesh if isinstance(target_mesh, Mesh) else Mesh(target_mesh)
        if rank is not None:
            rank = whole_numbers("rank", [rank])[0]
            union_mesh(mesh, other).coordinate(rank)  # raises if there is no such position
        source, target = resolve_layout("source", source, mesh), resolve_layout("target", target, other)
        topology = topology_argument(topology)
        max_bytes = check_max_bytes(max_bytes)
        self.__dict__.update(
            mesh=mesh, shape=shape, dtype=check_dtype(dtype), source=source, target=target, target_mesh=other,
            rank=rank, topology=topology, max_bytes=max_bytes,
        )  # fmt: skip

    def with_shape(self, shape: tuple[int, ...]) -> Request:
        """The same request for a tensor of another shape, which `check_shape` has checked."""
        request = object.__new__(Request)
        request.__dict__.update(self.__dict__, shape=shape)
        return request

    def fields(self) -> tuple[Any, ...]:
        """(mesh, shape, dtype, source, target, target_mesh): the request without the options of the plan."""
        return self.mesh, self.shape, self.dtype, self.source, self.target, self.target_mesh


def check_max_bytes(max_bytes: int | None) -> int | None:
    """`max_bytes` as a plain int.

    Raises:
        ArgumentError: it is neither None nor a whole number of 0 or more.
    """
    if max_bytes is None:
        return None
    (max_bytes,) = whole_numbers("max_bytes", [max_bytes])
    if max_bytes < 0:
        raise ArgumentError(f"max_bytes: {max_bytes}; allowed: 0 and up, or None")
    return max_bytes
