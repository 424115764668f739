"""`redistribute`, `explain` and `prepare_redistribute`: redistribution of DTensors with a shard order, other meshes
and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from ...errors import ArgumentError, UnsupportedError
from ...planner import Layout, Orders, Topology, TopologyName, held_sizes, whole_numbers
from ..convert_specs import (
    check_dtype_argument,
    layout_of_spec,
    mesh_of,
    placements_or_layout,
    spec_of_layout,
)
from ..executor.call import refuse_unplanned
from ..executor.choose_algorithm import Reduction
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..transports.choose_transport import TransportName
from . import observer
from .autograd import RedistributeArgs, redistribute_forward, redistribute_with_gradient, same_layout, with_dtype
from .in_graph import call_in_graph, remember
from .local import (
    bind_redistribution,
    explain_redistribution,
    is_in,
    plain_local,
    refuse_redistribution,
    run_redistribution,
)
from .overlap import overlaps_itself
from .redistribute_options import RedistributeOptions, call_options


def redistribute(
    dtensor: DTensor,
    placements: Layout | str | Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    out: DTensor | None = None,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction | None = None,
) -> DTensor:
    """Redistribute a DTensor to other placements, on the same mesh or on another.

    Args:
        dtensor: replicated, sharded, strided-sharded and partial placements in any shard order are supported.
        placements: one per mesh dim of the target's mesh; or the target's layout, as a `Layout` or in its text form
            such as "S1 S0" or "S0 S0 @ 0:1,0" (`Layout.parse`), which has the shard order as well. None: those of
            `dtensor`, to change the order or the mesh only. Targets may be partial (sum, avg, max, min), which torch
            refuses.
        device_mesh: the target's mesh, if it is another. It may have the same ranks, some of them, or none. Every rank
            of either mesh must call. A rank outside the target's mesh gets a DTensor with an empty local tensor; a rank
            outside both meshes keeps its own local tensor.
        shard_order: maps tensor dims to the mesh dims that shard them, in the order of the cuts. Tensor dims that are
            not in it are cut in ascending order of mesh dims. `DTensor.detach` of torch 2.13 drops the order from the
            spec: its result has the same data and the default order.
        async_op: return when the last exchange has begun. It is waited for when the result is first used, or by this
            process's next redistribution on the same transport or on one that this is a part of, whatever its ranks:
            redistributions complete in the order of their calls. The first call of a request waits at once for
            everything that precedes its exchanges.
        forward_dtype: the dtype of the communicated data and of the result. None: the dtype of `dtensor`.
        backward_dtype: the dtype in which gradients are communicated; they are returned in the dtype of `dtensor`.
            None: the dtype of `dtensor`.
        out: a DTensor of the target's layout, shape and dtype that the result is copied into and that is returned. Not
            allowed while gradients are recorded. Any strides are allowed where no two elements of the local tensor
            share memory.
        transport: "shared_memory"; "process_group"; "hierarchical" (shared memory inside each machine, process groups
            between them); "symmetric_memory" (ranks of one node meet on the device; those of several also send). None:
            chosen by what the ranks share. The environment variable `SHARDWEAVE_TRANSPORT` has the same effect.
        topology: the links between ranks that the program is planned for, or a name as for `plan`; the same on all
            ranks. None: the topology of `install`, otherwise the one that ranks on several machines find (`explain`
            shows it); on one machine plans minimise bytes.
        reduction: "ordered" or "fast", as for `install`. None: the value of `install`.

    Under torch.compile, the program becomes torch's functional collectives in the graph; `out` is refused, `async_op`
    has no effect, and `transport` has none and is counted in `stats().ignored`.

    Returns:
        A DTensor that shares no memory with `dtensor`, except where nothing has to be done. Differentiable any number
        of times, by backward; the gradient of a partial input is replicated.

    Raises:
        ArgumentError: placements, a shard order, a dtype or an `out` that do not match; raised before anything is
            communicated.
        UnsupportedError: bitwise partials; a backend that cannot carry programs; shards along a mesh dim whose ranks do
            not ascend, about whose owners torch's own operations disagree.
        TransportError: a peer died, timed out, or made a different request.
    """
    if not isinstance(dtensor, DTensor):
        raise refuse_unplanned(ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor"), ())
    if torch.compiler.is_dynamo_compiling():
        if out is not None:
            raise UnsupportedError("out: given, and torch.compile is tracing; allowed there: None")
        call = remember(
            redistribute,
            placements,
            device_mesh=device_mesh,
            shard_order=shard_order,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            transport=transport,
            topology=topology,
            reduction=reduction,
        )
        return call_in_graph(dtensor, call)  # type: ignore[return-value]
    try:
        if not isinstance(async_op, bool):
            raise ArgumentError(f"async_op: {async_op!r}; allowed: True or False")
        own = dtensor._local_tensor.dtype
        check_dtype_argument("forward_dtype", forward_dtype)
        check_dtype_argument("backward_dtype", backward_dtype)
        target = target_spec(dtensor, placements, device_mesh, shard_order)
        run = partial(redistribute_local, call_options(transport, topology, reduction))
        op_dtype = forward_dtype or own
        args = RedistributeArgs(target, run, op_dtype, op_dtype, backward_dtype or own, own, async_op)
        differentiable = dtensor.requires_grad and torch.is_grad_enabled()
        if out is not None:
            try:
                _check_out(out, target, op_dtype, differentiable)
            except ArgumentError as error:
                source = dtensor._spec
                if is_in(source.mesh) or is_in(target.mesh):
                    local = plain_local(dtensor._local_tensor, source).to(op_dtype)
                    specs = with_dtype(source, op_dtype), with_dtype(target, op_dtype)
                    refuse_redistribution(local, *specs, call_options(transport, topology, reduction), error)
                raise
            out._local_tensor.copy_(redistribute_forward(dtensor, args)._local_tensor)
            return out
        result = redistribute_with_gradient(dtensor, args) if differentiable else redistribute_forward(dtensor, args)
        if type(result._local_tensor) in (FakeTensor, FunctionalTensor):
            _check_kept_in_graphs(result)
        return result
    except (ArgumentError, UnsupportedError) as error:
        refuse_unplanned(error, [dtensor.device_mesh, *([device_mesh] if isinstance(device_mesh, DeviceMesh) else [])])
        raise


def _check_kept_in_graphs(result: DTensor) -> None:
    """
    Raises:
        UnsupportedError: torch gives DTensors in graphs the default shard order (2.11), and `result` has another.
    """
    names, context = result.__tensor_flatten__()
    inner = {name: getattr(result, name) for name in names}
    kept = DTensor.__tensor_unflatten__(inner, context, result.size(), result.stride())
    if kept._spec.shard_order != result._spec.shard_order:
        raise UnsupportedError(
            f"shard order {result._spec.shard_order}: torch {torch.__version__} drops it from DTensors in graphs; "
            "allowed there: the default order"
        )


def _check_out(out: DTensor, target: DTensorSpec, dtype: torch.dtype, differentiable: bool) -> None:
    if not isinstance(out, DTensor):
        raise ArgumentError(f"out: {type(out).__name__}; allowed: a DTensor, or None")
    if differentiable or (out.requires_grad and torch.is_grad_enabled()):
        raise ArgumentError("out: gradients are recorded; allowed: under torch.no_grad()")
    assert target.tensor_meta is not None
    if not same_layout(out._spec, target):
        raise ArgumentError(f"out: its layout is {out._spec}; allowed: {target}")
    shape = target.tensor_meta.shape
    local = out._local_tensor
    if tuple(out.shape) != tuple(shape) or local.dtype != dtype:
        raise ArgumentError(f"out: {out.dtype}{list(out.shape)}; allowed: {dtype}{list(shape)}")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError("out: made in inference mode; allowed: within that mode, or an output made outside it")
    coordinate = target.mesh.get_coordinate()
    local_shape = (0,) * max(len(shape), 1)  # of a rank outside the mesh
    if coordinate is not None:
        local_shape = held_sizes(tuple(shape), layout_of_spec(target), tuple(target.mesh.shape), tuple(coordinate))
    if tuple(local.shape) != local_shape or overlaps_itself(local):
        raise ArgumentError(
            f"out: its local tensor is {list(local.shape)} with strides {list(local.stride())}; allowed: "
            f"{list(local_shape)}, no two elements in the same memory"
        )


def explain(
    dtensor: DTensor,
    placements: Layout | str | Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction | None = None,
) -> str:
    """Describe what `redistribute` does with the same arguments on this rank, without moving data: the steps of the
    program with their bytes, the transport, and the algorithm of each step with the reason for it.

    Every rank of the mesh must call it, or have made the same redistribution before: the choice of the transport, and
    the topology of several machines, depend on what each rank has posted.

    Args:
        dtensor, placements, device_mesh, shard_order, transport, topology, reduction: as for `redistribute`.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute`.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    options = call_options(transport, topology, reduction)
    target = target_spec(dtensor, placements, device_mesh, shard_order)
    if not (is_in(dtensor._spec.mesh) or is_in(target.mesh)):
        return "this rank takes no part: it is outside the mesh"
    return explain_redistribution(plain_local(dtensor._local_tensor, dtensor._spec), dtensor._spec, target, options)


def prepare_redistribute(
    dtensor: DTensor,
    placements: Layout | str | Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    forward_dtype: torch.dtype | None = None,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
    reduction: Reduction | None = None,
) -> None:
    """Plan what `redistribute` does with the same arguments, compile its kernels and upload their tables, without
    moving data. After `prepare` and `prepare_redistribute`, the first call may be captured in a CUDA graph.

    Applies to DTensors of the same layout, shape, dtype, strides and alignment. Without `prepare`, it is collective for
    ranks of several machines, which find their topology the first time, and where ranks meet on the device and no
    symmetric buffer is large enough.

    Args:
        dtensor, placements, device_mesh, shard_order, forward_dtype, transport, topology, reduction: as for
            `redistribute`.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute`.
        TransportError: a rank that must take part did not arrive.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    check_dtype_argument("forward_dtype", forward_dtype)
    options = call_options(transport, topology, reduction)
    target = target_spec(dtensor, placements, device_mesh, shard_order)
    dtype = forward_dtype or dtensor._local_tensor.dtype
    redistribute_forward(dtensor, RedistributeArgs(target, partial(_bind_local, options), dtype, dtype, dtype, dtype))


