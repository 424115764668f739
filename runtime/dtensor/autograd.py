"""Redistribution of DTensors with gradients, and the replacement of torch's autograd function `Redistribute`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ..convert_specs import normalize_placements, with_placements_and_meta
from ..process_group_cache import ProcessGroupCache
from .drop_in import redistribute_local_tensor

LocalRedistribution = Callable[[torch.Tensor, DTensorSpec, DTensorSpec, bool], torch.Tensor]
"""Redistributes a local tensor from one spec to another; the last argument is `async_op`."""


class RedistributeArgs(NamedTuple):
    """The arguments of a redistribution and of its backward.

    Attributes:
        target: the spec of the result, apart from its dtype.
        redistribute_local: redistributes local tensors.
        op_dtype: the dtype that is communicated.
        out_dtype: the dtype of the result.
        backward_dtype: the dtype in which the gradient is communicated.
        gradient_dtype: the dtype of the gradient.
        async_op: the result may be waited for when it is first used.
    """

    target: DTensorSpec
    redistribute_local: LocalRedistribution
    op_dtype: torch.dtype
    out_dtype: torch.dtype
    backward_dtype: torch.dtype
    gradient_dtype: torch.dtype
    async_op: bool = False


class RedistributeReplacement:
    """Replaces torch's autograd function `Redistribute`, which drops the other mesh and the shard order.

    The placements that are passed mean the default shard order, also where they are those of the source.
    """

    @staticmethod
    def apply(
        x: DTensor, device_mesh: DeviceMesh, placements: tuple[Placement, ...], async_op: bool = False, *dtypes: Any
    ) -> DTensor:
        """Redistribute `x`, with torch's arguments. `dtypes` is the dictionary of torch 2.13, or forward and backward
        dtype as in earlier versions."""
        own = x._local_tensor.dtype
        if dtypes and isinstance(dtypes[0], dict):
            backward = dtypes[0]["backward_options"]
            op_dtype, out_dtype = dtypes[0]["op_dtype"], dtypes[0]["out_dtype"]
            backward_dtype, gradient_dtype = backward["op_dtype"], backward["out_dtype"]
        else:
            forward_dtype, backward_dtype = (*dtypes, None, None)[:2]
            op_dtype = out_dtype = forward_dtype or own
            backward_dtype, gradient_dtype = backward_dtype or own, own
        target = _target_spec(x._spec, device_mesh, placements)
        args = RedistributeArgs(
            target, _redistribute_explicitly, op_dtype, out_dtype, backward_dtype, gradient_dtype, async_op
        )
        if x.requires_grad and torch.is_grad_enabled():
            return redistribute_with_gradient(x, args)
        return redistribute_forward(x, args)


def _redistribute_explicitly(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    return redistribute_local_tensor(local, current, target, async_op=async_op, is_explicit=True)


def redistribute_forward(x: DTensor, args: RedistributeArgs, requires_grad: bool = False) -> DTensor:
    """Redistribute `x` without recording gradients."""
    source, target, local = x._spec, args.target, x._local_tensor
    if local.dtype != args.op_dtype:
        local = local.to(args.op_dtype)
        source, target = with_dtype(source, args.op_dtype), with_dtype(target, args.op_dtype)
    if not same_layout(source, target):
        local = args.redistribute_local(local, source, target, args.async_op)
    if local.dtype != args.out_dtype:
        local, target = local.to(args.out_dtype), with_dtype(target, args.out_dtype)
    return as_dtensor(local, target, requires_grad)


def redistribute_with_gradient(x: DTensor, args: RedistributeArgs) -> DTensor:
    """Redistribute `x` and record its gradient."""
    return Redistribute.apply(x, args)


class Redistribute(torch.autograd.Function):
    """The autograd function. Its name is torch's, so that `grad_fn` is named alike."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, args: RedistributeArgs) -> DTensor:  # type: ignore[override]
        ctx.source, ctx.args = x._spec, args
        return redistribute_forward(x, args, x.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        args: RedistributeArgs = ctx.args
        spec, source = gradient._spec, ctx.source
        partial = [m for m, p in enumerate(spec.placements) if p.is_partial()] if spec.mesh == source.mesh else ()
        backward_args = RedistributeArgs(
            _with_meta(gradient_spec(source, partial), spec.tensor_meta),
            args.redistribute_local,
            args.backward_dtype,
            args.gradient_dtype,
            args.backward_dtype,
            gradient._local_tensor.dtype,
            args.async_op,
        )
        return Redistribute.apply(gradient, backward_args), None


def gradient_spec(spec: DTensorSpec, partial: Collection[int] = ()) -> DTensorSpec:
    """The spec of the gradient of a tensor with `spec`.

    Partial placements become replicas, except on the mesh dims `partial`: a gradient that became partial would have to
    be reduced later, which costs more than keeping replicas. The shard order is the default one: autograd detaches
    gradients, and torch's `detach` drops another order from the spec, but not from the data.
    """
    placements = tuple(Replicate() if p.is_partial() and m not in partial else p for m, p in enumerate(spec.placements))
    strided = spec.use_strided_shard_as_shard_order
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta, use_strided_shard_as_shard_order=strided)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    # DTensor.__init__ does nothing, but costs more than the rest. mypy knows the public constructor only.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]


