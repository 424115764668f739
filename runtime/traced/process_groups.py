"""The process groups of the collectives in a graph. Tracing makes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from .lowering import Group


def groups_of_mesh(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of a mesh that this rank is in: of its dims, and of flattened dims of its root mesh, which
    torch makes for all ranks. None where the mesh was made without process groups."""
    try:
        # Of a mesh in a function that torch.compile traces, torch allows only some methods.
        groups = [mesh.get_group(m) for m in range(mesh.ndim)]
    except RuntimeError:
        return []
    root = mesh._get_root_mesh()
    return groups + [flat.get_group() for flat in root._flatten_mapping.values() if flat.ndim == 1]


def group_finder(
    candidates: Sequence[dist.ProcessGroup], everyone: Sequence[int]
) -> Callable[[tuple[int, ...] | None], Group]:
    """A function that finds a process group of ranks along mesh dims, or of all ranks of the program (None).

    It has exactly these ranks, or all ranks of the program, of which the others then send and receive nothing. Either
    all ranks find a group of the first kind or none does, if the candidates are such groups.

    Args:
        candidates: groups that exist for all ranks of a mesh dim, or of several that were flattened.
        everyone: the ranks of the program.
    """

    def find(ranks: tuple[int, ...] | None) -> Group:
        """
        Raises:
            UnsupportedError: there is no such group.
        """
        for group in candidates if ranks is not None else ():
            if sorted(dist.get_process_group_ranks(group)) == sorted(ranks or ()):
                return _as_group(group)
        whole = _group_of(everyone)
        if whole is not None:
            return _as_group(whole)
        wanted = f"ranks {list(ranks)}, or of all" if ranks is not None else "all"
        raise UnsupportedError(
            f"no process group of {wanted} ranks of the mesh; allowed: a flattened mesh, or after prepare(mesh)"
        )

    return find


def make_group(ranks: Sequence[int]) -> None:
    """Make a process group of these ranks, all of which call this, if there is none."""
    if _group_of(ranks) is None:
        dist.new_group(ranks=sorted(ranks), use_local_synchronization=True)


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The first process group of exactly these ranks."""
    # torch's table also has an entry for the groups that this rank is not in.
    mine = [g for g in dist.distributed_c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
    return next((g for g in mine if sorted(dist.get_process_group_ranks(g)) == sorted(ranks)), None)


def _as_group(group: dist.ProcessGroup) -> Group:
    return Group(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
