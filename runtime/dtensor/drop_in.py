"""shardweave's replacement of torch's `redistribute_local_tensor`, the inner loop of `DTensor.redistribute`.

It decides what shardweave carries out and what is left to torch. `install` puts it in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, UnsupportedError
from ...kernels import on_device
from ..executor.call import ON_META, Call, why_no_data
from ..executor.dispatch_modes import (
    REPLACES,
    REPORTS,
    active_modes,
    count_dispatch_modes,
    is_traced,
    note_decision,
    traces_into_graph,
    why_not_under,
)
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..statistics import COMPILING, count_delegation, stats
from ..traced.redistribution import TRACED_TYPES
from ..transports.select import why_not_backend
from . import observer, redistribute_options
from .local import PLAIN_TENSORS, bound_before, empty_local, is_in, run_redistribution, trace_redistribution
from .redistribute_options import RedistributeOptions

Stock = Callable[..., torch.Tensor]
stock_redistribute_local_tensor: Stock = torch_redistribute.redistribute_local_tensor
_OTHER_TENSOR_TYPE = "local tensor is a "
_OTHER_MESH = "a mesh that install(only=) leaves out"
_ONE_RANK = "world size 1"
_backend_obstacles: ProcessGroupCache[torch.device, str | None] = ProcessGroupCache(256)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Redistribute a local tensor from one spec to another, which may be on another mesh. Replaces torch's function of
    the same name and signature.

    What shardweave does not carry out is left to torch, counted by reason in `stats().delegations`, and logged once per
    reason: wrapped tensors other than fake ones; tracing with `install(traced=False)`; dispatch modes that report
    torch's collectives, replace tensors without tracing, or are unknown; unsupported placements; shards along mesh dims
    whose ranks do not ascend; a world of one rank; unknown backends; and what `install` excludes. Other dispatch modes,
    such as selective activation checkpointing, see the redistribution as one operator.

    Args:
        local_tensor: this rank's shard, of the shape that `current_spec` gives it; any strides.
        current_spec, target_spec: with `tensor_meta`, of the dtype of the tensor.
        async_op: return an `AsyncCollectiveTensor` once the last exchange has begun; it is waited for when the result
            is first used. Has no effect where no exchange is left to wait for, or under dispatch modes that see one
            operator.
        use_graph_based_transform: passed to torch where torch carries the call out, otherwise ignored and counted in
            `stats().ignored`.
        is_explicit: passed to torch.

    Returns:
        This rank's shard under `target_spec`. Not recorded by autograd.

    Raises:
        ArgumentError: the local tensor does not match its spec, or a spec has the wrong number of placements.
        UnsupportedError: torch would have to redistribute to another mesh, which it cannot.
        TransportError: a peer died, timed out, or made a different request.
    """
    if (recorder := observer.current) is not None:
        recorder.note(local_tensor.dtype, current_spec, target_spec)
    x = local_tensor
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    options = redistribute_options.default
    under_modes = bool(count_dispatch_modes())
    # A request that was carried out before needs none of the checks below, an eighth of the host time of a small call.
    may_repeat = (
        type(x) in PLAIN_TENSORS
        and x.layout is torch.strided
        and not (under_modes or torch.is_inference_mode_enabled() or torch.compiler.is_compiling())
        and not (x.is_conj() or x.is_neg())
        and use_graph_based_transform is None
    )
    if may_repeat:
        call = bound_before(x, current_spec, target_spec, options)
        if isinstance(call, Call) and call.replaces_torch:
            if x.requires_grad:
                x = x.detach()
            if x.device.type == "cpu":  # a context costs three calls
                return call(x, async_op)
            with on_device(x.device):
                return call(x, async_op)
    to_other_mesh, in_source = current_spec.mesh != target_spec.mesh, is_in(current_spec.mesh)
    if not in_source and not (to_other_mesh and is_in(target_spec.mesh)):
        return local_tensor
    for name, spec in (("current_spec", current_spec), ("target_spec", target_spec)):
        if len(spec.placements) != spec.mesh.ndim:
            raise ArgumentError(
                f"{name}: {len(spec.placements)} placements for a mesh of {spec.mesh.ndim} dims; allowed: one per mesh "
                f"dim"
            )
        torch_redistribute.assert_no_mixed_partial_types(spec.placements)
    modes = active_modes() if under_modes else ()
    traced = is_traced(x, modes)
    reason = _why_delegate(x, current_spec, target_spec, options, to_other_mesh, traced)
    if modes and reason is None:
        reason = why_not_under(modes, traced)
    if to_other_mesh and reason is not None:
        raise UnsupportedError(f"redistribution to another mesh: {reason}; torch does not support it either")
    if reason is None:
        if not in_source:
            x = empty_local(x, current_spec)
        try:
            if traced:
                x = x.detach() if x.requires_grad else x
                return trace_redistribution(x, current_spec, target_spec, options, traces_into_graph(modes))
            out = run_redistribution(x.detach() if x.requires_grad else x, current_spec, target_spec, options, async_op)
            if modes:
                note_decision(modes, None)
            if may_repeat and isinstance(call := bound_before(x, current_spec, target_spec, options), Call):
                call.replaces_torch = True
            if use_graph_based_transform is not None:
                stats().ignored["use_graph_based_transform"] += 1
            return out
        except UnsupportedError as error:
            if to_other_mesh:
                raise
            reason = str(error)
    if modes and not traced:
        note_decision(modes, reason)
    count_left(reason, modes, current_spec, target_spec)
    torch_options = {"async_op": async_op, "is_explicit": is_explicit}
    if use_graph_based_transform is not None:
        torch_options["use_graph_based_transform"] = use_graph_based_transform
    return stock_redistribute_local_tensor(local_tensor, current_spec, target_spec, **torch_options)


