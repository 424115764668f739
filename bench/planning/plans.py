"""torch's plans and shardweave's plans over pairs of layouts: bytes, collectives, peak memory and cost.

`python -m shardweave.bench.planning.plans --out FILE` makes and counts plans; nothing is timed (`bench plan` does that)
or communicated. torch's plans come from its own planner on a fake process group, and its collectives are counted as
issued: shards padded to the largest of their group, all-reduce as reduce-scatter and all-gather, all-to-all as a true
one.

torch's graph planner takes tens of milliseconds for a pair of layouts of a 3-D tensor on a 3-D mesh, so that all pairs
take most of an hour of CPU time. By default a seeded sample, one in `EVERY` pairs of each mesh and shape, is counted;
`--every 1` counts all pairs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

import shardweave
from shardweave import Layout, Link, Mesh, Topology
from shardweave.planner import Placement, plan
from shardweave.planner.cost.step_cost import step_prices
from shardweave.planner.exchange.layout_change import layout_change

from ...errors import ArgumentError
from ..baselines.stock_plans import Counted, count_stock, stock
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines
from ..harness.writable import check_writable

MESHES = ((2, 2), (2, 4), (2, 2, 2), (4, 2, 2))
EVEN = ((4096,), (1024, 512), (256, 128, 64))
UNEVEN = ((17,), (9, 13), (7, 5, 11))
TOPOLOGIES = (
    shardweave.NVLINK_NODE,
    replace(shardweave.NVLINK_INFINIBAND, name="2 nodes × 8"),
    replace(shardweave.NVLINK_INFINIBAND, name="2 nodes × 8, slow network", network=Link(50.0, 1.0, False, 10.0)),
)
EVERY = 20
_ROUNDING = 0.005  # µs: costs are whole nanoseconds per step


def layouts(mesh_dims: int, tensor_dims: int, partial: bool = False) -> list[Layout]:
    """All layouts in the default shard order, which torch's placements can express: without partial, or with."""
    options: list[Placement] = [shardweave.Replicate(), *map(shardweave.Shard, range(tensor_dims))]
    if partial:
        options.append(shardweave.Partial())
    every = [Layout(placements) for placements in product(options, repeat=mesh_dims)]
    return [layout for layout in every if layout.has_partial == partial]


