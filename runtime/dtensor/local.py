"""Redistribution of local tensors: a local tensor and two specs in, the local tensor of the target out.

The first call of a request plans a program and binds it to a transport; later calls look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ...errors import ArgumentError, UnsupportedError
from ...kernels import on_device
from ...planner import Planner, Program, Topology, check_local_shape, check_shape, planner_of, position_of, title
from ..convert_specs import dtype_name, layout_of_spec, mesh_of
from ..executor.bind import BoundProgram
from ..executor.call import (
    Call,
    binding,
    check_backend,
    check_data,
    check_ranks,
    found_topology_of,
    naming,
    refuse,
    transport_for,
)
from ..executor.choose_algorithm import Reduction, explain_on, leaves_sums_to_backend
from ..executor.copies import contiguous_strides
from ..executor.dispatch_modes import (
    active_modes,
    as_one_operator,
    is_traced,
    refuse_fake_mode,
    torchs_collectives,
    traces_into_graph,
)
from ..executor.local_slice import BoundSlice
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..traced.process_groups import groups_of_mesh
from ..traced.redistribution import TRACED_TYPES, explain_traced, redistribute_traced
from ..transports.select import AnyTransport, why_not_backend
from .partials import PlainRequest, has_transforms, plain_requests
from .redistribute_options import RedistributeOptions

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types of local tensors that programs move; subclasses are excluded."""
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
Bound = Callable[[torch.Tensor, bool], torch.Tensor]
"""A request ready to be called, with the local tensor and `async_op`."""


class _ShapelessPlanner(NamedTuple):
    """The part of a request that does not depend on the tensor's shape."""

    planner: Planner
    meshes: tuple[DeviceMesh, DeviceMesh]  # kept alive: the cache key holds their ids


_bound: ProcessGroupCache[tuple, Bound] = ProcessGroupCache(2048)
_planners: ProcessGroupCache[tuple, _ShapelessPlanner] = ProcessGroupCache(2048)


def run_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, async_op: bool = False
) -> torch.Tensor:
    """Redistribute a plain local tensor from one spec to another, on the same mesh or on another.

    Args:
        async_op: the last exchange may be waited for when the result is first used. Ignored under dispatch modes, which
            see the redistribution as one operator.

    Raises:
        ArgumentError: the local tensor does not match its spec, or a layout does not match the tensor.
        UnsupportedError: placements or a dtype that programs do not support.
        TransportError: a peer died, timed out, or made a different request.
    """
    if type(x) not in PLAIN_TENSORS or torch.is_inference_mode_enabled() or count_dispatch_modes():
        return _run_in_modes(x, current, target, options, async_op)
    if x.is_conj() or x.is_neg():
        # Programs move bytes, which do not include these bits.
        x = x.resolve_conj().resolve_neg()
    if x.device.type == "cpu":  # a context costs three calls
        return _lookup(x, current, target, options)(x, async_op)
    with on_device(x.device):
        return _lookup(x, current, target, options)(x, async_op)


def _run_in_modes(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, async_op: bool
) -> torch.Tensor:
    """`run_redistribution` in inference mode, of traced tensors, or under dispatch modes, which see the transforms of
    partials, and each plain redistribution as one operator."""
    modes = active_modes()
    if is_traced(x, modes):
        return trace_redistribution(x, current, target, options, traces_into_graph(modes))
    if has_transforms(current, target):
        return _run_in_turn(_supported_requests(current, target), options, x, async_op)
    if torch.is_inference_mode_enabled():
        # Cached views and buffers outlive the mode, and inference tensors could never be used outside of it.
        with torch.inference_mode(False):
            return run_redistribution(x, current, target, options, async_op)
    # The result of an operator that a mode saves or counts is complete, so `async_op` has no effect.
    collectives = partial(torchs_collectives, current, target)
    return as_one_operator(lambda y: run_redistribution(y, current, target, options), x, collectives)


