"""What a trace's redistributions cost on a topology, by the planner's prices of torch's plans and of shardweave's.

No rank is started and nothing is measured, so programs of any number of ranks can be looked at. Prices and bytes are
those of `python -m shardweave.bench.projection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import shardweave

from ..planner import Layout, StridedShard, Topology, plan
from ..planner.crossing import union
from ..planner.explanation import format_bytes
from ..runtime.trace import Entry, Trace
from .projection import received, sampled, stock_received, stock_stops, stock_us
from .replay_cases import Case, meshes_of
from .replay_report import case_dict, ratio, redistributions, saved, seconds, show_cases, show_end, together


@dataclass(frozen=True)
class Priced:
    """A case, with seconds and bytes of a call on the rank that has most of them, of bytes among a few ranks.

    Attributes:
        stock, stock_bytes: None where torch has no plan, or one through strided shards that are no shard order.
    """

    case: Case
    stock: float | None
    ours: float
    stock_bytes: int | None
    our_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            **case_dict(self.case),
            "torch_s": self.stock,
            "torch_bytes_received": self.stock_bytes,
            "shardweave_s": self.ours,
            "shardweave_bytes_received": self.our_bytes,
        }


def priced(case: Case, topology: Topology) -> Priced:
    """Of several meshes, what the one costs that costs most."""
    placed = {_nodes(entry, topology): entry for entry in case.entries}  # meshes that lie on nodes alike cost the same
    ours = [_ours(entry, topology) for entry in placed.values()]
    stock = [_stock(entry, topology) for entry in placed.values()]
    known = [found for found in stock if found is not None]
    us, nbytes = (max(figures) for figures in zip(*ours, strict=True))
    if len(known) < len(stock):
        return Priced(case, None, us / 1e6, None, nbytes)
    return Priced(case, max(us for us, _ in known) / 1e6, us / 1e6, max(n for _, n in known), nbytes)


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
    stops = stock_stops(mesh, entry.shape, source, target)
    if stops is None or any(isinstance(placed, StridedShard) for stop in stops for placed in stop.placements):
        return None
    asked = mesh, entry.shape, entry.dtype, source, target
    us = stock_us(*asked, topology)
    return None if us is None else (us, stock_received(*asked))


def show_priced(
    console: Console, trace: Trace, found: Sequence[Priced], topology: Topology, rows: int, left_out: str
) -> None:
    """What is saved most comes first.

    Args:
        rows: that the table has at most; sums are of all that were priced.
        left_out: how many of the trace's redistributions were not priced, and why; none: all were.
    """
    first = sorted(found, key=lambda one: (-round(saved(one), 9), -seconds(one)))[:rows]
    number = f"{len(first)} of {redistributions(found)}" if len(first) < len(found) else redistributions(found)
    of = f", of {len(found)} priced{left_out}" if left_out else ""
    columns = ("torch\nreceives", "shardweave\nreceives", "torch\nms", "shardweave\nms", "ratio", "saved\nms")
    cells = [
        (
            one.case,
            (
                "-" if one.stock_bytes is None else format_bytes(one.stock_bytes),
                format_bytes(one.our_bytes),
                "-" if one.stock is None else f"{one.stock * 1e3:.3f}",
                f"{one.ours * 1e3:.3f}",
                ratio(one),
                "-" if one.stock is None else f"{saved(one) * 1e3:.3f}",
            ),
        )
        for one in first
    ]
    title = f"{number}{left_out}, simulated on {topology.name}: nothing was run or measured"
    show_cases(console, title, columns, cells)
    stock, ours = together(found)
    console.print(
        f"All calls of a rank, of {trace.world_size}, simulated on {topology.name}{of}: torch {stock * 1e3:.1f} ms, "
        f"shardweave {ours * 1e3:.1f} ms. These are the planner's prices: of torch's plan each step as the cheapest "
        f"program that does it.",
        markup=False,
    )
    if any(one.stock is None for one in found):
        console.print("-: torch has no plan, as between meshes, or one through strided shards that cannot be priced.")
    show_end(console, trace, found, f", simulated{of}", "torch without a price")