def sampled_pairs(mesh: Mesh, shape: tuple[int, ...], every: int, partial: bool = False) -> list[tuple[Layout, Layout]]:
    """A seeded sample, one in `every`, of the pairs of layouts; `partial`: sources with partial placements."""
    sources, targets = layouts(mesh.ndim, len(shape), partial), layouts(mesh.ndim, len(shape))
    pairs = list(product(sources, targets))
    return Random(7).sample(pairs, -(-len(pairs) // every))


def count_ours(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[Counted, int]:
    """On one NVLink domain; and the bound, the most that a rank must receive, which each rank's plan meets."""
    program = plan(mesh, shape, "float32", source, target, topology=shardweave.NVLINK_NODE)
    assert program.bytes_received == program.bytes_bound
    most = max(program.local_bytes(layout, r) for layout in (source, target) for r in range(mesh.size))
    route = (source, *(step.target for step in program.steps))
    peak = max(program.peak_bytes) / most
    return Counted(max(program.bytes_received), program.exchanges, peak, route), max(program.bytes_bound)


def spread(shape: tuple[int, ...]) -> Mesh:
    """A mesh with its first half on a node of 8 and its second half on the next."""
    half = math.prod(shape) // 2
    return Mesh(shape, ranks=(*range(half), *range(8, 8 + half)))


def us_with_sums(mesh: Mesh, shape: tuple[int, ...], route: Sequence[Layout], topology: Topology) -> float:
    """The price of a route of torch's with reductions: a collective that reduces is as cheap as it can be made."""
    total = 0.0
    for a, b in pairwise(route):
        reduces = any(isinstance(p, shardweave.Partial) and p != b.placements[m] for m, p in enumerate(a.placements))
        if reduces:
            total += shardweave.redistribute_cost(mesh, shape, "float32", a, b, topology)
        else:
            total += us(mesh, shape, [(a, b)], topology)[0]
    return total


def us(mesh: Mesh, shape: tuple[int, ...], routes: Sequence[Sequence[Layout]], topology: Topology) -> list[float]:
    """The price of exchanges from layout to layout, of some routes; torch's collectives between these move no less."""
    steps = [layout_change(mesh, "float32", a, b, topology.node_size) for route in routes for a, b in pairwise(route)]
    left = iter(step_prices(steps, shape, topology, unbounded=len(steps)))
    return [sum(next(left).us for _ in pairwise(route)) for route in routes]


def percentiles(values: Sequence[float]) -> str:
    ranked = sorted(values)
    return (
        f"{statistics.median(ranked):.2f} | {statistics.mean(ranked):.2f} | {ranked[int(0.9 * len(ranked))]:.1f} | "
        f"{ranked[-1]:.1f} | {sum(v <= 1 for v in ranked) / len(ranked):.1%}"
    )


def compare(shapes: Sequence[tuple[int, ...]], every: int = 1) -> Iterator[str]:
    """The rows of the first table: bytes, collectives, peak."""
    counted_plans: dict[str, list[tuple[Counted, int]]] = {"torch greedy": [], "torch graph": [], "shardweave": []}
    moving = dict.fromkeys(counted_plans, 0)
    with_zero = 0
    for mesh_shape in MESHES:
        mesh, greedy, graph = Mesh(mesh_shape), stock(mesh_shape, False), stock(mesh_shape, True)
        for shape in shapes:
            for source, target in sampled_pairs(mesh, shape, every):
                if source == target:
                    continue
                ours, bound = count_ours(mesh, shape, source, target)
                counted = {
                    "torch greedy": count_stock(mesh, shape, greedy.layouts(shape, source, target)),
                    "torch graph": count_stock(mesh, shape, graph.layouts(shape, source, target)),
                    "shardweave": ours,
                }
                with_zero += not bound
                for name, count in counted.items():
                    if bound:
                        counted_plans[name].append((count, bound))
                    else:
                        moving[name] += count.received > 0
    for name, plans in counted_plans.items():
        steps = [min(count.collectives, 4) for count, _ in plans]
        shares = " / ".join(f"{steps.count(k) / len(steps):.0%}" for k in (1, 2, 3, 4))
        peaks = [count.peak for count, _ in plans]
        yield (
            f"| {name} | {len(plans)} | {percentiles([count.received / bound for count, bound in plans])} | {shares} | "
            f"{statistics.mean(peaks):.2f} / {max(peaks):.1f} | {moving[name]} of {with_zero} |"
        )


def compare_prices(
    topology: Topology, shapes: Sequence[tuple[int, ...]], partial: bool = False, every: int = 1
) -> Iterator[str]:
    """The rows of the tables of costs: torch's steps as exchanges ÷ shardweave's plan for the same topology."""
    ratios: dict[str, list[float]] = {"torch greedy": [], "torch graph": []}
    for mesh_shape in MESHES:
        mesh, planners = spread(mesh_shape), [stock(mesh_shape, "graph" in name) for name in ratios]
        for shape in shapes:
            for source, target in sampled_pairs(mesh, shape, every, partial):
                ours = shardweave.redistribute_cost(mesh, shape, "float32", source, target, topology)
                if ours <= _ROUNDING:
                    continue
                routes = [planner.layouts(shape, source, target) for planner in planners]
                if partial:
                    prices_of = [us_with_sums(mesh, shape, route, topology) for route in routes]
                else:
                    prices_of = us(mesh, shape, routes, topology)
                for values, theirs in zip(ratios.values(), prices_of, strict=True):
                    values.append(1.0 if abs(theirs - ours) <= _ROUNDING else theirs / ours)
    for name, values in ratios.items():
        ranked = sorted(values)
        yield (
            f"| {topology.name} | {name} | {len(values)} | {statistics.median(values):.2f} | "
            f"{statistics.mean(values):.2f} | {ranked[int(0.9 * len(ranked))]:.2f} | {ranked[-1]:.1f} | "
            f"{ranked[0]:.3f} | {sum(v == 1 for v in values) / len(values):.0%} | {sum(v < 1 for v in values)} |"
        )


WASTEFUL = (
    ((4, 4), "S0 S1", "S1 S0"),
    ((2, 8), "S0 S1", "S1 S0"),
    ((4, 4), "R S0", "S0 S0"),
    ((2, 8), "R S0", "S0 S0"),
    ((4, 4), "S0 S0", "R S0"),
    ((4, 4), "S0 S0", "S0 S0 @ 0:1,0"),
    ((4, 4), "P S0", "S0 S0"),
    ((4, 4), "P P", "R R"),
)


def wasteful() -> Iterator[str]:
    """Rows of single redistributions of 8192² float32: MiB that the rank receives that receives most."""
    for mesh_shape, source, target in WASTEFUL:
        mesh, shape, pair = Mesh(mesh_shape), (8192, 8192), (Layout.parse(source), Layout.parse(target))
        program = plan(mesh, shape, "float32", *pair)
        stock_mib = ["-", "-"]  # torch's placements do not say an order
        if "@" not in target:
            routes = [stock(mesh_shape, graph).layouts(shape, *pair) for graph in (False, True)]
            stock_mib = [str(count_stock(mesh, shape, route).received >> 20) for route in routes]
        bound = "-" if program.bytes_bound is None else str(max(program.bytes_bound) >> 20)
        ours = f"{max(program.bytes_received) >> 20} in {program.exchanges}"
        yield f"| {'×'.join(map(str, mesh_shape))} | {source} → {target} | {' | '.join(stock_mib)} | {ours} | {bound} |"


def _section(section: tuple[str, Any, int]) -> list[str]:
    kind, argument, every = section
    if kind == "bytes":
        return list(compare(argument, every))
    return list(compare_prices(argument, EVEN + UNEVEN, kind == "sums", every))


def join() -> None:
    """torch plans on a process group; this one moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(map(math.prod, MESHES)))


def report(every: int) -> str:
    sections = [
        ("bytes", EVEN, every),
        ("bytes", UNEVEN, every),
        *(("prices", topology, every) for topology in TOPOLOGIES),
        *(("sums", topology, every) for topology in TOPOLOGIES),
    ]
    pairs = "All pairs" if every == 1 else f"A seeded sample, 1 in {every}, of all pairs"
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=join) as pool:
        even, uneven, *priced = pool.map(_section, sections)
    without, sums = priced[: len(TOPOLOGIES)], priced[len(TOPOLOGIES) :]
    head = "| topology | planner | pairs | median | mean | p90 | max | min | as cheap | cheaper than shardweave's |"
    lines = [
        "# Plans: torch's and shardweave's",
        "",
        *provenance_lines(provenance()),
        "",
        f"{pairs} of layouts without partial, in the default order, on meshes",
        f"{', '.join('×'.join(map(str, m)) for m in MESHES)};",
        "the rank that receives most, divided by the bound of the rank that must receive most. Counted, not timed.",
        "shardweave's plans are those for one NVLink domain; every rank of every one of them receives its own bound.",
        "",
        "| planner | pairs | median | mean | p90 | max | at 1.0 | 1 / 2 / 3 / 4+ collectives | peak ÷ largest shard, "
        "mean / max | other pairs, bound 0: that move |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shapes, rows in (("even", EVEN, even), ("uneven", UNEVEN, uneven)):
        lines.append(f"| **{name} shapes {', '.join('×'.join(map(str, s)) for s in shapes)}** | | | | | | | | | |")
        lines += rows
    lines += [
        "",
        "Single ones, 8192×8192 float32: MiB that the rank receives that receives most, and shardweave's exchanges.",
        "",
        "| mesh | | torch greedy | torch graph | shardweave | bound |",
        "|---|---|---|---|---|---|",
        *wasteful(),
        "",
        "## Prices",
        "",
        "The same pairs, even and uneven, and of those with a bound of 0 the ones that cost something, because",
        "ranks copy a part of what they hold. torch's plans priced step by step as exchanges (which move no more than",
        "its collectives), divided by the price of shardweave's plan for the topology: on one node, and with half of",
        "each mesh on either of two nodes of 8 (2×2 on ranks 0, 1, 8, 9).",
        "",
        head,
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row for rows in without for row in rows),
        "",
        f"{pairs} of the same meshes and shapes with a partial source and a target without (torch makes nothing",
        "partial). A collective of torch's that reduces is priced as the cheapest program that does it.",
        "",
        head,
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row for rows in sums for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    parser.add_argument(
        "--every", type=int, default=EVERY, metavar="N", help="count one in N pairs of layouts (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        if arguments.every < 1:
            raise ArgumentError(f"--every: {arguments.every}; allowed: 1 or more")
        check_writable("--out", arguments.out)
    except ArgumentError as error:
        parser.error(str(error))
    join()
    text = report(arguments.every)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