def _why_delegate(
    x: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    options: RedistributeOptions,
    to_other_mesh: bool,
    traced: bool,
) -> str | None:
    """The reason why a call is left to torch, or None. Does not consider dispatch modes."""
    if (reason := why_not_traced(x, options) if traced else why_not_plain(x)) is not None:
        return reason
    if to_other_mesh:
        return None if traced else backend_obstacle(x.device)
    if options.only is not None and current.mesh not in options.only:
        return _OTHER_MESH
    for a, b in zip(current.placements, target.placements, strict=True):
        if b.is_partial() and a != b and not a.is_replicate():
            to_sum = type(a) is Shard and type(b) is Partial and b.reduce_op == "sum"
            if not to_sum:
                return "shard or another op to partial, which torch refuses"
    return None if traced else backend_obstacle(x.device)


def count_left(reason: str, modes: Sequence[Any], source: object, target: object, left_to: str = "torch") -> None:
    """Count a redistribution that is left to torch or spmd_types under these modes, in one pass of torch.compile."""
    into_graph = traces_into_graph(modes)
    if into_graph is not None:
        traced = into_graph or torch.compiler.is_compiling()
        count_delegation(reason, level_of_reason(reason), source, target, left_to, into_graph if traced else None)


def why_not_traced(x: torch.Tensor, options: RedistributeOptions) -> str | None:
    """Why the redistribution of a traced local tensor is left to torch, or None."""
    if not options.traced:
        return COMPILING
    if type(x) not in TRACED_TYPES:
        return f"{_OTHER_TENSOR_TYPE}{type(x).__name__}"
    return None if x.layout is torch.strided else f"local tensor is {x.layout}"


def why_not_plain(x: torch.Tensor) -> str | None:
    """Why programs cannot move the memory of a local tensor, or None."""
    if torch.compiler.is_compiling():
        return COMPILING
    if type(x) not in PLAIN_TENSORS:
        return f"{_OTHER_TENSOR_TYPE}{type(x).__name__}"
    obstacle = why_no_data(x)
    return None if obstacle is None else f"local tensor is {obstacle}"


def backend_obstacle(device: torch.device) -> str | None:
    """Why the default process group cannot carry programs on `device`, or None."""
    forget_dead_groups()
    try:
        return _backend_obstacles[device]
    except KeyError:
        obstacle = _backend_obstacles[device] = why_not_backend(device)
        return obstacle


def level_of_reason(reason: str) -> int:
    """Debug for a world of one rank, info for what the user requested or has no data, warning for the rest."""
    if reason == _ONE_RANK:
        return logging.DEBUG
    requested = reason in (COMPILING, _OTHER_MESH) or reason.startswith(_OTHER_TENSOR_TYPE)
    return logging.INFO if requested or reason.endswith((REPORTS, REPLACES, ON_META)) else logging.WARNING