def _supported_requests(current: DTensorSpec, target: DTensorSpec) -> list[PlainRequest]:
    """`plain_requests`, of supported placements.

    Raises:
        UnsupportedError: placements that programs do not support: before a mask is applied and released.
    """
    requests = plain_requests(current, target)
    for request in requests:
        for spec in (request.current, request.target):
            layout_of_spec(spec)
    return requests


def trace_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, into_graph: bool | None
) -> torch.Tensor:
    """`run_redistribution` of a traced or fake tensor, in torch's operators and functional collectives.

    Args:
        into_graph: as for `count_traced`.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute_traced`.
    """
    mode = detect_fake_mode() if type(x) in PLAIN_TENSORS else None
    if mode is not None and not (mode.allow_non_fake_inputs or torch._is_functional_tensor(x)):
        raise UnsupportedError("local tensor: a tensor with memory, while a fake tensor mode is active; allowed: fake")
    for request in _supported_requests(current, target):
        x = request.before(x) if request.before else x
        x = _trace_plain(x, request.current, request.target, options, into_graph)
        x = request.after(x) if request.after else x
    return x


def _trace_plain(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, into_graph: bool | None
) -> torch.Tensor:
    if current.tensor_meta is None:
        raise UnsupportedError("the source spec has no tensor_meta, so the global shape is not known")
    meshes = current.mesh, target.mesh
    forget_dead_groups()
    out = redistribute_traced(
        x,
        current.tensor_meta.shape,
        mesh_of(current.mesh),
        layout_of_spec(current),
        layout_of_spec(target),
        target_mesh=mesh_of(target.mesh),
        reduction=options.reduction,
        topology=options.topology,
        find_topology=lambda program: topology_when_traced(program, x.device, options.reduction, *meshes),
        find_groups=lambda: [group for mesh in meshes if is_in(mesh) for group in groups_of_mesh(mesh)],
        into_graph=into_graph,
    )
    return out if out is x else _in_order(out, target.tensor_meta)


