"""shardweave's costs in place of torch's, by which DTensor's sharding propagation chooses between strategies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch.distributed.tensor._collective_utils as torch_costs
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ... import planner
from ...errors import ShardweaveError
from ..convert_specs import dtype_name, layout_of_spec, mesh_of
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..statistics import stats
from .bindings import Bindings
from .partials import plain_requests

stock_redistribute_cost: Callable[[DTensorSpec, DTensorSpec], float] = torch_costs.redistribute_cost
_costs: ProcessGroupCache[tuple[DTensorSpec, DTensorSpec], float] = ProcessGroupCache(65536)
_topology: planner.Topology | None = None


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """The cost of a redistribution on the topology of `install`. Replaces torch's function of the same name and
    signature.

    Returns:
        Microseconds, as torch's. 0 where nothing is communicated: torch counts in the same way, and by it tells free
        implicit redistributions from others. torch's own number, counted in `stats().delegations` under "price: " and a
        reason, where shardweave has none: another mesh, a mesh without this rank, a spec without `tensor_meta`,
        symbolic shapes, targets that torch refuses (infinity), unsupported placements and dtypes.
    """
    if current_spec.mesh == target_spec.mesh and (
        current_spec.is_replicated()
        or (current_spec.placements == target_spec.placements and current_spec.shard_order == target_spec.shard_order)
    ):
        return 0.0
    reason = _why_no_cost(current_spec, target_spec)
    if reason is None:
        key = (current_spec, target_spec)
        cost = _costs.get(key)
        if cost is not None:
            return cost
        forget_dead_groups()
        try:
            cost = _costs[key] = _compute_cost(current_spec, target_spec)
            return cost
        except ShardweaveError as error:
            reason = str(error)
    stats().delegations[f"price: {reason}"] += 1
    return stock_redistribute_cost(current_spec, target_spec)


def _why_no_cost(current: DTensorSpec, target: DTensorSpec) -> str | None:
    """The reason why shardweave has no cost for a redistribution, or None."""
    if current.mesh != target.mesh:
        return "another mesh, which torch refuses"
    if current.mesh.get_coordinate() is None:
        return "this rank is not in the mesh"
    if current.tensor_meta is None:
        return "the spec has no tensor_meta"
    splits = [getattr(p, "split_factor", 1) for p in (*current.placements, *target.placements)]
    if any(type(n) is not int for n in (*current.tensor_meta.shape, *current.tensor_meta.stride, *splits)):
        return "symbolic shape"  # cannot be hashed
    for a, b in zip(current.placements, target.placements, strict=False):
        if b.is_partial() and a != b and not a.is_replicate():
            return "shard or another op to partial, which torch refuses"
    return None


def _compute_cost(current: DTensorSpec, target: DTensorSpec) -> float:
    return sum(_cost_of(request.current, request.target) for request in plain_requests(current, target))


def _cost_of(current: DTensorSpec, target: DTensorSpec) -> float:
    """The cost of a request with plain placements."""
    assert current.tensor_meta is not None and _topology is not None
    mesh, shape, dtype = mesh_of(current.mesh), tuple(current.tensor_meta.shape), dtype_name(current.tensor_meta.dtype)
    source, destination = layout_of_spec(current), layout_of_spec(target)
    cost = planner.redistribute_cost(mesh, shape, dtype, source, destination, _topology)
    change = planner.layout_change(
        mesh, dtype, source.without_size_one(mesh.shape), destination.without_size_one(mesh.shape)
    )
    return cost if planner.communicates(change, shape) else 0.0


_bindings = Bindings((stock_redistribute_cost, redistribute_cost))


@cache
def cache_clearer() -> Callable[[], None]:
    """torch's function that clears DTensor's sharding propagation cache. Its module imports dynamo and inductor, which
    takes as long as importing DTensor, so it is imported when it is first needed."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    return _clear_sharding_prop_cache


def set_cost_topology(topology: planner.Topology | None) -> None:
    """Use shardweave's costs on a topology, or torch's for None, in every module that binds the function.

    Clears DTensor's sharding propagation cache of the calling thread, which holds decisions made by other costs.
    """
    global _topology
    if topology == _topology:
        return
    clear_cache = cache_clearer()
    _topology = topology
    _costs.clear()
    _bindings.bind(stock_redistribute_cost if topology is None else redistribute_cost)
    clear_cache()
