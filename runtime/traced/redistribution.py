"""Redistribution of traced tensors: of fake tensors, of tensors that torch.compile or `make_fx` traces."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import UnsupportedError
from ...planner import (
    Layout,
    Mesh,
    Program,
    Topology,
    check_local_shape,
    format_bytes,
    planner_of,
    position_of,
    title,
)
from ..convert_specs import dtype_name
from ..statistics import count_traced
from .cache_key import refresh_cache_key
from .lowering import Collective, collectives_of, lower
from .process_groups import group_finder
from .symbolic_sizes import Units, check_carried, units_of

TRACED_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
"""The types of traced local tensors; other subclasses are excluded."""


def redistribute_traced(
    x: torch.Tensor,
    shape: Sequence[Any],
    mesh: Mesh,
    source: Layout,
    target: Layout,
    *,
    target_mesh: Mesh | None = None,
    reduction: str,
    topology: Topology | None,
    find_topology: Callable[[Program], Topology | None],
    find_groups: Callable[[], Sequence[dist.ProcessGroup]],
    into_graph: bool | None,
) -> torch.Tensor:
    """Redistribute a plain traced tensor by torch's operators and functional collectives.

    Args:
        x: this rank's shard under `source`.
        shape: the global shape; sizes may be symbolic.
        topology: that programs are planned for; None: what `find_topology` returns, given the program for one machine.
        find_groups: returns process groups for the collectives (`group_finder`).
        into_graph: as for `count_traced`.

    Raises:
        UnsupportedError: there is no process group for an exchange, a size depends on data, torch makes one graph for
            all ranks, or as `plan`.
        ArgumentError: `x` does not have the shape of this rank's shard.
    """
    # Its import takes a second, and a tensor is traced only after it.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    refresh_cache_key()
    if _is_for_all_ranks():
        raise UnsupportedError("compile_on_one_rank: the graph is for all ranks, and a program is for one of them")
    target_mesh = target_mesh or mesh
    try:
        is_cross_mesh = not mesh.same_ranks(target_mesh)
        # The shard of a rank outside the source's mesh has no dims of the tensor.
        local_shape = shape if is_cross_mesh or x.ndim != len(shape) else x.shape
        units = units_of(shape, local_shape, mesh, source, target, is_cross_mesh)
        program = _program(x, units, mesh, source, target, target_mesh, topology, find_topology)
        return _run(program, x, units, reduction, find_groups, into_graph)
    except GuardOnDataDependentSymNode as error:
        raise UnsupportedError(f"a size that depends on data: {error}") from error


def _is_for_all_ranks() -> bool:
    """Whether all ranks run what one of them traces."""
    of_compiler = torch.compiler.config
    config = of_compiler if hasattr(of_compiler, "compile_on_one_rank") else getattr(dist, "config", None)  # torch 2.13
    return bool(getattr(config, "compile_on_one_rank", False))


def _program(
    x: torch.Tensor,
    units: Units,
    mesh: Mesh,
    source: Layout,
    target: Layout,
    target_mesh: Mesh,
    topology: Topology | None,
    find_topology: Callable[[Program], Topology | None],
) -> Program:
    planner = planner_of(
        mesh,
        len(units.shape),
        dtype_name(x.dtype),
        source,
        target,
        target_mesh=target_mesh,
        rank=position_of(dist.get_rank(), mesh, target_mesh),
        topology=topology,
    )
    program = planner.program(units.shape)
    if topology is None and program.exchanges:
        with _disable_current_modes():
            found = find_topology(program)
        if found is not None:
            program = planner.on(found).program(units.shape)
    return program


def _run(
    program: Program,
    x: torch.Tensor,
    units: Units,
    reduction: str,
    find_groups: Callable[[], Sequence[dist.ProcessGroup]],
    into_graph: bool | None,
) -> torch.Tensor:
    (position,) = program.ranks
    held = program.source_shape(position)
    in_units = [units.scale[d : d + 1] not in ((), (1,)) for d in range(x.ndim)]
    check_local_shape(program, position, [held[d] if in_units[d] else n for d, n in enumerate(x.shape)])
    if program.is_identity:
        return x
    check_carried(program, units.carried)
    find = group_finder(find_groups(), sorted(program.mesh.rank_array.tolist()))
    collectives = collectives_of(program, find, reduction)
    count_traced(_described(program, collectives, units), into_graph)
    return lower(program, collectives, units.scale, x.resolve_conj().resolve_neg())


def explain_traced(program: Program, reduction: str, groups: Sequence[dist.ProcessGroup]) -> str:
    """The collectives of this rank's program in a graph, or why torch's own are traced."""
    try:
        find = group_finder(groups, sorted(program.mesh.rank_array.tolist()))
        return _listed(collectives_of(program, find, reduction))
    except UnsupportedError as error:
        return f"left to torch: {error}"


def _described(program: Program, collectives: Sequence[Collective | None], units: Units) -> str:
    """A traced redistribution in one line: the request, its collectives and the bytes that this rank receives."""
    shape = [n * unit for n, unit in zip(units.shape, units.scale, strict=True)]
    received = program.bytes_received[0] * math.prod(units.scale)
    text = format_bytes(received) if isinstance(received, int) else f"{received} B"
    request = title(program).replace(str(list(program.shape)), str(shape))
    return f"{request}: {_listed(collectives)}, {text} received"


def _listed(collectives: Sequence[Collective | None]) -> str:
    kinds = Counter(f"{c.kind} of {len(c.group.ranks)} ranks" for c in collectives if c is not None)
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in kinds.items()) or "no collective"
