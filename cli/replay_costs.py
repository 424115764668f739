"""The costs of a trace's redistributions on a topology: the planner's costs of torch's plans and of shardweave's.

Nothing is run or measured, so a program may have any number of ranks. torch's plan is the steps that its own planner
makes, each priced as the cheapest program that does it.
"""

from __future__ import annotations

import shardweave

from ..bench.baselines.stock_plans import sampled, stock_layouts, stock_received, stock_us
from ..bench.workloads.trace_cases import Case, meshes_of
from ..planner import Layout, StridedShard, Topology, plan
from ..planner.layouts.mesh import union_mesh
from ..runtime.tracing.trace_file import Entry
from .replay_report import Compared


def computed_costs(case: Case, topology: Topology) -> Compared:
    """The costs of a case; of several meshes, those of the most expensive one."""
    by_nodes = {_nodes(entry, topology): entry for entry in case.entries}  # meshes on the same nodes cost the same
    ours = [_ours(entry, topology) for entry in by_nodes.values()]
    stock = [_stock(entry, topology) for entry in by_nodes.values()]
    known = [cost for cost in stock if cost is not None]
    us, nbytes = (max(figures) for figures in zip(*ours, strict=True))
    if len(known) < len(stock):
        return Compared(case, None, us / 1e6, None, nbytes)
    return Compared(case, max(us for us, _ in known) / 1e6, us / 1e6, max(n for _, n in known), nbytes)


def _nodes(entry: Entry, topology: Topology) -> tuple[int, ...]:
    """The nodes of the ranks, numbered by first appearance."""
    numbers: dict[int, int] = {}
    ranks = (rank for mesh in meshes_of(entry) for rank in mesh.rank_array.tolist())
    return tuple(numbers.setdefault(topology.node_of(rank), len(numbers)) for rank in ranks)


def _ours(entry: Entry, topology: Topology) -> tuple[float, int]:
    """The microseconds and the bytes received by shardweave's plan."""
    mesh, other = meshes_of(entry)
    request = entry.shape, entry.dtype, entry.source, entry.target
    if mesh == other:
        programs = [plan(mesh, *request, rank=position, topology=topology) for position in sampled(mesh)]
        received = max(one.bytes_received[0] for one in programs)
        return shardweave.redistribute_cost(mesh, *request, topology), received
    programs = [
        plan(mesh, *request, target_mesh=other, rank=position, topology=topology)
        for position in sampled(union_mesh(mesh, other))
    ]
    return max(one.cost_us or 0.0 for one in programs), max(max(one.bytes_received) for one in programs)


def _stock(entry: Entry, topology: Topology) -> tuple[float, int] | None:
    """The microseconds and the bytes received by torch's plan; None if it has none or its cost is unknown."""
    mesh, other = meshes_of(entry)
    source, target = Layout.parse(entry.source, mesh.shape), Layout.parse(entry.target, other.shape)
    if mesh != other:
        return None
    layouts = stock_layouts(mesh, entry.shape, source, target)
    if layouts is None or any(isinstance(p, StridedShard) for layout in layouts for p in layout.placements):
        return None
    request = mesh, entry.shape, entry.dtype, source, target
    us = stock_us(*request, topology)
    return None if us is None else (us, stock_received(*request))
