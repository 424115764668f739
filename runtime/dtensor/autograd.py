"""A DTensor carried from its layout to another, and its gradient back: any number of times."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..cache import kept_with_group

Move = Callable[[torch.Tensor, DTensorSpec, DTensorSpec, bool], torch.Tensor]
"""A local tensor from one spec to another; whether the caller would wait for it later."""


class RedistributeArgs(NamedTuple):
    """How a DTensor is carried over.

    Attributes:
        target: the spec of the result, but for its dtype.
        move: what moves local tensors.
        op_dtype, out_dtype: what is moved, and what it becomes.
        backward_dtype, gradient_dtype: the same for its gradient.
    """

    target: DTensorSpec
    move: Move
    op_dtype: torch.dtype
    out_dtype: torch.dtype
    backward_dtype: torch.dtype
    gradient_dtype: torch.dtype
    async_op: bool = False


def redistribute_forward(x: DTensor, args: RedistributeArgs, requires_grad: bool = False) -> DTensor:
    """`x` as asked, outside of autograd."""
    source, target, local = x._spec, args.target, x._local_tensor
    if local.dtype != args.op_dtype:
        local = local.to(args.op_dtype)
        source, target = with_dtype(source, args.op_dtype), with_dtype(target, args.op_dtype)
    if not same_layout(source, target):
        local = args.move(local, source, target, args.async_op)
    if local.dtype != args.out_dtype:
        local, target = local.to(args.out_dtype), with_dtype(target, args.out_dtype)
    return as_dtensor(local, target, requires_grad)


def redistribute_with_gradient(x: DTensor, args: RedistributeArgs) -> DTensor:
    return Redistribute.apply(x, args)


class Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, args: RedistributeArgs) -> DTensor:  # type: ignore[override]
        ctx.source, ctx.args = x._spec, args
        return redistribute_forward(x, args, x.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        args: RedistributeArgs = ctx.args
        spec, source = gradient._spec, ctx.source
        partial = [m for m, p in enumerate(spec.placements) if p.is_partial()] if spec.mesh == source.mesh else ()
        back = RedistributeArgs(
            _with_meta(spec_of_gradient(source, partial), spec.tensor_meta),
            args.move,
            args.backward_dtype,
            args.gradient_dtype,
            args.backward_dtype,
            gradient._local_tensor.dtype,
            args.async_op,
        )
        return Redistribute.apply(gradient, back), None


def spec_of_gradient(spec: DTensorSpec, partial: Collection[int] = ()) -> DTensorSpec:
    """The layout of a gradient of what `spec` says.

    Replicated where that is partial, but for the mesh dims `partial`: made partial again it would have to be reduced
    later, which costs more than keeping it. In the default order: autograd detaches gradients, and torch's `detach`
    forgets any other order, but not the data's.
    """
    kept = tuple(Replicate() if p.is_partial() and m not in partial else p for m, p in enumerate(spec.placements))
    strided = spec.use_strided_shard_as_shard_order
    return DTensorSpec(spec.mesh, kept, spec.tensor_meta, use_strided_shard_as_shard_order=strided)


def as_dtensor(local: torch.Tensor, target: DTensorSpec, requires_grad: bool = False) -> DTensor:
    # Without __init__, which does nothing but costs more than the rest. mypy knows the public constructor only.
    return DTensor.__new__(DTensor, local, target, requires_grad=requires_grad)  # type: ignore[call-arg]


def is_in(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def empty_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What a rank that is not in the mesh of a DTensor holds of it."""
    assert spec.tensor_meta is not None
    return local.new_empty((0,) * max(len(spec.tensor_meta.shape), 1))


def same_layout(a: DTensorSpec, b: DTensorSpec) -> bool:
    if a is b:
        return True
    # Their types first: torch compares placements of two types by way of an exception, in 3 µs.
    alike = list(map(type, a.placements)) == list(map(type, b.placements)) and a.placements == b.placements
    alike = alike and a.shard_order == b.shard_order and a.mesh == b.mesh
    return alike and a.use_strided_shard_as_shard_order == b.use_strided_shard_as_shard_order


def with_placements(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """The same order of the same shards, with something else where nothing is cut."""
    return _remade(spec, placements, spec.tensor_meta)


def _remade(spec: DTensorSpec, placements: tuple[Placement, ...], meta: TensorMeta | None) -> DTensorSpec:
    strided = spec.use_strided_shard_as_shard_order
    order = {} if strided else {"shard_order": spec.shard_order}
    return DTensorSpec(spec.mesh, placements, meta, use_strided_shard_as_shard_order=strided, **order)  # type: ignore[arg-type]


def _with_meta(spec: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec:
    if spec.tensor_meta == meta:
        return spec
    return _kept((spec, id(spec.mesh), meta), lambda: _remade(spec, spec.placements, meta))


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same layout of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return spec if meta.dtype == dtype else _with_meta(spec, meta._replace(dtype=dtype))


def kept_spec(source: DTensorSpec, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    """The spec of a tensor with other placements, in the default order."""
    return _kept((source, id(mesh), placements), lambda: _of_form(mesh, placements, source.tensor_meta))


def _of_form(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta | None) -> DTensorSpec:
    """A spec like the last one of these placements: to copy one takes a third of the time that its checks take."""
    key = id(mesh), placements
    like = _forms.get(key)
    if like is None:
        if len(_forms) >= _KEPT_SPECS:
            _forms.pop(next(iter(_forms)))
        like = _forms[key] = DTensorSpec(mesh, placements)
    spec = copy(like)
    spec.tensor_meta = meta
    return spec


_KEPT_SPECS = 2048
_specs: dict[Any, DTensorSpec] = kept_with_group({})
_forms: dict[tuple[int, tuple[Placement, ...]], DTensorSpec] = kept_with_group({})


def _kept(key: Any, make: Callable[[], DTensorSpec]) -> DTensorSpec:
    """A spec made once: to build and to hash one costs more than a meeting.

    Keys name the mesh itself as well: meshes of the same ranks are equal, but their process groups may differ.
    """
    try:
        found = _specs.get(key)
    except TypeError:  # symbolic sizes: torch.compile is tracing
        return make()
    if found is None:
        found = make()
        if len(_specs) >= _KEPT_SPECS:
            _specs.pop(next(iter(_specs)))
        _specs[key] = found
    return found
