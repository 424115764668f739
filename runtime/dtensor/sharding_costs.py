"""shardweave's prices in the place of torch's, where DTensor's sharding propagation chooses between strategies."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed.tensor._collective_utils as torch_costs
import torch.distributed.tensor.debug as torch_debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ...errors import ShardweaveError
from ...planner import Topology, layout_change
from ...planner import redistribute_cost as cost_on_mesh
from ..cache import forget_dead_groups, kept_with_group
from ..convert import dtype_name, layout_of_spec, mesh_of
from ..statistics import stats
from .partials import plain_request

_NAME = "redistribute_cost"
_KEPT = 65536
stock_redistribute_cost: Callable[[DTensorSpec, DTensorSpec], float] = torch_costs.redistribute_cost
_prices: dict[tuple[DTensorSpec, DTensorSpec], float] = kept_with_group({})
_topology: Topology | None = None


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """torch's function of the same name and signature, with shardweave's price on the topology of `install`.

    Returns:
        Microseconds, as torch's; 0 where nothing has to be communicated, which is how torch counts and how it tells
        implicit redistributions that are free from those that are not. torch's own number, counted in
        `stats().delegations` under "price: " and a reason, where shardweave has none: another mesh, a mesh without this
        rank, a spec without `tensor_meta`, symbolic shapes, targets that torch refuses (infinity), placements and
        dtypes that programs do not carry.
    """
    if current_spec.mesh == target_spec.mesh and (
        current_spec.is_replicated()
        or (current_spec.placements == target_spec.placements and current_spec.shard_order == target_spec.shard_order)
    ):
        return 0.0
    reason = _why_not_priced(current_spec, target_spec)
    if reason is None:
        key = (current_spec, target_spec)
        price = _prices.get(key)
        if price is not None:
            return price
        forget_dead_groups()
        try:
            price = _price(current_spec, target_spec)
        except ShardweaveError as error:
            reason = str(error)
        else:
            if len(_prices) >= _KEPT:
                _prices.clear()
            _prices[key] = price
            return price
    stats().delegations[f"price: {reason}"] += 1
    return stock_redistribute_cost(current_spec, target_spec)


def _why_not_priced(current: DTensorSpec, target: DTensorSpec) -> str | None:
    if current.mesh != target.mesh:
        return "another mesh, which torch refuses"
    if current.mesh.get_coordinate() is None:
        return "this rank is not in the mesh"
    if current.tensor_meta is None:
        return "the spec has no tensor_meta"
    splits = [getattr(p, "split_factor", 1) for p in (*current.placements, *target.placements)]
    if any(type(n) is not int for n in (*current.tensor_meta.shape, *current.tensor_meta.stride, *splits)):
        return "symbolic shape"  # cannot be hashed either
    for a, b in zip(current.placements, target.placements, strict=False):
        if b.is_partial() and a != b and not a.is_replicate():
            return "shard or another op to partial, which torch refuses"
    return None


def _price(current: DTensorSpec, target: DTensorSpec) -> float:
    if plain := plain_request(current, target):
        current, target = plain.current, plain.target
    assert current.tensor_meta is not None and _topology is not None
    mesh, shape, dtype = mesh_of(current.mesh), tuple(current.tensor_meta.shape), dtype_name(current.tensor_meta.dtype)
    source, goal = layout_of_spec(current), layout_of_spec(target)
    price = cost_on_mesh(mesh, shape, dtype, source, goal, _topology)
    change = layout_change(mesh, dtype, source.without_size_one(mesh.shape), goal.without_size_one(mesh.shape))
    return price if change.communicates(shape) else 0.0


def priced_on() -> Topology | None:
    """The topology that DTensor's candidates are priced on; None: torch prices them."""
    return _topology


def price_on(topology: Topology | None) -> None:
    """Let DTensor's candidates be priced on a topology, or by torch: wherever torch has bound the name.

    What DTensor has decided by other prices is forgotten, in the calling thread.
    """
    global _topology
    if topology == _topology:
        return
    _topology = topology
    _prices.clear()
    ours = topology is not None
    before, after = stock_redistribute_cost, redistribute_cost
    if not ours:
        before, after = after, before
    # Which modules bind it differs between torch 2.11, 2.12 and 2.13 (_ops.utils and _utils in 2.13).
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor") and vars(module).get(_NAME) is before:
            setattr(module, _NAME, after)
    torch_debug._clear_sharding_prop_cache()
