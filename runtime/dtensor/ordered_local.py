"""`ordered_redistribute_local_tensor`: redistribution of local tensors between shard orders that placements do not
express."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ArgumentError, UnsupportedError
from ...planner import Topology, TopologyName, whole_numbers
from ..convert_specs import with_placements
from ..executor.call import refuse_unplanned
from ..transports.choose_transport import TransportName
from .in_graph import call_in_graph, remember
from .redistribute import cuts_of, redistribute_local, shard_order_argument, sorted_orders
from .redistribute_options import RedistributeOptions, call_options


def ordered_redistribute_local_tensor(
    tensor: torch.Tensor,
    source_spec: DTensorSpec,
    target_spec: DTensorSpec,
    source_order: Any = None,
    target_order: Any = None,
    *,
    transport: TransportName | None = None,
    topology: Topology | TopologyName | None = None,
) -> torch.Tensor:
    """Redistribute a local tensor from one spec and shard order to another: for solvers that place parameters in orders
    that DTensor placements do not express.

    Args:
        tensor: this rank's shard, of the shape that `source_spec` in `source_order` gives it.
        source_spec, target_spec: specs with `tensor_meta`; strided shards among the placements imply their order.
        source_order, target_order: the mesh dims that shard each tensor dim, in the order of the cuts: a mapping,
            torch's sequence of (tensor dim, mesh dims), or one sequence of all mesh dims that applies to every tensor
            dim. None: the order of the spec.
        transport, topology: as for `redistribute`.

    Returns:
        This rank's shard under `target_spec` in `target_order`. Differentiable by backward; torch refuses forward-mode
        derivatives and transforms of `torch.func`.

    Raises:
        ArgumentError, UnsupportedError, TransportError: as `redistribute`.
    """
    if torch.compiler.is_dynamo_compiling():
        orders = source_order, target_order
        call = remember(
            ordered_redistribute_local_tensor, source_spec, target_spec, *orders, transport=transport, topology=topology
        )
        return call_in_graph(tensor, call)
    try:
        source, target = (
            _in_order(name, spec, order)
            for name, spec, order in (("source", source_spec, source_order), ("target", target_spec, target_order))
        )
        options = call_options(transport, topology)
        return _OrderedRedistribute.apply(tensor, source, target, options)
    except (ArgumentError, UnsupportedError) as error:
        refuse_unplanned(error, [spec.mesh for spec in (source_spec, target_spec) if isinstance(spec, DTensorSpec)])
        raise


class _OrderedRedistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, source: DTensorSpec, target: DTensorSpec, options: RedistributeOptions
    ) -> torch.Tensor:
        ctx.source, ctx.target, ctx.options = source, target, options
        out = redistribute_local(options, x, source, target, False)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        # Unlike a DTensor's, the shard order of a plain tensor cannot be dropped by torch's `detach`.
        source, target = (_replicated_where_partial(spec) for spec in (ctx.target, ctx.source))
        return _OrderedRedistribute.apply(gradient, source, target, ctx.options), None, None, None


def _replicated_where_partial(spec: DTensorSpec) -> DTensorSpec:
    return with_placements(spec, tuple(Replicate() if p.is_partial() else p for p in spec.placements))


def _in_order(name: str, spec: DTensorSpec, order: Any) -> DTensorSpec:
    """The spec in the shard order that `order` gives in any of the accepted forms."""
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
    argument = shard_order_argument(spec.placements, sorted_orders(entries), ndim)
    return DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta, **argument)
