"""torch's plans and shardweave's plans over pairs of layouts: bytes, collectives, peak memory and cost.

`python -m shardweave.bench.planning.plans --out FILE` makes and counts plans; nothing is timed (`bench plan` does that)
or communicated. torch's plans come from its own planner, and its collectives are counted as issued: shards padded to
the largest of their group, all-reduce as reduce-scatter and all-gather, all-to-all as a true one.

torch's graph planner takes tens of milliseconds for a pair of layouts of a 3-D tensor on a 3-D mesh, so that all pairs
take most of an hour of CPU time. By default a seeded sample, one in `EVERY` pairs of each mesh and shape, is counted;
`--every 1` counts all pairs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from random import Random

import shardweave
from shardweave import Layout, Link, Mesh, Topology
from shardweave.planner import Placement, plan
from shardweave.planner.cost.step_cost import step_prices
from shardweave.planner.exchange.layout_change import layout_change

from ...errors import ArgumentError
from ..baselines.stock_plans import Counted, count_stock, stock
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
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
_GRAPH = {"torch greedy": False, "torch graph": True}
_OURS = "shardweave"
_ROUNDING = 0.005  # µs: costs are whole nanoseconds per step


@dataclass(frozen=True)
class Pair:
    """The plans for one pair of layouts.

    Attributes:
        bound: bytes that a rank must receive at least, of the rank with most.
        counted: by planner; empty for a partial source.
        prices: torch's price ÷ shardweave's by topology and planner, if shardweave's plan costs anything.
    """

    bound: int
    counted: dict[str, Counted]
    prices: dict[tuple[str, str], float]


def layouts(mesh_dims: int, tensor_dims: int, partial: bool = False) -> list[Layout]:
    """All layouts in the default shard order, which torch's placements can express: without partial, or with."""
    options: list[Placement] = [shardweave.Replicate(), *map(shardweave.Shard, range(tensor_dims))]
    if partial:
        options.append(shardweave.Partial())
    every = [Layout(placements) for placements in product(options, repeat=mesh_dims)]
    return [layout for layout in every if layout.has_partial == partial]


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


@cache
def collective_us(mesh: Mesh, shape: tuple[int, ...], before: Layout, after: Layout, topology: Topology) -> float:
    """The price of one of torch's collectives: if it reduces, of the cheapest program that does it; otherwise of an
    exchange, which moves no more."""
    moved = zip(before.placements, after.placements, strict=True)
    if any(isinstance(a, shardweave.Partial) and a != b for a, b in moved):
        return shardweave.redistribute_cost(mesh, shape, "float32", before, after, topology)
    exchange = layout_change(mesh, "float32", before, after, topology.node_size)
    (price,) = step_prices([exchange], shape, topology, unbounded=1)
    return price.us


