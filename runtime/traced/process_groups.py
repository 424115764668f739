"""The process groups of the collectives in a graph. None is made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from ...planner import Exchange
from .lowering import Group

NO_GROUP = "no process group of these mesh dims"


def groups_of_mesh(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of a mesh that this rank is in: of its dims, and of flattened dims of its root mesh, which
    torch makes for all ranks."""
    groups = [mesh.get_group(m) for m in range(mesh.ndim)]
    root = mesh._get_root_mesh()
    return groups + [flat.get_group() for flat in root._flatten_mapping.values() if flat.ndim == 1]


def group_finder(
    candidates: Sequence[dist.ProcessGroup], everyone: Sequence[int]
) -> Callable[[Exchange, tuple[int, ...]], Group]:
    """A function that finds the process group of a step and of the ranks that exchange in it.

    It has exactly these ranks, or all ranks of the program, of which the others then send and receive nothing. Either
    all ranks of the program find a group of the first kind or none does, if the candidates are such groups.

    Args:
        candidates: groups that exist for all ranks of a mesh dim, or of several that were flattened.
        everyone: the ranks of the program.
    """

    def find(step: Exchange, ranks: tuple[int, ...]) -> Group:
        """
        Raises:
            UnsupportedError: there is no such group.
        """
        if step.group is not None:
            for group in candidates:
                if sorted(dist.get_process_group_ranks(group)) == sorted(ranks):
                    return _as_group(group)
        # torch's table has an entry for the groups that this rank is not in.
        mine = [g for g in dist.distributed_c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
        for group in mine:
            if sorted(dist.get_process_group_ranks(group)) == sorted(everyone):
                return _as_group(group)
        dims = "between two meshes" if step.group is None else f"along mesh dims {step.group}"
        raise UnsupportedError(
            f"{NO_GROUP}: {dims}, and none of all ranks of the mesh; allowed: a flattened mesh, or after prepare(mesh)"
        )

    return find


def _as_group(group: dist.ProcessGroup) -> Group:
    return Group(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
