"""In the place of torch's own redistribution: its inner loop, and the autograd function around it, by their names."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from ...errors import ArgumentError, UnsupportedError
from ..executor.dispatch_modes import REPLACES, REPORTS, active_modes, note_decision, why_not_under
from ..statistics import left_to_torch, stats
from ..transports.select import why_not_backend
from .autograd import RedistributeArgs, empty_local, is_in, kept_spec, redistribute_forward, redistribute_with_gradient
from .local import run_redistribution
from .observer import observer

Stock = Callable[..., torch.Tensor]
stock_redistribute_local_tensor: Stock = torch_redistribute.redistribute_local_tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TRACING, _OF_ANOTHER_TYPE = "torch.compile is tracing", "local tensor is a "
_LEFT_OUT, _SMALL = "a mesh that install(only=) leaves out", "smaller than install(min_bytes=)"
_ONE_RANK = "world size 1"


class Policy(NamedTuple):
    """What is carried out at all; alike on all ranks. What is not is left to torch."""

    min_bytes: int = 0
    only: tuple[DeviceMesh, ...] | None = None


_policy = Policy()


def policy_asked(min_bytes: object, only: object) -> Policy:
    """
    Raises:
        ArgumentError: a number of bytes or meshes that are none.
    """
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ArgumentError(f"min_bytes: {min_bytes!r}; allowed: a number of bytes, 0 and up")
    if only is None:
        return Policy(min_bytes)
    meshes = (only,) if isinstance(only, DeviceMesh) else tuple(only) if isinstance(only, Collection) else (only,)
    if not all(isinstance(mesh, DeviceMesh) for mesh in meshes):
        raise ArgumentError(f"only: {only!r}; allowed: a DeviceMesh, several, or None")
    return Policy(min_bytes, meshes)


def carry_out_under(policy: Policy) -> None:
    global _policy
    _policy = policy


def policy() -> Policy:
    return _policy


def why_delegate(x: torch.Tensor, current: DTensorSpec, target: DTensorSpec) -> str | None:
    """Why torch itself has to carry a call out, or None; dispatch modes aside."""
    if torch.compiler.is_compiling():
        return _TRACING
    if type(x) not in _PLAIN:
        return f"{_OF_ANOTHER_TYPE}{type(x).__name__}"
    if x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return f"local tensor is {x.layout} on {x.device}"
    if current.mesh != target.mesh:
        return why_not_backend(x.device)
    if _policy.only is not None and current.mesh not in _policy.only:
        return _LEFT_OUT
    if _policy.min_bytes and current.tensor_meta is not None:
        if math.prod(current.tensor_meta.shape) * x.element_size() < _policy.min_bytes:
            return _SMALL
    for a, b in zip(current.placements, target.placements, strict=True):
        if b.is_partial() and a != b and not a.is_replicate():
            return "shard or another op to partial, which torch refuses"
    return why_not_backend(x.device)


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """torch's inner loop of the same name and signature, carried out by shardweave where it can be; also to another
    mesh.

    Left to torch, counted in `stats().delegations` with the reason, and logged once for each: tracing, fake and other
    wrapped tensors, dispatch modes that report torch's collectives or replace tensors, or are not known, placements
    that programs do not carry, shards along mesh dims whose ranks do not ascend, one rank, unknown backends, what
    `install` leaves out. Other dispatch modes, those of
    selective activation checkpointing among them, see one operator. With `async_op` the result is an
    `AsyncCollectiveTensor` wherever an exchange is left to wait for, but under such modes. A plan is chosen by
    shardweave: `use_graph_based_transform` only reaches torch, and is counted in `stats().ignored`.

    Args:
        local_tensor: this rank's shard, of the shape that `current_spec` gives it; any strides.
        current_spec, target_spec: with `tensor_meta`; of one dtype, the tensor's.
        async_op: the last exchange has begun when this returns, and is waited for when the result is first used.
        use_graph_based_transform, is_explicit: torch's.

    Returns:
        This rank's shard under `target_spec`. Below autograd: it records no gradients.

    Raises:
        ArgumentError: the local tensor does not fit its spec.
        TransportError: the ranks could not meet.
    """
    if (told := observer()) is not None:
        told.note(local_tensor.dtype, current_spec, target_spec)
    x = local_tensor
    if type(x) is AsyncCollectiveTensor:
        x = x.wait()
    crosses = current_spec.mesh != target_spec.mesh
    if not is_in(current_spec.mesh) and not (crosses and is_in(target_spec.mesh)):
        return local_tensor
    for name, spec in (("current_spec", current_spec), ("target_spec", target_spec)):
        if len(spec.placements) != spec.mesh.ndim:
            raise ArgumentError(
                f"{name}: {len(spec.placements)} placements for a mesh of {spec.mesh.ndim} dims; allowed: one each"
            )
        torch_redistribute.assert_no_mixed_partial_types(spec.placements)
    reason = why_delegate(x, current_spec, target_spec)
    modes = active_modes()
    if modes and reason is None:
        reason = why_not_under(modes)
    if crosses and reason is not None:
        raise UnsupportedError(f"to another mesh: {reason}, and torch itself cannot; allowed: without that")
    if reason is None:
        if not is_in(current_spec.mesh):
            x = empty_local(x, current_spec)
        try:
            found = run_redistribution(x.detach() if x.requires_grad else x, current_spec, target_spec, later=async_op)
            if modes:
                note_decision(modes, None)
            if use_graph_based_transform is not None:
                stats().ignored["use_graph_based_transform"] += 1
            return found
        except UnsupportedError as error:
            if crosses:  # torch itself cannot
                raise
            reason = str(error)
    if modes:
        note_decision(modes, reason)
    left_to_torch(reason, _level(reason), current_spec, target_spec)
    options = {"async_op": async_op, "is_explicit": is_explicit}
    if use_graph_based_transform is not None:
        options["use_graph_based_transform"] = use_graph_based_transform
    return stock_redistribute_local_tensor(local_tensor, current_spec, target_spec, **options)


def _level(reason: str) -> int:
    """How loudly a reason is told: one rank is nobody's worry, what the user asked for is worth a note."""
    if reason == _ONE_RANK:
        return logging.DEBUG
    asked_for = reason in (_TRACING, _LEFT_OUT, _SMALL) or reason.startswith(_OF_ANOTHER_TYPE)
    return logging.INFO if asked_for or reason.endswith((REPORTS, REPLACES)) else logging.WARNING