def measure(mesh_shape: tuple[int, ...], shape: tuple[int, ...], partial: bool = False, every: int = 1) -> list[Pair]:
    """The plans for a seeded sample, one in `every`, of the pairs of layouts; `partial`: with a partial source."""
    mesh, nodes = Mesh(mesh_shape), spread(mesh_shape)
    every_pair = list(product(layouts(mesh.ndim, len(shape), partial), layouts(mesh.ndim, len(shape))))
    pairs = []
    for source, target in Random(7).sample(every_pair, -(-len(every_pair) // every)):
        if source == target:
            continue
        routes = {name: stock(mesh_shape, graph).layouts(shape, source, target) for name, graph in _GRAPH.items()}
        counted, bound, prices = dict[str, Counted](), 0, dict[tuple[str, str], float]()
        if not partial:
            counted = {name: count_stock(mesh, shape, route) for name, route in routes.items()}
            counted[_OURS], bound = count_ours(mesh, shape, source, target)
        for topology in TOPOLOGIES:
            ours = shardweave.redistribute_cost(nodes, shape, "float32", source, target, topology)
            for name, route in routes.items() if ours > _ROUNDING else ():
                theirs = sum(collective_us(nodes, shape, a, b, topology) for a, b in pairwise(route))
                prices[topology.name, name] = 1.0 if abs(theirs - ours) <= _ROUNDING else theirs / ours
        pairs.append(Pair(bound, counted, prices))
    return pairs


def _spread_of(values: Sequence[float]) -> list[str]:
    ranked = sorted(values)
    p90, most = ranked[int(0.9 * len(ranked))], ranked[-1]
    return [f"{statistics.median(ranked):.2f}", f"{statistics.mean(ranked):.2f}", f"{p90:.2f}", f"{most:.1f}"]


def byte_table(pairs: Sequence[Pair]) -> list[str]:
    """Bytes, collectives and peak memory of each planner."""
    heads = ("planner", "pairs", "median", "mean", "p90", "max", "at 1.0", "1 / 2 / 3 / 4+ collectives",
             "peak ÷ largest shard, mean / max", "other pairs, bound 0: that move")  # fmt: skip
    moving, others = ([pair for pair in pairs if bool(pair.bound) == moves] for moves in (True, False))
    rows = []
    for name in (*_GRAPH, _OURS):
        ratios = [pair.counted[name].received / pair.bound for pair in moving]
        steps = [min(pair.counted[name].collectives, 4) for pair in moving]
        peaks = [pair.counted[name].peak for pair in moving]
        moved = sum(pair.counted[name].received > 0 for pair in others)
        rows.append((
            name, len(moving), *_spread_of(ratios), f"{sum(r <= 1 for r in ratios) / len(ratios):.1%}",
            " / ".join(f"{steps.count(k) / len(steps):.0%}" for k in (1, 2, 3, 4)),
            f"{statistics.mean(peaks):.2f} / {max(peaks):.1f}", f"{moved} of {len(others)}",
        ))  # fmt: skip
    return table(heads, rows)


def price_table(pairs: Sequence[Pair]) -> list[str]:
    """Prices of torch's plans ÷ those of shardweave's."""
    heads = ("topology", "planner", "pairs", "median", "mean", "p90", "max", "min", "as cheap",
             "cheaper than shardweave's")  # fmt: skip
    rows = []
    for key in product((topology.name for topology in TOPOLOGIES), _GRAPH):
        values = [pair.prices[key] for pair in pairs if key in pair.prices]
        equal, cheaper = (sum(map(test, values)) for test in ((1.0).__eq__, (1.0).__gt__))
        rows.append((
            *key, len(values), *_spread_of(values), f"{min(values):.3f}", f"{equal / len(values):.0%}", cheaper
        ))  # fmt: skip
    return table(heads, rows)


def report(every: int) -> str:
    tasks = list(product(MESHES, EVEN + UNEVEN, (False, True), (every,)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        measured = dict(zip(tasks, pool.map(measure, *zip(*tasks, strict=True)), strict=True))

    def pairs(shapes: Iterable[tuple[int, ...]], partial: bool) -> list[Pair]:
        return [pair for m, s, p, _ in tasks if s in shapes and p == partial for pair in measured[m, s, p, every]]

    sample = "All pairs" if every == 1 else f"A seeded sample, 1 in {every}, of all pairs"
    even, uneven = (", ".join("×".join(map(str, shape)) for shape in shapes) for shapes in (EVEN, UNEVEN))
    lines = [
        "# Plans: torch's and shardweave's",
        "",
        *provenance_lines(provenance()),
        "",
        f"{sample} of layouts without partial, in the default order, on meshes",
        f"{', '.join('×'.join(map(str, m)) for m in MESHES)};",
        "the rank that receives most, divided by the bound of the rank that must receive most. Counted, not timed.",
        "shardweave's plans are those for one NVLink domain; every rank of every one of them receives its own bound.",
        "",
        f"Even shapes {even}:",
        "",
        *byte_table(pairs(EVEN, False)),
        "",
        f"Uneven shapes {uneven}:",
        "",
        *byte_table(pairs(UNEVEN, False)),
        "",
        "## Prices",
        "",
        "The same pairs, even and uneven, and of those with a bound of 0 the ones that cost something, because",
        "ranks copy a part of what they hold. torch's plans priced step by step as exchanges (which move no more than",
        "its collectives), divided by the price of shardweave's plan for the topology: on one node, and with half of",
        "each mesh on either of two nodes of 8 (2×2 on ranks 0, 1, 8, 9).",
        "",
        *price_table(pairs(EVEN + UNEVEN, False)),
        "",
        f"{sample} of the same meshes and shapes with a partial source and a target without (torch makes nothing",
        "partial). A collective of torch's that reduces is priced as the cheapest program that does it.",
        "",
        *price_table(pairs(EVEN + UNEVEN, True)),
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
    text = report(arguments.every)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
