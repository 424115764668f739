"""`ordered_redistribute_local_tensor`: plain local tensors between device orders that placements do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, UnsupportedError
from ...planner import Topology, whole_numbers
from ..executor.call import refuse_unplanned
from .autograd import with_placements
from .local import RedistributeOptions, requested_options
from .redistribute import cuts_of, given_order, move_local, ordered


def ordered_redistribute_local_tensor(
    tensor: torch.Tensor,
    src_spec: DTensorSpec,
    dst_spec: DTensorSpec,
    src_order: Any = None,
    dst_order: Any = None,
    *,
    transport: str | None = None,
    topology: Topology | None = None,
) -> torch.Tensor:
    """A plain local tensor carried from one spec and device order to another: for solvers that place parameters in
    orders that DTensor's placements do not say.

    Args:
        tensor: this rank's shard, of the shape that `src_spec` in `src_order` gives it.
        src_spec, dst_spec: specs with `tensor_meta`; strided shards among the placements say their order themselves.
        src_order, dst_order: for each tensor dim the mesh dims that cut it, the first cut first: a mapping, or torch's
            sequence of (tensor dim, mesh dims); or all mesh dims in one order, the first of which cuts first; None: the
            spec's own.

    Returns:
        This rank's shard under `dst_spec` in `dst_order`. Differentiable.

    Raises:
        ArgumentError, UnsupportedError, TransportError: as `redistribute`.
    """
    try:
        source, target = (
            _in_order(name, spec, order)
            for name, spec, order in (("src", src_spec, src_order), ("dst", dst_spec, dst_order))
        )
        options = requested_options(transport, topology)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Local.apply(tensor, source, target, options)
        return move_local(options, tensor, source, target, False)
    except (ArgumentError, UnsupportedError) as error:
        refuse_unplanned(error, [spec.mesh for spec in (src_spec, dst_spec) if isinstance(spec, DTensorSpec)])
        raise


class _Local(torch.autograd.Function):
    """`ordered_redistribute_local_tensor` of a tensor that requires gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, source: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
    ) -> torch.Tensor:
        ctx.source, ctx.target, ctx.options = source, target, options
        found = move_local(options, x, source, target, False)
        return found.view_as(found) if found is x else found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        # Plain tensors have no spec that could forget their order.
        here, there = (_replicated_where_partial(spec) for spec in (ctx.target, ctx.source))
        return _Local.apply(gradient, here, there, ctx.options), None, None, None


def _replicated_where_partial(spec: DTensorSpec) -> DTensorSpec:
    kept = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    return with_placements(spec, kept)


def _in_order(name: str, spec: DTensorSpec, order: Any) -> DTensorSpec:
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        raise ArgumentError(f"{name}_spec: {spec!r}; allowed: a DTensorSpec with tensor_meta")
    if order is None:
        return spec
    ndim = len(spec.tensor_meta.shape)
    try:
        entries: Any = order if isinstance(order, Mapping) else list(order)
        if not isinstance(entries, Mapping):
            if all(isinstance(m, int) for m in entries):
                cuts = cuts_of(spec.placements)
                entries = {d: [m for m in whole_numbers(f"{name}_order", entries) if m in c] for d, c in cuts.items()}
            else:
                entries = dict(tuple(entry) for entry in entries)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{name}_order: {order!r}; allowed: a mapping of tensor dims to mesh dims, or mesh dims in order"
        ) from None
    return DTensorSpec(
        spec.mesh, spec.placements, spec.tensor_meta, **ordered(spec.placements, given_order(entries), ndim)
    )
