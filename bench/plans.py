"""torch's plans and shardweave's plans over pairs of layouts: bytes, collectives and peak memory.

`python -m shardweave.bench.plans --out FILE` makes and counts plans; nothing is timed or communicated.
torch's plans come from its own planner, and its collectives are counted as issued: shards padded to
the largest of their group, all-reduce as reduce-scatter and all-gather, all-to-all as a true one.

torch's graph planner takes tens of milliseconds for a pair of layouts of a 3-D tensor on a 3-D mesh, so that all pairs
take most of an hour of CPU time. By default a seeded sample, one in `EVERY` pairs of each mesh and shape, is counted;
`--every 1` counts all pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random

import shardweave
from shardweave import Layout, Mesh
from shardweave.planner import Placement, plan

from ..errors import ArgumentError
from .baselines.stock_plans import Counted, count_stock, planned
from .harness.machine import provenance
from .harness.markdown import provenance_lines, table
from .harness.writable import check_writable

MESHES = ((2, 2), (2, 4), (2, 2, 2), (4, 2, 2))
EVEN = ((4096,), (1024, 512), (256, 128, 64))
UNEVEN = ((17,), (9, 13), (7, 5, 11))
EVERY = 20
_GRAPH = {"torch greedy": False, "torch graph": True}
_OURS = "shardweave"


@dataclass(frozen=True)
class Pair:
    """The plans for one pair of layouts.

    Attributes:
        bound: bytes that a rank must receive at least, of the rank with most.
        counted: by planner.
    """

    bound: int
    counted: dict[str, Counted]


def layouts(mesh_dims: int, tensor_dims: int) -> list[Layout]:
    """All layouts without partial in the default shard order, which torch's placements can express."""
    options: list[Placement] = [shardweave.Replicate(), *map(shardweave.Shard, range(tensor_dims))]
    return [Layout(placements) for placements in product(options, repeat=mesh_dims)]


def count_ours(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[Counted, int]:
    """On one NVLink domain; and the bound, the most that a rank must receive, which each rank's plan meets."""
    program = plan(mesh, shape, "float32", source, target, topology=shardweave.NVLINK_NODE)
    assert program.bytes_received == program.bytes_bound
    most = max(program.local_bytes(layout, r) for layout in (source, target) for r in range(mesh.size))
    peak = max(program.peak_bytes) / most
    return Counted(max(program.bytes_received), program.exchanges, peak), max(program.bytes_bound)


def measure(mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int = 1) -> list[Pair]:
    """The plans for a seeded sample, one in `every`, of the pairs of layouts."""
    mesh, pairs = Mesh(mesh_shape), []
    every_pair = list(product(layouts(mesh.ndim, len(shape)), repeat=2))
    for source, target in Random(7).sample(every_pair, -(-len(every_pair) // every)):
        if source == target:
            continue
        routes = {name: planned(mesh_shape, shape, source, target, graph) for name, graph in _GRAPH.items()}
        counted = {name: count_stock(mesh, shape, route) for name, route in routes.items()}
        counted[_OURS], bound = count_ours(mesh, shape, source, target)
        pairs.append(Pair(bound, counted))
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


def report(every: int) -> str:
    tasks = list(product(MESHES, EVEN + UNEVEN, (every,)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        measured = dict(zip(tasks, pool.map(measure, *zip(*tasks, strict=True)), strict=True))

    def pairs(shapes: Iterable[tuple[int, ...]]) -> list[Pair]:
        return [pair for m, s, _ in tasks if s in shapes for pair in measured[m, s, every]]

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
        *byte_table(pairs(EVEN)),
        "",
        f"Uneven shapes {uneven}:",
        "",
        *byte_table(pairs(UNEVEN)),
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
