"""torch's planners and shardweave's over all pairs of layouts, side by side: bytes, collectives, peak and price.

`python -m shardweave.bench.plans --out FILE` plans and counts, and times the planning; nothing is communicated. torch's
plans are read from its own planner on a fake process group, and its collectives are counted as they are issued: shards
padded to the largest of their group, all-reduce as reduce-scatter and all-gather, all-to-all as a true one.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

import shardweave
from shardweave import Layout, Link, Mesh, Topology
from shardweave.planner import Placement, plan
from shardweave.planner.cost import prices
from shardweave.planner.exchange import Change
from shardweave.planner.index_sets import held_box

from . import plan_times

MESHES = ((2, 2), (2, 4), (2, 2, 2), (4, 2, 2))
EVEN = ((4096,), (1024, 512), (256, 128, 64))
UNEVEN = ((17,), (9, 13), (7, 5, 11))
TOPOLOGIES = (
    shardweave.NVLINK_NODE,
    replace(shardweave.NVLINK_INFINIBAND, name="2 nodes × 8"),
    replace(shardweave.NVLINK_INFINIBAND, name="2 nodes × 8, slow network", network=Link(50.0, 1.0, False, 10.0)),
)
_ROUNDING = 0.005  # µs: prices are whole nanoseconds a step


@dataclass(frozen=True)
class Counted:
    """A plan of one side: most bytes that a rank receives, collectives, and the peak by the largest shard."""

    received: int
    collectives: int
    peak: float
    stops: tuple[Layout, ...]


def layouts(mesh_dims: int, tensor_dims: int) -> list[Layout]:
    """Every layout without partial, in the default order: what torch's placements say."""
    options: list[Placement] = [shardweave.Replicate(), *map(shardweave.Shard, range(tensor_dims))]
    return [Layout(chosen) for chosen in product(options, repeat=mesh_dims)]


class Stock:
    """torch's planner on a mesh that nobody else is in."""

    def __init__(self, shape: tuple[int, ...], graph: bool) -> None:
        self.mesh, self.graph = init_device_mesh("cpu", shape), graph

    @cache  # noqa: B019 - the report asks for every plan once for its bytes and once for its prices
    def stops(self, shape: tuple[int, ...], source: Layout, target: Layout) -> list[Layout]:
        """The layouts that its collectives lead through."""
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
        before, after = (
            DTensorSpec(
                self.mesh,
                tuple(Shard(p.dim) if isinstance(p, shardweave.Shard) else Replicate() for p in layout.placements),
                tensor_meta=meta,
            )
            for layout in (source, target)
        )
        found = [source]
        for step in _gen_transform_infos_non_cached(before, after, use_graph_based_transform=self.graph):
            m, (_, placed) = step.mesh_dim, step.src_dst_placements
            placements = list(found[-1].placements)
            orders = {d: tuple(x for x in order if x != m) for d, order in found[-1].orders}
            placements[m] = shardweave.Shard(placed.dim) if isinstance(placed, Shard) else shardweave.Replicate()
            if isinstance(placed, Shard):
                orders[placed.dim] = (*orders.get(placed.dim, ()), m)
            found.append(Layout(placements, {d: order for d, order in orders.items() if order}))
        return found


@cache
def stock(mesh_shape: tuple[int, ...], graph: bool) -> Stock:
    return Stock(mesh_shape, graph)


def lengths(mesh: Mesh, shape: tuple[int, ...], layout: Layout, position: int) -> list[int]:
    return [b - a for a, b in held_box(shape, layout, mesh.shape, mesh.coordinate(position))]


