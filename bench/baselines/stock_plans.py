"""torch's own plans: the layouts after each collective, and the elements that each collective brings a rank.

Counts are those of rings and true all-to-alls, as in NCCL. With `gloo=True`, an all-to-all is an all-gather and a
reduce-scatter is an all-reduce, as DTensor does on gloo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

import shardweave
from shardweave import Layout, Mesh, Topology
from shardweave.planner import ITEMSIZE, Placement
from shardweave.planner.layouts.index_sets import held_box
from shardweave.runtime.convert_specs import spec_of_layout


@dataclass(frozen=True)
class Counted:
    """A plan: the bytes of the rank that receives most, collectives, and peak memory ÷ the largest shard."""

    received: int
    collectives: int
    peak: float


@cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Without a process group: torch's planner needs the sizes alone."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), _init_backend=False, _rank=0)


@cache  # costs ask for every plan once for its bytes and once for its price
def planned(
    mesh: tuple[int, ...], shape: tuple[int, ...], source: Layout, target: Layout, graph: bool = False
) -> list[Layout]:
    """The layouts after each collective, the source first, by torch's greedy planner or by its graph planner, which it
    always uses for shard orders other than the default."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    before, after = (spec_of_layout(layout, _mesh(mesh), meta) for layout in (source, target))
    layouts = [source]
    for step in _gen_transform_infos_non_cached(before, after, use_graph_based_transform=graph):
        m, (_, placed) = step.mesh_dim, step.src_dst_placements
        placements = list(layouts[-1].placements)
        orders = {d: tuple(x for x in order if x != m) for d, order in layouts[-1].orders}
        placements[m] = _placement(placed)
        if isinstance(placed, Shard):
            orders[placed.dim] = (*orders.get(placed.dim, ()), m)
        layouts.append(Layout(placements, {d: order for d, order in orders.items() if order}))
    return layouts


def _placement(placed: object) -> Placement:
    if type(placed) is Shard:
        return shardweave.Shard(placed.dim)
    if type(placed) is Partial:
        return shardweave.Partial(placed.reduce_op)
    assert type(placed) is Replicate, f"torch plans a step to {placed}"
    return shardweave.Replicate()


def lengths(mesh: Mesh, shape: tuple[int, ...], layout: Layout, position: int) -> list[int]:
    return [b - a for a, b in held_box(shape, layout, mesh.shape, mesh.coordinate(position))]


def issued(mesh: Mesh, shape: tuple[int, ...], a: Layout, b: Layout, position: int, gloo: bool = False) -> int:
    """The elements that a rank receives by one of torch's collectives, which changes one mesh dim."""
    (m,) = (m for m in range(mesh.ndim) if a.placements[m] != b.placements[m])
    n, before, after = mesh.shape[m], a.placements[m], b.placements[m]
    if isinstance(before, shardweave.Replicate):
        return 0
    local, whole = lengths(mesh, shape, a, position), lengths(mesh, shape, b, position)
    if isinstance(before, shardweave.Partial):
        if not isinstance(after, shardweave.Shard):
            return 2 * (n - 1) * -(-math.prod(local) // n)
        local[after.dim] = -(-local[after.dim] // n)
        return (2 if gloo else 1) * (n - 1) * math.prod(local)
    assert isinstance(before, shardweave.Shard)
    local[before.dim] = -(-whole[before.dim] // n)
    if isinstance(after, shardweave.Shard):
        part = -(-local[after.dim] // n)
        local[after.dim] = n * part if gloo else part
    return (n - 1) * math.prod(local)


def count_stock(mesh: Mesh, shape: tuple[int, ...], layouts: Sequence[Layout], gloo: bool = False) -> Counted:
    received_by_rank = [[issued(mesh, shape, a, b, r, gloo) for a, b in pairwise(layouts)] for r in range(mesh.size)]
    sizes = [[math.prod(lengths(mesh, shape, layout, r)) for layout in layouts] for r in range(mesh.size)]
    peaks = [
        own[0] + (own[i] if i else 0) + max(own[i + 1], steps[i])
        for own, steps in zip(sizes, received_by_rank, strict=True)
        for i in range(len(steps))
    ]
    most = max(max(own[0], own[-1]) for own in sizes)
    collectives = sum(any(steps) for steps in zip(*received_by_rank, strict=True))
    return Counted(max(map(sum, received_by_rank)) * 4, collectives, max(peaks) / most)


def stock_layouts(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> list[Layout] | None:
    """The layouts after each of torch's collectives, the source first; None if its planner has no plan."""
    # torch would issue collectives along mesh dims of one rank.
    source, target = (layout.without_size_one(mesh.shape) for layout in (source, target))
    try:
        return planned(mesh.shape, shape, source, target)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return None


@cache
def stock_us(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
) -> float | None:
    """The microseconds of torch's plan: the sum over its steps, in one call, each priced as the cheapest program that
    does it."""
    layouts = stock_layouts(mesh, shape, source, target)
    if layouts is None:
        return None
    steps = replace(topology, call_us=0.0)
    us = sum(shardweave.redistribute_cost(mesh, shape, dtype, a, b, steps) for a, b in pairwise(layouts))
    return us + topology.call_us if us else 0.0


def sampled(mesh: Mesh) -> list[int]:
    """Up to five mesh positions, different along every mesh dim, for which bytes are counted."""
    return sorted({0, min(1, mesh.size - 1), mesh.size // 3, mesh.size // 2, mesh.size - 1})


def stock_received(mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout) -> int:
    """The bytes received by the sampled rank that receives most, by torch's collectives with their padding."""
    layouts = stock_layouts(mesh, shape, source, target)
    assert layouts is not None
    return ITEMSIZE[dtype] * max(
        sum(issued(mesh, shape, a, b, rank) for a, b in pairwise(layouts)) for rank in sampled(mesh)
    )