def topology_when_traced(
    program: Program,
    device: torch.device,
    reduction: Reduction,
    *meshes: DeviceMesh,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Topology | None:
    """The topology for which a program is planned when it is not traced, so that both are the same."""
    if why_not_backend(device) is not None or leaves_sums_to_backend(program, reduction):
        return None
    return found_topology_of(program.mesh.rank_array.tolist(), device, *meshes, groups=groups)


def _in_order(x: torch.Tensor, meta: TensorMeta | None) -> torch.Tensor:
    """A contiguous tensor with its dims in the order in memory that the strides of a spec give."""
    if meta is None or any(not isinstance(n, int) for n in meta.stride):
        return x
    order = sorted(range(x.ndim), key=lambda d: -meta.stride[d])
    if order == list(range(x.ndim)) or not _is_dense(meta, order):
        return x
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def _is_dense(meta: TensorMeta, order: Sequence[int]) -> bool:
    """Whether strides are those of a contiguous tensor whose dims are in this order in memory."""
    return [meta.stride[d] for d in order] == list(contiguous_strides([meta.shape[d] for d in order]))


def _lookup(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> Bound:
    """The request bound to a transport, from the cache if it was bound before."""
    bound = bound_before(x, current, target, options)
    if bound is None:
        with binding(), _naming(current, target):
            bound = _bound[_key(x, current, target, options)] = _bind(x, current, target, options)
    return bound


def _naming(current: DTensorSpec, target: DTensorSpec) -> AbstractContextManager[None]:
    """A context in which errors of waits for peers name this request."""
    return naming(ranks_of(current, target), lambda: f"{current} to {target}", current.mesh, target.mesh)


def ranks_of(*specs: DTensorSpec) -> set[int]:
    """The ranks of the meshes of some specs."""
    return {rank for spec in specs for rank in mesh_of(spec.mesh).rank_array.tolist()}


def bound_before(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> Bound | None:
    """The request bound to a transport, if it was bound before."""
    forget_dead_groups()
    return _bound.get(_key(x, current, target, options))


def _key(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> tuple:
    # With the ids of the meshes: meshes of the same ranks are equal, but may have different process groups.
    return current, target, id(current.mesh), id(target.mesh), x.shape, x.stride(), x.dtype, x.device, options


def _bind(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> Bound:
    """Plan and bind a request. Communicates nothing, apart from reading what each rank posted when its transport
    started, or when it looked for the topology."""
    cached = _planners.get(_planner_key(x, current, target, options))
    if cached is None:
        if has_transforms(current, target):
            return partial(_run_in_turn, _supported_requests(current, target), options)
        cached = _plan(x, current, target, options)
    planner, shape = cached.planner, _global_shape(current)
    if planner.local_slice is not None:
        transport, _ = transport_for((dist.get_rank(),), x.device, options.transport, current.mesh, target.mesh)
        with _peers_need_not_know():
            return Call(BoundSlice(planner, planner.local_slice, shape, x, transport), transport, ())
    program = _program_on(cached, shape, x.device, options)
    (position,) = program.ranks
    if program.is_identity:
        with _peers_need_not_know():
            check_local_shape(program, position, x.shape)
        return Call(None, None, ())
    transport, _ = _transport(program, x, options, current.mesh, target.mesh)
    try:
        check_local_shape(program, position, x.shape)
    except ArgumentError as error:
        _refuse(transport, program, position, error)
        raise
    participants = program.participants(position)
    # Local-only programs need no peers.
    exchanges = len(participants) > 1
    with transport.rendezvous.making_ready(participants, partial(title, program)) if exchanges else nullcontext():
        bound = BoundProgram(program, position, x.stride(), transport, x.dtype, x.device, options.reduction)
    return Call(bound, transport, participants)


def _plan(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> _ShapelessPlanner:
    ndim = len(_global_shape(current))
    check_data("dtensor", x)
    check_backend(x.device, max(current.mesh.size(), target.mesh.size()), options.transport)
    mesh, target_mesh = mesh_of(current.mesh), mesh_of(target.mesh)
    planner = planner_of(
        mesh,
        ndim,
        dtype_name(x.dtype),
        layout_of_spec(current),
        layout_of_spec(target),
        target_mesh=target_mesh,
        rank=position_of(dist.get_rank(), mesh, target_mesh),
        topology=options.topology,
    )
    check_ranks(mesh)
    check_ranks(target_mesh)
    entry = _ShapelessPlanner(planner, (current.mesh, target.mesh))
    _planners[_planner_key(x, current, target, options)] = entry
    return entry


def _planner_key(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> tuple:
    source = current.placements, current.shard_order, current.use_strided_shard_as_shard_order, id(current.mesh)
    wanted = target.placements, target.shard_order, target.use_strided_shard_as_shard_order, id(target.mesh)
    ndim = None if current.tensor_meta is None else len(current.tensor_meta.shape)
    return source, wanted, ndim, x.dtype, x.device, options


def _program(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> Program:
    """This rank's program. Communicates nothing, apart from what finding a topology does."""
    entry = _planners.get(_planner_key(x, current, target, options)) or _plan(x, current, target, options)
    return _program_on(entry, _global_shape(current), x.device, options)


def _program_on(
    entry: _ShapelessPlanner, shape: tuple[int, ...], device: torch.device, options: RedistributeOptions
) -> Program:
    """The program for a shape: where ranks exchange and no topology is given, that for the topology that is found, for
    which ranks of several nodes may wait for each other the first time."""
    planner = entry.planner
    program = planner.program(shape)
    if options.topology is None and program.exchanges and not leaves_sums_to_backend(program, options.reduction):
        found = found_topology_of(program.mesh.rank_array.tolist(), device, *entry.meshes)
        if found is not None:
            return planner.on(found).program(shape)
    return program


def _global_shape(spec: DTensorSpec) -> tuple[int, ...]:
    if spec.tensor_meta is None:
        raise UnsupportedError("the source spec has no tensor_meta, so the global shape is not known")
    return check_shape(spec.tensor_meta.shape)


def _transport(
    program: Program, x: torch.Tensor, options: RedistributeOptions, *meshes: DeviceMesh
) -> tuple[AnyTransport, str]:
    # Local-only programs need no peers.
    participants = tuple(sorted(program.mesh.rank_array.tolist())) if program.exchanges else (dist.get_rank(),)
    return transport_for(participants, x.device, options.transport, *meshes)


@contextmanager
def _peers_need_not_know() -> Iterator[None]:
    """Peers do not wait for a local-only request, so an argument that is refused here is not reported to them."""
    try:
        yield
    except ArgumentError as error:
        error.peers_know = True
        raise


def _run_in_turn(
    requests: list[PlainRequest], options: RedistributeOptions, x: torch.Tensor, async_op: bool
) -> torch.Tensor:
    for i, (current, target, before, after) in enumerate(requests):
        x = before(x) if before else x
        is_last = i + 1 == len(requests)
        x = run_redistribution(x, current, target, options, async_op and is_last and after is None)
        x = after(x) if after else x
    return x


def explain_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> str:
    """Describe what `run_redistribution` does with the same arguments."""
    return "\n".join(_explained(x, *request[:2], options) for request in plain_requests(current, target))


def _explained(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions) -> str:
    with binding(), _naming(current, target):
        program = _program(x, current, target, options)
        if program.is_identity:
            return program.explain()
        transport, why = _transport(program, x, options, current.mesh, target.mesh)
    text = f"{explain_on(program, transport, options.reduction)}\n  on transport {transport.name}: {why}"
    groups = [group for mesh in (current.mesh, target.mesh) if is_in(mesh) for group in groups_of_mesh(mesh)]
    text += f"\n  when torch traces: {explain_traced(program, options.reduction, groups)}"
    return f"{text}\n  topology given" if options.topology is not None and program.topology is not None else text


def refuse_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions, error: ArgumentError
) -> None:
    """Tell the peers of a redistribution that this rank does not make the call, because of `error`."""
    for request in plain_requests(current, target):
        program = _program(x, *request[:2], options)
        if not program.is_identity:
            (position,) = program.ranks
            transport, _ = _transport(program, x, options, current.mesh, target.mesh)
            _refuse(transport, program, position, error)
            return


def _refuse(transport: AnyTransport, program: Program, position: int, error: ArgumentError) -> None:
    all_meet = program.all_meet(position)
    refuse(transport, program.participants(position), program.first_group(position), error, all_meet)


def bind_redistribution(
    x: torch.Tensor, current: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
) -> None:
    """Bind what `run_redistribution` runs for the same specs and a tensor of the same shape, strides and dtype."""
    if torch.is_inference_mode_enabled():
        # Cached views and buffers outlive the mode.
        with torch.inference_mode(False):
            return bind_redistribution(x, current, target, options)
    refuse_fake_mode()
    for i, request in enumerate(plain_requests(current, target)):
        if i:  # between norms along several mesh dims, which keep their shape
            x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        like = x if request.before is None else torch.empty_like(x)
        with on_device(x.device):
            call = _lookup(like, request.current, request.target, options)
            assert isinstance(call, Call)
            call.build(like)


def is_in(mesh: DeviceMesh) -> bool:
    """Whether this rank is in the mesh."""
    return mesh.get_coordinate() is not None


def empty_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The local tensor of a rank outside the mesh of a DTensor."""
    assert spec.tensor_meta is not None
    return local.new_empty((0,) * max(len(spec.tensor_meta.shape), 1))


def plain_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The local tensor of a DTensor, waited for and detached; empty on a rank outside its mesh.

    Raises:
        UnsupportedError: the local tensor is of another type than `torch.Tensor` and `Parameter`.
    """
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if type(local) not in TRACED_TYPES:
        raise UnsupportedError(f"dtensor: its local tensor is a {type(local).__name__}; allowed: a torch.Tensor")
    if local.requires_grad:
        local = local.detach()
    return local if is_in(spec.mesh) else empty_local(local, spec)
