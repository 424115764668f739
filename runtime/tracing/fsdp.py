"""Records FSDP2's own collectives, which never call `redistribute`.

Each is recorded as a redistribution of the flat buffer that FSDP2 communicates: `S0 -> R` for the all-gather of a
module's parameters, `P -> S0` (or `Pavg -> S0`, an average) for the reduce-scatter of its gradients, and `P S0 -> R S0`
for the all-reduce of hybrid sharding.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

from ...planner import Mesh
from ..convert_specs import dtype_name, mesh_of
from .recording import Recording, active, in_backward
from .trace_file import Entry

_PLACEMENTS = {"AVG": "Pavg"}  # every other op is a sum, which FSDP2 may multiply by a factor
_originals = {name: getattr(param_group, name) for name in ("foreach_all_gather", "foreach_reduce")}


class _RecordedComm:
    """Wraps an all-gather or reduce-scatter of FSDP2 and remembers its arguments.

    Attributes:
        sizes: the number of elements of each allocated buffer, in order.
        dtype: the dtype of the last one.
        partial: the placement of the values that are reduced.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.sizes: list[int] = []
        self.dtype = torch.float32
        self.partial = "P"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = self._comm.allocate(size, dtype=dtype, device=device)
        self.sizes.append(buffer.numel())
        self.dtype = dtype
        return buffer

    def __call__(self, *args: Any, **options: Any) -> Any:
        op = options.get("op", args[3] if len(args) > 3 else None)
        self.partial = _PLACEMENTS.get(getattr(getattr(op, "op", op), "name", ""), "P")
        return self._comm(*args, **options)


def record_fsdp(enabled: bool) -> None:
    """Start or stop recording FSDP2's collectives in the active recording."""
    for name, original in _originals.items():
        setattr(param_group, name, _recorded(original) if enabled else original)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of FSDP2's functions so that it records its collective."""
    signature = inspect.signature(original)
    argument, note = {
        "foreach_all_gather": ("all_gather_comm", _note_all_gather),
        "foreach_reduce": ("reduce_scatter_comm", _note_reduce),
    }[original.__name__]

    @wraps(original)
    def function(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        comm = bound.arguments[argument] = _RecordedComm(bound.arguments[argument])
        result = original(*bound.args, **bound.kwargs)
        if (recording := active()) is not None and comm.sizes:
            note(recording, comm, bound.arguments)
        return result

    return function


def _note_all_gather(recording: Recording, comm: _RecordedComm, arguments: dict[str, Any]) -> None:
    parameters = arguments["fsdp_params"]
    where = f"FSDP gathers {_names(parameters)}" + (", backward" if in_backward() else "")
    _note(recording, comm, parameters, [arguments["group"]], ("S0", "R"), where)


def _note_reduce(recording: Recording, comm: _RecordedComm, arguments: dict[str, Any]) -> None:
    parameters, names = arguments["fsdp_params"], _names(arguments["fsdp_params"])
    shards, replicas = arguments["reduce_scatter_group"], arguments["all_reduce_group"]
    sharded = [shards] if shards is not None and shards.size() > 1 else []
    if sharded:
        _note(recording, comm, parameters, sharded, (comm.partial, "S0"), f"FSDP reduces {names}")
    if replicas is not None and replicas.size() > 1 and arguments["all_reduce_grads"]:
        layouts = (f"{comm.partial} S0", "R S0") if sharded else (comm.partial, "R")
        _note(recording, comm, parameters, [replicas, *sharded], layouts, f"FSDP sums replicas of {names}")


def _note(
    recording: Recording,
    comm: _RecordedComm,
    parameters: Sequence[Any],
    groups: Sequence[dist.ProcessGroup],
    layouts: tuple[str, str],
    where: str,
) -> None:
    mesh = _mesh(parameters[0].mesh_info.mesh, groups)
    recording.note_entry(Entry(mesh, None, (comm.sizes[0],), dtype_name(comm.dtype), *layouts, where, fsdp=True))


def _mesh(mesh: Any, groups: Sequence[dist.ProcessGroup]) -> Mesh:
    """The submesh of `mesh` with one mesh dim per group, each of which is this rank's group along a mesh dim."""
    names = [group.group_name for group in groups]
    dims = [m for name in names for m in range(mesh.ndim) if mesh.get_group(m).group_name == name]
    if len(dims) == len(groups):
        whole = mesh_of(mesh)
        return whole.submesh(whole.positions_of(np.array([dist.get_rank()]))[0], dims)
    assert len(groups) == 1, "hybrid sharding uses a mesh with both groups as mesh dims"
    return Mesh((groups[0].size(),), None, dist.get_process_group_ranks(groups[0]))


def _names(parameters: Sequence[Any]) -> str:
    """The contents of a flat buffer: the module or the first parameter, with layer numbers replaced by *."""
    names = [re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", p._param_fqn or "a parameter") for p in parameters]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix([name.split(".") for name in names])  # type: ignore[type-var]
    if common:
        return f"{'.'.join(common)} ({len(names)} parameters)"
    return f"{names[0]} and {len(names) - 1} more"
