"""DTensors in, DTensors out: `redistribute` with a shard order, and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from ...errors import ArgumentError, UnsupportedError
from ...planner import Orders, Topology, held_sizes, whole_numbers
from ..cache import forget_dead_groups, kept_with_group
from ..convert import layout_of_spec, normal_placements
from ..executor.call import refuse_unplanned
from ..executor.lower import Reduction
from ..statistics import stats
from .autograd import (
    RedistributeArgs,
    empty_local,
    is_in,
    redistribute_forward,
    redistribute_with_gradient,
    same_layout,
    with_dtype,
)
from .install import is_installed
from .local import (
    RedistributeOptions,
    bind_redistribution,
    explain_redistribution,
    refuse_redistribution,
    requested_options,
    run_redistribution,
)
from .observer import observer
from .overlap import overlaps_itself


def redistribute(
    dtensor: DTensor,
    placements: Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    out: DTensor | None = None,
    transport: str | None = None,
    topology: Topology | None = None,
    reduction: Reduction | None = None,
) -> DTensor:
    """A DTensor of the same values with other placements, on the same mesh or on another.

    Args:
        dtensor: any placements of replicate, shard, strided shard and partial, in any shard order.
        placements: one per mesh dim of the target's mesh; None: those it has, for another order or another mesh.
            Targets may be partial (sum, avg, max, min), which torch refuses.
        device_mesh: the target's mesh, if it is another: of the same ranks, of some of them, or of none. Every rank of
            either mesh has to call; one that is not in the target's mesh gets a DTensor with an empty local tensor, and
            one that is in neither keeps its own.
        shard_order: tensor dim -> mesh dims, the first cut first; tensor dims left out are cut in ascending mesh dims.
            `DTensor.detach` of torch 2.13 forgets it: its result holds the same data and says the default order.
        async_op: the last exchange has begun when this returns, and is waited for when the result is first used, or by
            this process's next redistribution in the same transport, or of which it is a part, whatever its ranks: all
            are carried out in one order. What a request does for the first time, before any exchange, is waited for at
            once.
        forward_dtype: what is moved and returned; None: the dtype it has.
        backward_dtype: what gradients are moved in; they come back in the input's dtype. None: the input's.
        out: a DTensor of the target's layout, shape and dtype that is written in place and returned; not while
            gradients are recorded. The result is copied there: any strides will do by which no two elements of the
            local tensor are in one place.
        transport: "shared_memory", "process_group", "hierarchical" (the first inside each machine, the second between
            them), "symmetric_memory" (ranks of a node meet on the device, those of several send as well), or None to
            choose by what the ranks share (`SHARDWEAVE_TRANSPORT` asks too).
        topology: what the ranks are linked by, for which the program is planned; alike on all ranks. None: what
            `install` was told, else bytes alone decide.
        reduction: "ordered" or "fast", as for `install`; None: what that was told.

    Under torch.compile torch's own redistribution is traced in its place, which takes placements and dtypes only.

    Returns:
        A DTensor that shares no memory with the input, except where nothing is to be done. Differentiable any number of
        times; the gradient of a partial input is replicated.

    Raises:
        ArgumentError: placements, an order, a dtype or an `out` that do not fit; raised before anything is
            communicated.
        UnsupportedError: bitwise partials, a backend that cannot carry programs; shards along a mesh dim whose ranks do
            not ascend, of which torch's own operations disagree about which rank holds which.
        TransportError: a peer died, did not come, or asked for something else.
    """
    if not isinstance(dtensor, DTensor):
        raise refuse_unplanned(ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor"), ())
    if torch.compiler.is_compiling():
        # torch's own redistribution can be traced; what it does not know would be lost.
        _count_traced()
        if placements is None or any(given is not None for given in (device_mesh, shard_order, out)):
            raise UnsupportedError("redistribute: torch.compile is tracing; allowed there: placements and dtypes alone")
        dtypes = {"forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
        return dtensor.redistribute(placements=placements, async_op=async_op, **dtypes)  # type: ignore[arg-type]
    try:
        own = dtensor._local_tensor.dtype
        _check_dtype("forward_dtype", forward_dtype)
        _check_dtype("backward_dtype", backward_dtype)
        target = target_of(dtensor, placements, device_mesh, shard_order)
        move = partial(move_local, requested_options(transport, topology, reduction))
        moved = forward_dtype or own
        carry = RedistributeArgs(target, move, moved, moved, backward_dtype or own, own, async_op)
        differentiable = dtensor.requires_grad and torch.is_grad_enabled()
        if out is not None:
            try:
                _check_out(out, target, moved, differentiable)
            except ArgumentError as error:
                source = dtensor._spec
                if is_in(source.mesh) or is_in(target.mesh):
                    local = plain_local(dtensor._local_tensor, source).to(moved)
                    specs = with_dtype(source, moved), with_dtype(target, moved)
                    refuse_redistribution(local, *specs, requested_options(transport, topology, reduction), error)
                raise
            out._local_tensor.copy_(redistribute_forward(dtensor, carry)._local_tensor)
            return out
        return redistribute_with_gradient(dtensor, carry) if differentiable else redistribute_forward(dtensor, carry)
    except (ArgumentError, UnsupportedError) as error:
        refuse_unplanned(error, [dtensor.device_mesh, *([device_mesh] if isinstance(device_mesh, DeviceMesh) else [])])
        raise


@torch.compiler.assume_constant_result
def _count_traced() -> None:
    """Counts while torch.compile traces, and leaves nothing of it in the graph."""
    if not is_installed():  # else torch's redistribution, which comes next, counts
        stats().delegations["torch.compile is tracing"] += 1


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
    at = target.mesh.get_coordinate()
    held = (0,) * max(len(shape), 1)  # of a rank that is not in the mesh
    if at is not None:
        held = held_sizes(tuple(shape), layout_of_spec(target), tuple(target.mesh.shape), tuple(at))
    if tuple(local.shape) != held or overlaps_itself(local):
        raise ArgumentError(
            f"out: its local tensor is {list(local.shape)} with strides {list(local.stride())}; allowed: "
            f"{list(held)}, each element in a place of its own"
        )


def explain(
    dtensor: DTensor,
    placements: Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    transport: str | None = None,
    topology: Topology | None = None,
    reduction: Reduction | None = None,
) -> str:
    """What `redistribute` does with the same arguments, as this rank sees it: the program's steps with their bytes, the
    transport, and the means that it picks for each step and why. Nothing is moved.

    Every rank of the mesh calls, or has redistributed before: which transport it is follows from what each has posted.

    Args:
        dtensor, placements, device_mesh, shard_order, transport, topology, reduction: as for `redistribute`.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute`.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    options = requested_options(transport, topology, reduction)
    target = target_of(dtensor, placements, device_mesh, shard_order)
    return explain_redistribution(plain_local(dtensor._local_tensor, dtensor._spec), dtensor._spec, target, options)


def bind(
    dtensor: DTensor,
    placements: Sequence[Placement] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    forward_dtype: torch.dtype | None = None,
    transport: str | None = None,
    topology: Topology | None = None,
    reduction: Reduction | None = None,
) -> None:
    """Make ready what `redistribute` with the same arguments does: plan, compile kernels, upload their tables. Nothing
    is moved. After `prepare` and this the first call may be captured in a CUDA graph.

    It holds for DTensors of the same layout, shape, dtype, strides and alignment. Where ranks meet on the device and
    `prepare` has made no window that is large enough, it is collective.

    Args:
        dtensor, placements, device_mesh, shard_order, forward_dtype, transport, topology, reduction: as for
            `redistribute`.

    Raises:
        ArgumentError, UnsupportedError: as `redistribute`.
        TransportError: a rank that has to make a window as well did not come.
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(f"dtensor: {type(dtensor).__name__}; allowed: a DTensor")
    _check_dtype("forward_dtype", forward_dtype)
    options = requested_options(transport, topology, reduction)
    target = target_of(dtensor, placements, device_mesh, shard_order)
    moved = forward_dtype or dtensor._local_tensor.dtype
    redistribute_forward(dtensor, RedistributeArgs(target, partial(_bind_local, options), moved, moved, moved, moved))


def _bind_local(
    options: RedistributeOptions, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    if is_in(source.mesh) or is_in(target.mesh):
        bind_redistribution(plain_local(local, source), source, target, options)
    return local


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{name}: {dtype!r}; allowed: a torch.dtype, or None")


def target_of(
    dtensor: DTensor,
    placements: Sequence[Placement] | None,
    device_mesh: DeviceMesh | None,
    shard_order: Mapping[int, Sequence[int]] | None,
) -> DTensorSpec:
    """The spec that is asked for; kept.

    Raises:
        ArgumentError: placements, a mesh or an order that do not fit.
    """
    if placements is None:
        placements = dtensor._spec.placements
    if type(placements) is not tuple:
        if not isinstance(placements, Sequence):
            raise ArgumentError(f"placements: {placements!r}; allowed: a sequence of Replicate, Shard, Partial")
        placements = tuple(placements)
    order = None if shard_order is None else given_order(shard_order)
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise ArgumentError(f"device_mesh: {device_mesh!r}; allowed: a DeviceMesh, or None")
    mesh = dtensor._spec.mesh if device_mesh is None else device_mesh
    # The mesh itself: meshes of the same ranks are equal, but their process groups may differ.
    key = (dtensor._spec, id(mesh), placements, order)
    try:
        target = _targets.get(key)
    except TypeError:  # a placement that cannot be hashed is none: the spec's own check names it
        target = None
    if target is None:
        forget_dead_groups()  # now: what is bound for the target finds it again without comparing it
        target = _target_spec(dtensor, mesh, placements, order)
        if len(_targets) >= _KEPT_TARGETS:
            _targets.pop(next(iter(_targets)))
        _targets[key] = target
    return target


_KEPT_TARGETS = 2048
_targets: dict[tuple, DTensorSpec] = kept_with_group({})


def given_order(shard_order: Mapping[int, Sequence[int]]) -> Orders:
    """`shard_order` as sorted tuples of whole numbers."""
    try:
        return tuple((dim, whole_numbers("shard_order", cuts)) for dim, cuts in sorted(shard_order.items()))
    except (AttributeError, TypeError):
        pass
    raise ArgumentError(f"shard_order: {shard_order!r}; allowed: a mapping of tensor dims to sequences of mesh dims")


def _target_spec(
    dtensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], order: Orders | None
) -> DTensorSpec:
    """The spec asked for, checked; made once per request, since building and hashing it costs more than a meeting."""
    normal = normal_placements("placements", placements, mesh.ndim, dtensor.ndim)
    return DTensorSpec(mesh, normal, dtensor._spec.tensor_meta, **ordered(normal, order, dtensor.ndim))


def ordered(placements: Sequence[Placement], order: Orders | None, ndim: int) -> dict[str, Any]:
    """The `shard_order` argument of a spec, checked."""
    if order is None:
        return {}
    cuts = cuts_of(placements)
    given: dict[int, tuple[int, ...]] = {}
    for tensor_dim, mesh_dims in order:
        if not isinstance(tensor_dim, int) or not -ndim <= tensor_dim < ndim:
            allowed = f"{-ndim}..{ndim - 1}" if ndim else "none, the tensor has no dims"
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim!r}; allowed: {allowed}")
        tensor_dim %= ndim
        if tensor_dim in given:
            raise ArgumentError(f"shard_order: tensor dim {tensor_dim} is given twice; allowed: once each")
        if sorted(mesh_dims) != cuts.get(tensor_dim, []):
            raise ArgumentError(
                f"shard_order: tensor dim {tensor_dim} has {tuple(mesh_dims)}; allowed: each of the mesh dims that "
                f"cut it, {tuple(cuts.get(tensor_dim, []))}, once"
            )
        given[tensor_dim] = tuple(mesh_dims)
    entries = [ShardOrderEntry(tensor_dim=d, mesh_dims=given.get(d, tuple(c))) for d, c in sorted(cuts.items())]
    return {"shard_order": tuple(entries)}


def cuts_of(placements: Sequence[Placement]) -> dict[int, list[int]]:
    """The mesh dims that cut each tensor dim, ascending."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Shard:
            cuts.setdefault(placement.dim, []).append(mesh_dim)
        elif not isinstance(placement, Replicate | Partial):
            raise ArgumentError(
                f"shard_order: given together with {placement} on mesh dim {mesh_dim}; give one of them"
            )
    return cuts


def plain_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The local tensor of a DTensor, without gradient; of a rank that is not in its mesh an empty one."""
    if type(local) is AsyncCollectiveTensor:
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(f"dtensor: its local tensor is a {type(local).__name__}; allowed: a plain tensor")
    if local.requires_grad:
        local = local.detach()
    return local if is_in(spec.mesh) else empty_local(local, spec)


def move_local(
    options: RedistributeOptions, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    if (told := observer()) is not None:
        told.note(local.dtype, source, target)
    if is_in(source.mesh) or is_in(target.mesh):
        return run_redistribution(plain_local(local, source), source, target, options, async_op)
    return local
