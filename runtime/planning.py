"""`plan` for people who hold torch objects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..planner import Layout, Mesh, Program
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
    rank: int | None = None,
) -> Program:
    """The program that takes a tensor of the global `shape` from layout `src` to layout `dst`.

    Args:
        mesh: a shape, a `Mesh` or a `DeviceMesh`.
        dtype: a torch dtype or its name.
        src, dst: layouts, or their text form such as "S0 S1" (`Layout.parse`).
        rank: a row-major position in the mesh: only its own program. None: the program of all ranks.

    Raises:
        ArgumentError: something does not fit; the text names the argument, its value and what is allowed.
        UnsupportedError: a reduction that has no meaning for the dtype, or a target that is refused.
    """
    return plan_on_mesh(
        mesh_of(mesh) if isinstance(mesh, DeviceMesh) else mesh, shape, dtype_name(dtype), src, dst, rank=rank
    )
