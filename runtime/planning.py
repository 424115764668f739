"""`plan` for people who hold torch objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from ..planner import Batch, Layout, Mesh, Program, Request, Topology
from ..planner import plan as plan_on_mesh
from ..planner import plan_batch as plan_batch_on_meshes
from .dtypes import dtype_name
from .specs import mesh_of


def plan(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout | str,
    dst: Layout | str,
    *,
    target_mesh: Mesh | DeviceMesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Program:
    """The program that takes a tensor of the global `shape` from layout `src` to layout `dst`.

    Args:
        mesh: a shape, a `Mesh` or a `DeviceMesh`.
        dtype: a torch dtype or its name.
        src, dst: layouts, or their text form such as "S0 S1" (`Layout.parse`).
        target_mesh: the mesh that `dst` is on, if it is another: of the same ranks, of some of them, of none. Positions
            are then counted over everyone, the ranks of `mesh` first (`Program.mesh`).
        rank: a row-major position in the mesh: only its own program. None: the program of all ranks.
        topology: what the ranks are linked by; the steps are those that take least time on it. None: all ranks reach
            each other alike, and bytes alone decide.
        max_bytes: what a rank may hold at most at any time: input, output, and what lies between.

    Raises:
        ArgumentError: something does not fit, or no plan that was found keeps to `max_bytes`; the text names the
            argument, its value and what is allowed.
        UnsupportedError: a reduction that has no meaning for the dtype, or a target that is refused.
    """
    here, there = _planners(mesh), _planners(target_mesh)
    return plan_on_mesh(
        here, shape, dtype_name(dtype), src, dst, target_mesh=there, rank=rank, topology=topology, max_bytes=max_bytes
    )


def _planners(mesh: Any) -> Any:
    return mesh_of(mesh) if isinstance(mesh, DeviceMesh) else mesh


def plan_batch(
    requests: Sequence[Request | tuple],
    *,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Batch:
    """The programs of several tensors, to be carried out together: a refit, an optimizer's step.

    In each round ranks meet once, or exchange one message per pair, whatever the number of tensors.

    Args:
        requests: tuples (mesh, shape, dtype, src, dst) or (mesh, shape, dtype, src, dst, target_mesh), each as for
            `plan`; meshes and dtypes may differ.
        rank: only this rank's part (a rank, not a position: meshes may differ), None: of all ranks.
        topology: as for `plan`; a round's latency is shared by all tensors.
        max_bytes: what a rank may hold of all tensors together at any time.

    Raises:
        ArgumentError: as for `plan`, with the number of the request in front; a batch that holds more than `max_bytes`.
        UnsupportedError: as for `plan`.
    """
    found = []
    for number, given in enumerate(requests):
        if not isinstance(given, Request) and not (isinstance(given, tuple | list) and 5 <= len(given) <= 6):
            raise ArgumentError(
                f"requests[{number}]: {given!r}; allowed: mesh, shape, dtype, src, dst and perhaps target_mesh"
            )
        request = given if isinstance(given, Request) else Request(*given)
        meshes = {"mesh": _planners(request.mesh), "target_mesh": _planners(request.target_mesh)}
        found.append(replace(request, dtype=dtype_name(request.dtype), **meshes))
    return plan_batch_on_meshes(found, rank=rank, topology=topology, max_bytes=max_bytes)
