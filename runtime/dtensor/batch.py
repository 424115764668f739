"""`redistribute_batch`: many DTensors redistributed together, with one exchange per round."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, UnsupportedError, shown
from ...kernels import on_device
from ...planner import Layout, Request, Topology, TopologyName, check_local_shape, plan_batch
from ..convert_specs import dtype_name, layout_of_spec, mesh_of
from ..executor.batch import BoundBatch
from ..executor.call import (
    Call,
    binding,
    check_backend,
    check_data,
    check_ranks,
    found_topology_of,
    naming,
    refuse,
    refuse_unplanned,
    transport_for,
)
from ..executor.dispatch_modes import below_modes_with_memory, is_fake
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..transports.choose_transport import TransportName
from . import observer
from .autograd import as_dtensor
from .local import plain_local, ranks_of
from .redistribute import redistribute, target_spec
from .redistribute_options import RedistributeOptions, call_options

_calls: ProcessGroupCache[tuple, Call] = ProcessGroupCache(256)


def redistribute_batch(
    dtensors: Sequence[DTensor],
    placements: Sequence[Layout | str | Sequence[Placement]],
    *,
    device_mesh: DeviceMesh | None = None,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
) -> list[DTensor]:
    """Redistribute several DTensors together, for example in a refit or an optimizer step.

    In each round ranks meet once, or exchange one message per pair, whatever the number of tensors.

    Args:
        dtensors: of any shapes and dtypes, on any meshes; in the same order on all ranks.
        placements: for each target its placements or its layout, as for `redistribute`.
        device_mesh: the mesh of all targets. None: each keeps its mesh. Every rank of any of the meshes must call.
        transport, topology: as for `redistribute`.

    Returns:
        One DTensor per input, in memory of its own except where nothing has to be done. Gradients are not recorded.
        Dispatch modes do not see the batch. While torch traces, it is one redistribution for each DTensor.

    Raises:
        ArgumentError: lists of different lengths, placements that do not match, or a tensor that requires gradients
            while they are recorded (use `torch.no_grad()`).
        UnsupportedError: as for `redistribute`.
        TransportError: a peer died, timed out, or made a different request.
    """
    if torch.compiler.is_dynamo_compiling():
        return _one_by_one(dtensors, placements, device_mesh, transport, topology)
    try:
        targets = _target_specs(dtensors, placements, device_mesh)
        if not targets:
            return []
        if is_fake():
            return _one_by_one(dtensors, placements, device_mesh, transport, topology)
        # Cached views and buffers outlive inference mode.
        leave_inference_mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with below_modes_with_memory(), leave_inference_mode:
            return _run(dtensors, targets, call_options(transport, topology))
    except (ArgumentError, UnsupportedError) as error:
        sources = dtensors if isinstance(dtensors, Sequence) else ()
        meshes = [x.device_mesh for x in sources if isinstance(x, DTensor)]
        refuse_unplanned(error, [*meshes, *([device_mesh] if isinstance(device_mesh, DeviceMesh) else [])])
        raise


def _one_by_one(
    dtensors: Sequence[DTensor],
    placements: Sequence[Layout | str | Sequence[Placement]],
    device_mesh: DeviceMesh | None,
    transport: TransportName | None,
    topology: Topology | TopologyName | None,
) -> list[DTensor]:
    """The results of a batch as one redistribution each, for graphs, in which torch may combine collectives."""
    options: dict[str, Any] = {"device_mesh": device_mesh, "transport": transport, "topology": topology}
    return [redistribute(x, p, **options) for x, p in zip(dtensors, placements, strict=True)]


def _target_specs(
    dtensors: Sequence[DTensor],
    placements: Sequence[Layout | str | Sequence[Placement]],
    device_mesh: DeviceMesh | None,
) -> list[DTensorSpec]:
    for name, argument, elements in (
        ("dtensors", dtensors, "DTensors"),
        ("placements", placements, "the placements or the layout of each DTensor"),
    ):
        if not isinstance(argument, Sequence) or isinstance(argument, str):
            raise ArgumentError(f"{name}: {shown(argument)}; allowed: a list of {elements}")
    if len(dtensors) != len(placements):
        raise ArgumentError(f"placements: {len(placements)} given for {len(dtensors)} DTensors; allowed: one each")
    for i, x in enumerate(dtensors):
        if not isinstance(x, DTensor):
            raise ArgumentError(f"dtensors[{i}]: {type(x).__name__}; allowed: a DTensor")
        if x.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"dtensors[{i}]: it requires gradients; allowed: under torch.no_grad()")
    return [target_spec(x, p, device_mesh, None) for x, p in zip(dtensors, placements, strict=True)]


def _run(dtensors: Sequence[DTensor], targets: list[DTensorSpec], options: RedistributeOptions) -> list[DTensor]:
    forget_dead_groups()
    if (recorder := observer.current) is not None:
        for x, target in zip(dtensors, targets, strict=True):
            recorder.note(x.dtype, x._spec, target)
    locals_ = [plain_local(x._local_tensor, x._spec).resolve_conj().resolve_neg() for x in dtensors]
    specs = [(x._spec, target) for x, target in zip(dtensors, targets, strict=True)]
    tensors = [(x.shape, x.stride(), x.dtype, x.device) for x in locals_]
    # With the ids of the meshes: meshes of the same ranks are equal, but may have different process groups.
    meshes = [(id(source.mesh), id(target.mesh)) for source, target in specs]
    key = (tuple(specs), tuple(meshes), tuple(tensors), options)
    with on_device(locals_[0].device):
        call = _calls.get(key)
        if call is None:
            with binding():
                call = _calls[key] = _bind(specs, locals_, options)
        outs = call(locals_)
    return [as_dtensor(x, target) for x, target in zip(outs, targets, strict=True)]


def _bind(
    specs: Sequence[tuple[DTensorSpec, DTensorSpec]], locals_: Sequence[torch.Tensor], options: RedistributeOptions
) -> Call:
    """Plan and bind a batch. Communicates nothing, apart from what finding a topology does."""
    every = [spec for pair in specs for spec in pair]
    meshes = [spec.mesh for spec in every]
    with naming(ranks_of(*every), lambda: "; ".join(f"{source} to {target}" for source, target in specs), *meshes):
        return _bound(specs, locals_, options)


def _bound(
    specs: Sequence[tuple[DTensorSpec, DTensorSpec]], locals_: Sequence[torch.Tensor], options: RedistributeOptions
) -> Call:
    device = locals_[0].device
    for i, x in enumerate(locals_):
        if x.device == device:  # peers are told below of one that is elsewhere
            check_data(f"dtensors[{i}]", x)
    check_backend(device, max(max(a.mesh.size(), b.mesh.size()) for a, b in specs), options.transport)
    rank = dist.get_rank()
    requests: list[Any] = []
    for (source, target), x in zip(specs, locals_, strict=True):
        assert source.tensor_meta is not None
        layouts = layout_of_spec(source), layout_of_spec(target)
        shape = tuple(source.tensor_meta.shape)
        requests.append(Request(mesh_of(source.mesh), shape, dtype_name(x.dtype), *layouts, mesh_of(target.mesh)))
    batch = plan_batch(requests, rank=rank, topology=options.topology)
    for program in batch.programs:
        check_ranks(program.mesh)
    participants = batch.participants(rank)
    if rank not in participants:
        return Call(None, None, ())  # this rank is in none of the meshes
    meshes = [spec.mesh for pair in specs for spec in pair]
    if options.topology is None and batch.exchanges:
        found = found_topology_of(batch.everyone, device, *meshes)
        if found is not None:
            batch = plan_batch(requests, rank=rank, topology=found)
    transport, _ = transport_for(participants, device, options.transport, *meshes)
    try:
        for i, (program, x) in enumerate(zip(batch.programs, locals_, strict=True)):
            if x.device != device:
                raise ArgumentError(f"dtensors[{i}]: device {x.device}; allowed: that of the others, {device}")
            position = batch.position(i, rank)
            if position is not None:
                check_local_shape(program, position, x.shape, f"dtensors[{i}]")
    except ArgumentError as error:
        refuse(transport, participants, batch.first_group(rank), error, batch.all_meet(rank))
        raise
    with transport.rendezvous.making_ready(participants, batch.explain):
        bound = BoundBatch(batch, rank, [x.stride() for x in locals_], transport, [x.dtype for x in locals_], device)
    return Call(bound, transport, participants)