class Redistribute:
    """In the place of torch's autograd function of the same name, which loses the other mesh and the shard order.

    What is asked for decides the result: placements say the default order, also where they are the source's own.
    """

    @staticmethod
    def apply(
        x: DTensor, device_mesh: DeviceMesh, placements: tuple[Placement, ...], async_op: bool = False, *dtypes: Any
    ) -> DTensor:
        """`dtypes`: torch 2.13's dictionary, or the two dtypes of versions before."""
        own = x._local_tensor.dtype
        if dtypes and isinstance(dtypes[0], dict):
            backward = dtypes[0]["backward_options"]
            op_dtype, out_dtype = dtypes[0]["op_dtype"], dtypes[0]["out_dtype"]
            backward_dtype, gradient_dtype = backward["op_dtype"], backward["out_dtype"]
        else:
            forward_dtype, backward_dtype = (*dtypes, None, None)[:2]
            op_dtype = out_dtype = forward_dtype or own
            backward_dtype, gradient_dtype = backward_dtype or own, own
        target = _target(x._spec, device_mesh, placements)
        args = RedistributeArgs(target, _as_torch, op_dtype, out_dtype, backward_dtype, gradient_dtype, async_op)
        if x.requires_grad and torch.is_grad_enabled():
            return redistribute_with_gradient(x, args)
        return redistribute_forward(x, args)


def _as_torch(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool) -> torch.Tensor:
    return redistribute_local_tensor(local, current, target, async_op=async_op, is_explicit=True)


def _target(source: DTensorSpec, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    # A view's strided shards mean something else than the same ones asked for, so they stay as they are.
    if placements == source.placements and mesh == source.mesh:
        if any(isinstance(p, _StridedShard) for p in placements):
            return source
    return kept_spec(source, mesh, placements)