def _bind_local(
    options: RedistributeOptions, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    if is_in(source.mesh) or is_in(target.mesh):
        bind_redistribution(plain_local(local, source), source, target, options)
    return local


def redistribute_local(
    options: RedistributeOptions, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    """Redistribute the local tensor of a DTensor, or return it on a rank outside both meshes."""
    if (recorder := observer.current) is not None:
        recorder.note(local.dtype, source, target)
    if is_in(source.mesh) or is_in(target.mesh):
        return run_redistribution(plain_local(local, source), source, target, options, async_op)
    return local


def target_spec(
    dtensor: DTensor,
    placements: Layout | str | Sequence[Placement] | None,
    device_mesh: DeviceMesh | None,
    shard_order: Mapping[int, Sequence[int]] | None,
) -> DTensorSpec:
    """The spec of the result of `redistribute`, from the cache if it was made before: constructing and hashing a spec
    costs more than a barrier between ranks.

    Raises:
        ArgumentError: placements, a mesh or a shard order that do not match.
    """
    if placements is None:
        placements = dtensor._spec.placements
    if type(placements) is not tuple and isinstance(placements, Sequence) and not isinstance(placements, str):
        placements = tuple(placements)
    orders = None if shard_order is None else sorted_orders(shard_order)
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise ArgumentError(f"device_mesh: {device_mesh!r}; allowed: a DeviceMesh, or None")
    mesh = dtensor._spec.mesh if device_mesh is None else device_mesh
    # With the id of the mesh: meshes of the same ranks are equal, but may have different process groups.
    key = (dtensor._spec, id(mesh), placements, orders)
    try:
        target = _targets.get(key)
    except TypeError:  # an element that cannot be hashed is no placement: `placements_or_layout` names it
        target = None
    if target is None:
        forget_dead_groups()  # before the spec is made: the cache of bound requests finds it by identity
        target = _targets[key] = _new_target_spec(dtensor._spec, mesh, placements, orders)
    return target


def _new_target_spec(
    source: DTensorSpec, mesh: DeviceMesh, placements: Layout | str | Sequence[Placement], orders: Orders | None
) -> DTensorSpec:
    assert source.tensor_meta is not None
    ndim = len(source.tensor_meta.shape)
    given = placements_or_layout("placements", placements, mesh_of(mesh), ndim)
    if not isinstance(given, Layout):
        return DTensorSpec(mesh, given, source.tensor_meta, **shard_order_argument(given, orders, ndim))
    if orders is not None:
        raise ArgumentError(f"shard_order: given together with the layout {given}, which has one; allowed: one of them")
    return spec_of_layout(given, mesh, source.tensor_meta)


_targets: ProcessGroupCache[tuple, DTensorSpec] = ProcessGroupCache(2048)


def sorted_orders(shard_order: Mapping[int, Sequence[int]]) -> Orders:
    """`shard_order` as sorted tuples of whole numbers.

    Raises:
        ArgumentError: not a mapping of tensor dims to sequences of mesh dims.
    """
    try:
        return tuple((dim, whole_numbers("shard_order", cuts)) for dim, cuts in sorted(shard_order.items()))
    except (ArgumentError, AttributeError, TypeError):
        pass
    raise ArgumentError(f"shard_order: {shard_order!r}; allowed: a mapping of tensor dims to sequences of mesh dims")


def shard_order_argument(placements: Sequence[Placement], orders: Orders | None, ndim: int) -> dict[str, Any]:
    """The validated `shard_order` argument of a `DTensorSpec`, as keyword arguments; none for the default order."""
    if orders is None:
        return {}
    cuts = cuts_of(placements)
    requested: dict[int, tuple[int, ...]] = {}
    for tensor_dim, mesh_dims in orders:
        if not isinstance(tensor_dim, int) or not -ndim <= tensor_dim < ndim:
            allowed = f"{-ndim}..{ndim - 1}" if ndim else "none, the tensor has no dims"
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim!r}; allowed: {allowed}")
        tensor_dim %= ndim
        if tensor_dim in requested:
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim} is given twice; allowed: once each")
        if sorted(mesh_dims) != cuts.get(tensor_dim, []):
            raise ArgumentError(
                f"shard_order: tensor dim {tensor_dim} has {tuple(mesh_dims)}; allowed: each of the mesh dims that "
                f"shard it, {tuple(cuts.get(tensor_dim, []))}, once"
            )
        requested[tensor_dim] = tuple(mesh_dims)
    entries = [ShardOrderEntry(tensor_dim=d, mesh_dims=requested.get(d, tuple(c))) for d, c in sorted(cuts.items())]
    return {"shard_order": tuple(entries)}


def cuts_of(placements: Sequence[Placement]) -> dict[int, list[int]]:
    """The mesh dims that shard each tensor dim, ascending."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Shard:
            cuts.setdefault(placement.dim, []).append(mesh_dim)
        elif not isinstance(placement, Replicate | Partial):
            raise ArgumentError(
                f"shard_order: given together with {placement} on mesh dim {mesh_dim}; allowed: one of them"
            )
    return cuts
