"""`plan` for people who hold torch objects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..planner import Layout, Mesh, Program, Topology
from ..planner import plan as plan_on_mesh
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
    mesh = mesh_of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    other = mesh_of(target_mesh) if isinstance(target_mesh, DeviceMesh) else target_mesh
    return plan_on_mesh(
        mesh, shape, dtype_name(dtype), src, dst, target_mesh=other, rank=rank, topology=topology, max_bytes=max_bytes
    )
