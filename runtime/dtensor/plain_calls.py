"""Calls on plain tensors: a local tensor and two layouts on a planner's mesh in, the local tensor of the target out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from ...planner import Layout, Mesh, plan, title
from ..convert_specs import dtype_name
from ..executor.bind import BoundProgram
from ..executor.call import Call, check_backend, transport_for
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from .redistribute_options import RedistributeOptions

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
    key = mesh, tuple(shape), x.shape, x.stride(), x.dtype, x.device, source, target, tuple(map(id, groups)), options
    call = _calls.get(key)
    if call is None:
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
    program = plan(mesh, shape, dtype_name(x.dtype), source, target, rank=position, topology=options.topology)
    if program.is_identity:
        return Call(None, None, ())
    transport, _ = transport_for(tuple(sorted(ranks)), x.device, options.transport, groups=groups)
    participants = program.participants(position)
    exchanges = len(participants) > 1
    with transport.rendezvous.making_ready(participants, partial(title, program)) if exchanges else nullcontext():
        bound = BoundProgram(program, position, x.stride(), transport, x.dtype, x.device, options.reduction)
    return Call(bound, transport, participants)