def issued(mesh: Mesh, shape: tuple[int, ...], a: Layout, b: Layout, position: int) -> int:
    """Elements that one of torch's collectives brings a rank: it changes one mesh dim."""
    (m,) = (m for m in range(mesh.ndim) if a.placements[m] != b.placements[m])
    n, before, after = mesh.shape[m], a.placements[m], b.placements[m]
    if not isinstance(before, shardweave.Shard):
        return 0
    local, parts = lengths(mesh, shape, a, position), [before.dim]
    whole = lengths(mesh, shape, b, position)
    local[before.dim] = -(-whole[before.dim] // n)
    if isinstance(after, shardweave.Shard):
        local[after.dim] = -(-local[after.dim] // n)
        parts.append(after.dim)
    return (n - 1) * math.prod(local)


def count_stock(mesh: Mesh, shape: tuple[int, ...], stops: Sequence[Layout]) -> Counted:
    came = [[issued(mesh, shape, a, b, r) for a, b in pairwise(stops)] for r in range(mesh.size)]
    sizes = [[math.prod(lengths(mesh, shape, stop, r)) for stop in stops] for r in range(mesh.size)]
    peaks = [
        own[0] + (own[i] if i else 0) + max(own[i + 1], steps[i])
        for own, steps in zip(sizes, came, strict=True)
        for i in range(len(steps))
    ]
    most = max(max(own[0], own[-1]) for own in sizes)
    collectives = sum(any(steps) for steps in zip(*came, strict=True))
    return Counted(max(map(sum, came)) * 4, collectives, max(peaks) / most, tuple(stops))


def count_ours(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[Counted, int]:
    """And the bound: the most that a rank must receive."""
    program = plan(mesh, shape, "float32", source, target)
    assert program.bytes_bound is not None
    most = max(program.local_bytes(layout, r) for layout in (source, target) for r in range(mesh.size))
    stops = (source, *(step.target for step in program.steps))
    peak = max(program.peak_bytes) / most
    return Counted(max(program.bytes_received), program.exchanges, peak, stops), max(program.bytes_bound)


def spread(shape: tuple[int, ...]) -> Mesh:
    """A mesh with its first half on a node of 8 and its second half on the next."""
    half = math.prod(shape) // 2
    return Mesh(shape, ranks=(*range(half), *range(8, 8 + half)))


def us(mesh: Mesh, shape: tuple[int, ...], routes: Sequence[Sequence[Layout]], topology: Topology) -> list[float]:
    """The price of exchanges from stop to stop, of some routes; torch's collectives between these move no less."""
    steps = [Change(mesh, shape, "float32", a, b, topology.node_size) for stops in routes for a, b in pairwise(stops)]
    left = iter(prices(steps, topology, bounds=False))
    return [sum(next(left).us for _ in pairwise(stops)) for stops in routes]


def percentiles(values: Sequence[float]) -> str:
    ranked = sorted(values)
    return (
        f"{statistics.median(ranked):.2f} | {statistics.mean(ranked):.2f} | {ranked[int(0.9 * len(ranked))]:.1f} | "
        f"{ranked[-1]:.1f} | {sum(v <= 1 for v in ranked) / len(ranked):.1%}"
    )


def compare(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Rows of the first table: bytes, collectives, peak."""
    found: dict[str, list[tuple[Counted, int]]] = {"torch greedy": [], "torch graph": [], "shardweave": []}
    idle = dict.fromkeys(found, 0)
    for mesh_shape in MESHES:
        mesh, greedy, graph = Mesh(mesh_shape), stock(mesh_shape, False), stock(mesh_shape, True)
        for shape in shapes:
            for source, target in product(layouts(mesh.ndim, len(shape)), repeat=2):
                if source == target:
                    continue
                ours, bound = count_ours(mesh, shape, source, target)
                counted = {
                    "torch greedy": count_stock(mesh, shape, greedy.stops(shape, source, target)),
                    "torch graph": count_stock(mesh, shape, graph.stops(shape, source, target)),
                    "shardweave": ours,
                }
                for name, count in counted.items():
                    if bound:
                        found[name].append((count, bound))
                    else:
                        idle[name] += count.received > 0
    for name, plans in found.items():
        steps = [min(count.collectives, 4) for count, _ in plans]
        shares = " / ".join(f"{steps.count(k) / len(steps):.0%}" for k in (1, 2, 3, 4))
        peaks = [count.peak for count, _ in plans]
        yield (
            f"| {name} | {len(plans)} | {percentiles([count.received / bound for count, bound in plans])} | {shares} | "
            f"{statistics.mean(peaks):.2f} / {max(peaks):.1f} | {idle[name]} |"
        )


def compare_prices(shapes: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Rows of the second table: torch's steps priced as exchanges, by shardweave's plan for the same topology."""
    for topology in TOPOLOGIES:
        ratios: dict[str, list[float]] = {"torch greedy": [], "torch graph": []}
        for mesh_shape in MESHES:
            mesh, planners = spread(mesh_shape), [stock(mesh_shape, "graph" in name) for name in ratios]
            for shape in shapes:
                for source, target in product(layouts(mesh.ndim, len(shape)), repeat=2):
                    ours = shardweave.redistribute_cost(mesh, shape, "float32", source, target, topology)
                    if ours <= _ROUNDING:
                        continue
                    routes = [planner.stops(shape, source, target) for planner in planners]
                    for found, theirs in zip(ratios.values(), us(mesh, shape, routes, topology), strict=True):
                        found.append(1.0 if abs(theirs - ours) <= _ROUNDING else theirs / ours)
        for name, values in ratios.items():
            ranked = sorted(values)
            yield (
                f"| {topology.name} | {name} | {len(values)} | {statistics.median(values):.2f} | "
                f"{statistics.mean(values):.2f} | {ranked[int(0.9 * len(ranked))]:.2f} | {ranked[-1]:.1f} | "
                f"{ranked[0]:.3f} | {sum(v == 1 for v in values) / len(values):.0%} | {sum(v < 1 for v in values)} |"
            )


def example() -> Iterator[str]:
    """A gather over nodes."""
    program = plan((4, 8), (8192, 8192), "bfloat16", "S0 S0", "R R", topology=shardweave.NVLINK_INFINIBAND)
    entering = [sum(program.bytes_over_network[first : first + 8]) for first in range(0, 32, 8)]
    whole = math.prod(program.shape) * 2
    yield from ("## A gather over 4 nodes of 8", "", "```", program.explain(), "```", "")
    yield f"Bytes that enter each node: {', '.join(map(str, entering))}."
    yield f"The tensor has {whole}, and each node holds {whole // 4} of them."


def times() -> Iterator[str]:
    mesh, large = ("×".join(map(str, shape)) for shape in (plan_times.MESH, plan_times.LARGE))
    shapes = ", ".join("×".join(map(str, shape)) for shape in plan_times.SHAPES)
    yield from ("## Planning time", "")
    yield f"Milliseconds, in one process on a shared machine of {os.cpu_count()} cores ({platform.machine()}),"
    yield "whose noise is in them. A pause of Python's garbage collector goes through every object that torch has made;"
    yield "the last column has the worst with such a pause in it."
    yield f"{plan_times.PAIRS} seeded pairs on a {mesh} mesh, each planned for all ranks and for the first time,"
    yield f"with and without partial, in any shard order; shapes {shapes}."
    yield from ("", "| planner | pairs | median | p99 | worst | worst with a pause |", "|---|---|---|---|---|---|")
    yield from plan_times.cold(stock(plan_times.MESH, True).stops)
    yield from ("", f"The program of one rank on a {large} mesh, of a bfloat16 tensor of 65537×4097:", "")
    yield from ("| request | topology | ms | MB at most (tracemalloc) |", "|---|---|---|---|")
    yield from plan_times.large()


def report() -> str:
    timed = list(times())  # before all else, so that no plan is known
    lines = [
        "# Plans: torch's and shardweave's",
        "",
        f"`python -m shardweave.bench.plans`, torch {torch.__version__}, Python {platform.python_version()}.",
        "All pairs of layouts without partial, in the default order, on meshes",
        f"{', '.join('×'.join(map(str, m)) for m in MESHES)};",
        "the rank that receives most, divided by the bound of the rank that must receive most. Counted, not timed.",
        "",
        "| planner | pairs | median | mean | p90 | max | at 1.0 | 1 / 2 / 3 / 4+ collectives | peak ÷ largest shard, "
        "mean / max | moves with a bound of 0 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shapes in (("even", EVEN), ("uneven", UNEVEN)):
        lines.append(f"| **{name} shapes {', '.join('×'.join(map(str, s)) for s in shapes)}** | | | | | | | | | |")
        lines += compare(shapes)
    lines += [
        "",
        "## Prices",
        "",
        "All these pairs again. torch's plans priced step by step as exchanges (which move no more than its",
        "collectives), divided by the price of shardweave's plan for the topology: on one node, and with half of each",
        "mesh on either of two nodes of 8 (2×2 on ranks 0, 1, 8, 9).",
        "",
        "| topology | planner | pairs | median | mean | p90 | max | min | as cheap | cheaper than shardweave's |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *compare_prices(EVEN + UNEVEN),
        "",
        *example(),
        "",
        *timed,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    arguments = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(map(math.prod, MESHES)))
    text = report()
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
