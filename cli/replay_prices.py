"""What a trace's redistributions cost on a topology, by the planner's prices of torch's plans and of shardweave's.

No rank is started and nothing is measured, so programs of any number of ranks can be looked at. Prices and bytes are
those of `python -m shardweave.bench.planning.projection`.
"""

from __future__ import annotations

import shardweave

from ..bench.planning.projection import received, sampled, stock_layouts, stock_received, stock_us
from ..bench.workloads.trace_cases import Case, meshes_of
from ..planner import Layout, StridedShard, Topology, plan
from ..planner.cross_mesh_exchange import union
from ..runtime.tracing.trace import Entry
from .replay_report import Compared


def priced(case: Case, topology: Topology) -> Compared:
    """Of several meshes, what the one costs that costs most."""
    placed = {_nodes(entry, topology): entry for entry in case.entries}  # meshes that lie on nodes alike cost the same
    ours = [_ours(entry, topology) for entry in placed.values()]
    stock = [_stock(entry, topology) for entry in placed.values()]
    known = [found for found in stock if found is not None]
    us, nbytes = (max(figures) for figures in zip(*ours, strict=True))
    if len(known) < len(stock):
        return Compared(case, None, us / 1e6, None, nbytes)
    return Compared(case, max(us for us, _ in known) / 1e6, us / 1e6, max(n for _, n in known), nbytes)


def _nodes(entry: Entry, topology: Topology) -> tuple[int, ...]:
    """The nodes of its ranks, by their order of appearance."""
    numbers: dict[int, int] = {}
    ranks = (rank for mesh in meshes_of(entry) for rank in mesh.rank_array.tolist())
    return tuple(numbers.setdefault(topology.node_of(rank), len(numbers)) for rank in ranks)


def _ours(entry: Entry, topology: Topology) -> tuple[float, int]:
    """Microseconds, and bytes received."""
    mesh, other = meshes_of(entry)
    asked = entry.shape, entry.dtype, entry.source, entry.target
    if mesh == other:
        return shardweave.redistribute_cost(mesh, *asked, topology), received(entry, topology)
    programs = [
        plan(mesh, *asked, target_mesh=other, rank=position, topology=topology)
        for position in sampled(union(mesh, other))
    ]
    return max(one.cost_us or 0.0 for one in programs), max(max(one.bytes_received) for one in programs)


def _stock(entry: Entry, topology: Topology) -> tuple[float, int] | None:
    mesh, other = meshes_of(entry)
    source, target = Layout.parse(entry.source, mesh.shape), Layout.parse(entry.target, other.shape)
    if mesh != other:
        return None
    stops = stock_layouts(mesh, entry.shape, source, target)
    if stops is None or any(isinstance(placed, StridedShard) for stop in stops for placed in stop.placements):
        return None
    asked = mesh, entry.shape, entry.dtype, source, target
    us = stock_us(*asked, topology)
    return None if us is None else (us, stock_received(*asked))
