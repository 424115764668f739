"""FSDP2's own collectives, written down: they never call `redistribute`, and are redistributions all the same.

One of each flat buffer, as FSDP2 issues them: `S0 -> R` of what a module's parameters are gathered in, `P -> S0` (or
`Pavg -> S0`, which averages) of its gradients, and `P S0 -> R S0` of these where replicas are summed as well.
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
import torch.distributed.fsdp._fully_shard._fsdp_param_group as seam

from ...planner import Mesh
from ..convert_specs import dtype_name, mesh_of
from .recording import Recording, active, in_backward
from .trace import Entry

_SUMS = {"AVG": "Pavg"}  # any other op is a sum, which FSDP2 may multiply
_stock = {name: getattr(seam, name) for name in ("foreach_all_gather", "foreach_reduce")}


class _Noted:
    """A gather or a reduce-scatter of FSDP2's, that remembers what it was given.

    Attributes:
        sizes: elements of the buffers that were allocated, in turn.
        sums: what is reduced, as a placement.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.sizes: list[int] = []
        self.dtype = torch.float32
        self.sums = "P"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = self._comm.allocate(size, dtype=dtype, device=device)
        self.sizes.append(found.numel())
        self.dtype = dtype
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        op = options.get("op", args[3] if len(args) > 3 else None)
        self.sums = _SUMS.get(getattr(getattr(op, "op", op), "name", ""), "P")
        return self._comm(*args, **options)


def note_fsdp(notes: bool) -> None:
    """From now on FSDP2's collectives are noted in the active recording, or no more."""
    for name, stock in _stock.items():
        setattr(seam, name, _noting(stock) if notes else stock)


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """One of FSDP2's functions, that writes down what it communicates."""
    signature = inspect.signature(stock)
    argument, note = {
        "foreach_all_gather": ("all_gather_comm", _note_gather),
        "foreach_reduce": ("reduce_scatter_comm", _note_reduce),
    }[stock.__name__]

    @wraps(stock)
    def function(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        noted = given.arguments[argument] = _Noted(given.arguments[argument])
        result = stock(*given.args, **given.kwargs)
        if (recording := active()) is not None and noted.sizes:
            note(recording, noted, given.arguments)
        return result

    return function


def _note_gather(recording: Recording, noted: _Noted, given: dict[str, Any]) -> None:
    parameters = given["fsdp_params"]
    where = f"FSDP gathers {_names(parameters)}" + (", backward" if in_backward() else "")
    _note(recording, noted, parameters, [given["group"]], ("S0", "R"), where)


def _note_reduce(recording: Recording, noted: _Noted, given: dict[str, Any]) -> None:
    parameters, names = given["fsdp_params"], _names(given["fsdp_params"])
    shards, replicas = given["reduce_scatter_group"], given["all_reduce_group"]
    sharded = [shards] if shards is not None and shards.size() > 1 else []
    if sharded:
        _note(recording, noted, parameters, sharded, (noted.sums, "S0"), f"FSDP reduces {names}")
    if replicas is not None and replicas.size() > 1 and given["all_reduce_grads"]:
        layouts = (f"{noted.sums} S0", "R S0") if sharded else (noted.sums, "R")
        _note(recording, noted, parameters, [replicas, *sharded], layouts, f"FSDP sums replicas of {names}")


def _note(
    recording: Recording,
    noted: _Noted,
    parameters: Sequence[Any],
    groups: Sequence[dist.ProcessGroup],
    layouts: tuple[str, str],
    where: str,
) -> None:
    mesh = _mesh(parameters[0].mesh_info.mesh, groups)
    recording.note_entry(Entry(mesh, None, (noted.sizes[0],), dtype_name(noted.dtype), *layouts, where, fsdp=True))


def _mesh(mesh: Any, groups: Sequence[dist.ProcessGroup]) -> Mesh:
    """A mesh dim for each group, of one rank's groups that are mesh dims of `mesh`."""
    names = [group.group_name for group in groups]
    dims = [m for name in names for m in range(mesh.ndim) if mesh.get_group(m).group_name == name]
    if len(dims) == len(groups):
        whole = mesh_of(mesh)
        return whole.submesh(whole.positions_of(np.array([dist.get_rank()]))[0], dims)
    assert len(groups) == 1, "FSDP2 sums replicas of shards on a mesh that has both"
    return Mesh((groups[0].size(),), None, dist.get_process_group_ranks(groups[0]))


def _names(parameters: Sequence[Any]) -> str:
    """What a flat buffer is made of: the module, or the first parameter, each layer's number as *."""
    names = [re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", p._param_fqn or "a parameter") for p in parameters]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix([name.split(".") for name in names])  # type: ignore[type-var]
    if common:
        return f"{'.'.join(common)} ({len(names)} parameters)"
    return f"{names[0]} and {len(names) - 1} more"
