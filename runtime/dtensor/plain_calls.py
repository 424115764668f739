"""Calls on plain tensors: a local tensor and two layouts on a planner's mesh in, the local tensor of the target out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import on_device
from ...planner import Layout, Mesh, plan, resolve_layout, title
from ..convert_specs import dtype_name
from ..executor.bind import BoundProgram
from ..executor.call import Call, binding, check_backend, found_topology_of, naming, transport_for
from ..executor.choose_algorithm import leaves_sums_to_backend
from ..executor.dispatch_modes import active_modes, as_one_operator, is_traced, traces_into_graph
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..traced.redistribution import redistribute_traced
from . import observer
from .local import topology_when_traced
from .redistribute_options import RedistributeOptions

_c10d: Any = torch.ops._c10d_functional
_calls: ProcessGroupCache[tuple, Call] = ProcessGroupCache(2048)
_meshes: ProcessGroupCache[dist.ProcessGroup, Mesh] = ProcessGroupCache(256)


def mesh_of_group(group: dist.ProcessGroup) -> Mesh:
    """The 1-D mesh of the ranks of a process group, in the order of the group."""
    forget_dead_groups()
    mesh = _meshes.get(group)
    if mesh is None:
        ranks = dist.get_process_group_ranks(group)
        mesh = _meshes[group] = Mesh((len(ranks),), ranks=ranks)
    return mesh


def redistribute_plain(
    x: torch.Tensor,
    mesh: Mesh,
    shape: Sequence[int],
    source: Layout | str,
    target: Layout | str,
    options: RedistributeOptions,
    groups: Sequence[dist.ProcessGroup],
    async_op: bool = False,
) -> torch.Tensor:
    """Redistribute a plain tensor. Gradients are not recorded.

    Args:
        x: this rank's shard under `source`; any strides.
        async_op: as for `Call`; ignored under dispatch modes, which see a complete result.
        mesh, shape, source, target, options, groups: as for `plain_call`; one process group per mesh dim.

    Returns:
        This rank's shard under `target`, in memory of its own.

    Raises:
        UnsupportedError: as `plain_call`; of a traced tensor as `redistribute_traced`.
        TransportError: a peer died, timed out, or made a different request.
    """

    if (recorder := observer.current) is not None:
        recorder.note_layouts(x.dtype, mesh, shape, source, target)

    def run(x: torch.Tensor, async_op: bool = False) -> torch.Tensor:
        with torch.no_grad(), torch.inference_mode(False), on_device(x.device):
            out = plain_call(x, mesh, shape, source, target, options, groups)(x, async_op)
        return out.clone() if out is x else out

    modes = active_modes()
    if is_traced(x, modes):
        out = _trace(x.detach(), mesh, shape, source, target, options, groups, traces_into_graph(modes))
        return out.clone() if out is x else out
    x = x.detach().resolve_conj().resolve_neg()
    if not modes:
        return run(x, async_op)
    return as_one_operator(run, x, partial(_torchs_collectives, source, target, groups))


def _trace(
    x: torch.Tensor,
    mesh: Mesh,
    shape: Sequence[int],
    source: Layout | str,
    target: Layout | str,
    options: RedistributeOptions,
    groups: Sequence[dist.ProcessGroup],
    into_graph: bool | None,
) -> torch.Tensor:
    """`redistribute_plain` of a traced tensor, in torch's operators and functional collectives."""
    forget_dead_groups()
    layouts = resolve_layout("source", source, mesh), resolve_layout("target", target, mesh)
    return redistribute_traced(
        x,
        shape,
        mesh,
        *layouts,
        reduction=options.reduction,
        topology=options.topology,
        find_topology=lambda program: topology_when_traced(program, x.device, options.reduction, groups=groups),
        find_groups=lambda: groups,
        into_graph=into_graph,
    )


def _torchs_collectives(
    source: Layout | str, target: Layout | str, groups: Sequence[dist.ProcessGroup], x: torch.Tensor
) -> list[tuple[Any, ...]]:
    """The collectives that torch would issue, one mesh dim after the other, as operators and their arguments."""
    # The text of a layout has its placements, and after " @ " the shard orders.
    before_after = (str(layout).partition(" @ ")[0].split() for layout in (source, target))
    steps: list[tuple[Any, ...]] = []
    for before, after, group in zip(*before_after, groups, strict=True):
        size, name = group.size(), str(group.group_name)
        if before[0] == "P" and after[0] == "R":
            steps.append((_c10d.all_reduce.default, x, "sum", name))
        elif before[0] == "P" and after[0] == "S":
            steps.append((_c10d.reduce_scatter_tensor.default, x, "sum", size, name))
        elif before[0] == "S" and after[0] == "R":
            steps.append((_c10d.all_gather_into_tensor.default, x, size, name))
        elif before[0] == after[0] == "S" and before != after:
            steps.append((_c10d.all_to_all_single.default, x, None, None, name))
    return steps or [(torch.ops.aten.clone.default, x)]


def plain_call(
    x: torch.Tensor,
    mesh: Mesh,
    shape: Sequence[int],
    source: Layout | str,
    target: Layout | str,
    options: RedistributeOptions,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Call:
    """The call that redistributes tensors of the shape, strides, dtype and device of `x`; it is called below dispatch
    modes and outside of inference mode, since cached views and buffers outlive that.

    Args:
        x: this rank's shard under `source`.
        mesh: the ranks that make the call together, this one included.
        shape: the global shape.
        groups: process groups of these ranks, which the program may use.

    Raises:
        UnsupportedError: the process group cannot carry programs on the device, or a dtype that cannot be reduced.
    """
    forget_dead_groups()
    key = mesh, tuple(shape), x.shape, x.stride(), x.dtype, x.device, source, target, tuple(groups), options
    call = _calls.get(key)
    if call is None:
        text = f"{source} → {target}   {dtype_name(x.dtype)}{list(shape)}"
        with binding(), naming(mesh.rank_array.tolist(), lambda: text, groups=groups):
            call = _calls[key] = _bind(x, mesh, shape, source, target, options, groups)
    return call


def _bind(
    x: torch.Tensor,
    mesh: Mesh,
    shape: Sequence[int],
    source: Layout | str,
    target: Layout | str,
    options: RedistributeOptions,
    groups: Sequence[dist.ProcessGroup],
) -> Call:
    """Plan and bind a request. Communicates nothing."""
    ranks = mesh.rank_array.tolist()
    check_backend(x.device, len(ranks), options.transport)
    position = ranks.index(dist.get_rank())
    request = partial(plan, mesh, shape, dtype_name(x.dtype), source, target, rank=position)
    program = request(topology=options.topology)
    if options.topology is None and program.exchanges and not leaves_sums_to_backend(program, options.reduction):
        found = found_topology_of(ranks, x.device, groups=groups)
        program = program if found is None else request(topology=found)
    if program.is_identity:
        return Call(None, None, ())
    transport, _ = transport_for(tuple(sorted(ranks)), x.device, options.transport, groups=groups)
    participants = program.participants(position)
    exchanges = len(participants) > 1
    with transport.rendezvous.making_ready(participants, partial(title, program)) if exchanges else nullcontext():
        bound = BoundProgram(program, position, x.stride(), transport, x.dtype, x.device, options.reduction)
    return Call(bound, transport, participants)