def same_layout(a: DTensorSpec, b: DTensorSpec) -> bool:
    if a is b:
        return True
    # Types first: torch compares placements of different types by an exception, which takes 3 µs.
    equal = list(map(type, a.placements)) == list(map(type, b.placements)) and a.placements == b.placements
    equal = equal and a.shard_order == b.shard_order and a.mesh == b.mesh
    return equal and a.use_strided_shard_as_shard_order == b.use_strided_shard_as_shard_order


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec with another dtype in its `tensor_meta`."""
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype == dtype else _with_meta(spec, meta._replace(dtype=dtype))


def _with_meta(spec: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec:
    if spec.tensor_meta == meta:
        return spec
    return _cached_spec((spec, id(spec.mesh), meta), lambda: with_placements_and_meta(spec, spec.placements, meta))


def _target_spec(source: DTensorSpec, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    """The spec of the source's tensor with other placements, in the default shard order."""
    if placements == source.placements and mesh == source.mesh:
        # The strided shards of a view are not a shard order, so the source's own spec is kept.
        if any(isinstance(p, _StridedShard) for p in placements):
            return source
    return _cached_spec(
        (source, id(mesh), placements), lambda: _spec_from_template(mesh, placements, source.tensor_meta)
    )


def _spec_from_template(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta | None) -> DTensorSpec:
    """A copy of an earlier spec of the same placements: copying takes a third of the time of constructing one.

    Raises:
        ArgumentError: placements that do not fit the mesh or the tensor.
    """
    key = id(mesh), placements, None if meta is None else len(meta.shape)
    template = _templates.get(key)
    if template is None:
        if meta is not None:
            normalize_placements("placements", placements, mesh.ndim, len(meta.shape))
        template = _templates[key] = DTensorSpec(mesh, placements)
    spec = copy(template)
    spec.tensor_meta = meta
    return spec


_specs: ProcessGroupCache[Any, DTensorSpec] = ProcessGroupCache(2048)
_templates: ProcessGroupCache[tuple[int, tuple[Placement, ...], int | None], DTensorSpec] = ProcessGroupCache(2048)


def _cached_spec(key: Any, make: Callable[[], DTensorSpec]) -> DTensorSpec:
    """A spec from the cache: constructing and hashing one costs more than a barrier between ranks.

    Keys contain the id of the mesh: meshes of the same ranks are equal, but may have different process groups.
    """
    try:
        spec = _specs.get(key)
    except TypeError:  # symbolic sizes cannot be hashed: torch.compile is tracing
        return make()
    if spec is None:
        spec = _specs[key] = make()
    return spec
