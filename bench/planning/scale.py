"""The CPU time of cold plans of one rank, on 16 to 65,536 ranks, with the topology that is found from the machines.

The requests are those of `bench.workloads` at full shapes, on a mesh of size / 8 × 8 ranks with nodes of 8, and random
ones. A call is what a rank does that plans for the first time: the topology from the node of each rank (an array, as
ranks that find it have), the mesh, the layouts from their text, the program of the rank. Nothing is cached. Times are
CPU time of the process, the least of several runs of each case:
`python -m shardweave.bench.planning.scale --out bench/results/plan_scale.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from ...planner import MachineFigures, Mesh, Program, found_topology, plan
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
from ..harness.writable import check_writable
from ..workloads import load_workloads

SIZES = 16, 64, 256, 1024, 4096, 16384, 65536
MEDIAN_MS, MOST_MS = 5.0, 50.0
NODES = "8 ranks", "96 ranks", "1 to 12 ranks", "8 or 5 ranks", "ranks dealt out in turn"
MODELS = "of models"
FAMILIES = "plain", "partial", "strided"
SLOWEST = 12
_TEXT = (
    "Milliseconds of CPU time of the process for a plan of one rank from nothing: topology, mesh and layouts included.",
    "The least of the cold runs of each case.",
)


class Case(NamedTuple):
    """One request: the mesh shape, what nodes are like, the layouts, the global shape, the rank."""

    mesh: tuple[int, ...]
    nodes: str
    source: str
    target: str
    shape: tuple[int, ...]
    rank: int
    family: str

    def node_of_ranks(self) -> np.ndarray:
        """[size] the node of each rank."""
        return np.array(self._nodes())

    def _nodes(self) -> list[int]:
        size = math.prod(self.mesh)
        random = Random(f"{size} {self.nodes}")
        match self.nodes:
            case "8 ranks":
                return [i // 8 for i in range(size)]
            case "96 ranks":
                return [i // 96 for i in range(size)]
            case "8 or 5 ranks":
                half = size // 2 // 8 * 8
                return [i // 8 if i < half else half // 8 + (i - half) // 5 for i in range(size)]
            case "ranks dealt out in turn":
                return [i % max(2, size // 8) for i in range(size)]
        nodes: list[int] = []
        while len(nodes) < size:
            nodes += [nodes[-1] + 1 if nodes else 0] * random.randint(1, 12)
        return nodes[:size]

    def plan(self, nodes: np.ndarray) -> Program:
        """The program of the rank, from nothing but numbers and text."""
        topology = found_topology(nodes, [MachineFigures("NVIDIA H100", "RDMA", 8)])
        return plan(
            Mesh(self.mesh), self.shape, "bfloat16", self.source, self.target, rank=self.rank, topology=topology
        )


def model_cases(size: int) -> list[Case]:
    """The workloads on `size` ranks, of which 8 neighbours share a node and are the second mesh dim."""
    cases = []
    for workload in load_workloads():
        # An order that FSDP2 writes as a strided shard is split by the size of the mesh dim that cuts first.
        source, target = (x.replace(f"/{workload.mesh[1]}", "/8") for x in (workload.source, workload.target))
        cases.append(Case((size // 8, 8), "8 ranks", source, target, workload.full_shape, size // 3, MODELS))
    return cases


def random_cases(size: int, count: int, seed: int) -> list[Case]:
    """Random cases on `size` ranks, families and kinds of nodes in turn."""
    random = Random(f"{size} {seed}")
    drawn: list[Case] = []
    while len(drawn) < count:
        family, nodes = FAMILIES[len(drawn) % 3], NODES[len(drawn) // 3 % 5]
        mesh = _factors(random, size)
        ndim = random.randint(1, 3)
        shape = tuple(_size(random) for _ in range(ndim))
        source, target = (_layout(random, mesh, ndim, family, is_source) for is_source in (True, False))
        if source != target and (family == "plain" or "P" in source or "/" in source + target):
            drawn.append(Case(mesh, nodes, source, target, shape, random.randrange(size), family))
    return drawn


def _factors(random: Random, size: int) -> tuple[int, ...]:
    bits = size.bit_length() - 1
    ends = sorted(random.sample(range(1, bits), random.randint(0, min(3, bits - 1))))
    return tuple(1 << (b - a) for a, b in zip([0, *ends], [*ends, bits], strict=True))


def _size(random: Random) -> int:
    return random.choice([1 << random.randint(5, 16), 3 * (1 << random.randint(4, 14)), random.randint(3, 70_000)])


def _layout(random: Random, mesh: tuple[int, ...], ndim: int, family: str, is_source: bool) -> str:
    tokens = ["R", *(f"S{d}" for d in range(ndim))]
    if family == "partial" and is_source:
        tokens += ["P", "P"]
    if family == "strided":
        tokens += [f"S{d}/{split}" for d in range(ndim) for split in (2, 3)]
    drawn = [random.choice(tokens) for _ in mesh]
    text, orders = " ".join(drawn), []
    for d in range(ndim):
        order = [m for m, token in enumerate(drawn) if token == f"S{d}"]
        shuffled = random.sample(order, len(order))
        if shuffled != order and not any(token.startswith(f"S{d}/") for token in drawn):
            orders.append(f"{d}:{','.join(map(str, shuffled))}")
    return text + (" @ " + " ".join(orders) if orders else "")


def clear_caches() -> None:
    """Empty every cache of the planner."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardweave.planner"):
            for cache in list(vars(module).values()):
                if hasattr(cache, "cache_clear"):
                    cache.cache_clear()


def cpu_ms(call: Callable[[], object], runs: int) -> float:
    """The least CPU milliseconds of several cold calls; the garbage collector is off."""
    times = []
    for _ in range(runs):
        clear_caches()
        gc.collect()
        gc.disable()
        try:
            start = time.process_time()
            call()
            times.append((time.process_time() - start) * 1e3)
        finally:
            gc.enable()
    return min(times)


def measure(sizes: tuple[int, ...], count: int, seed: int, runs: int) -> list[dict[str, Any]]:
    """For each case its milliseconds, and the cost and bytes of its plan."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for case in (*model_cases(size), *random_cases(size, count, seed)):
            call = partial(case.plan, case.node_of_ranks())
            program = call()
            rows.append(
                {
                    "size": size,
                    "ms": cpu_ms(call, runs),
                    "case": case._asdict(),
                    "cost_us": program.cost_us,
                    "bytes": program.bytes_received,
                    "path": [str(step.target) for step in program.steps],
                }
            )
    return rows


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table by size and kind of layouts, and the slowest cases."""
    heads = ("ranks", "layouts", "cases", "median ms", "p90 ms", "most ms", f"over {MOST_MS:g} ms")
    lines = []
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    for of_sizes, family in product([*([size] for size in sizes), sizes], (MODELS, *FAMILIES)):
        ms = sorted(row["ms"] for row in rows if row["size"] in of_sizes and row["case"]["family"] == family)
        over = sum(x > MOST_MS for x in ms)
        figures = statistics.median(ms), ms[len(ms) * 9 // 10], ms[-1]
        name = f"{of_sizes[0]:,}" if len(of_sizes) == 1 else "all"
        lines.append((name, family, len(ms), *(f"{x:.1f}" for x in figures), over))
    slowest = sorted(rows, key=lambda row: -row["ms"])[:SLOWEST]
    named = [
        (f"{row['ms']:.1f}", "×".join(map(str, c["mesh"])), c["nodes"], c["source"], c["target"], c["shape"])
        for row in slowest
        for c in [row["case"]]
    ]
    return [
        *table(heads, lines), "", f"The slowest {SLOWEST}:", "",
        *table(("ms", "mesh", "nodes", "source", "target", "shape"), named),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    parser.add_argument("--json", type=Path, help="write every case there too")
    parser.add_argument("--cases", type=int, default=60, help="random cases of each size (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="cold runs of each case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="(default: %(default)s)")
    arguments = parser.parse_args()
    try:
        check_writable("--out", arguments.out)
        check_writable("--json", arguments.json)
    except ArgumentError as error:
        parser.error(str(error))
    rows = measure(tuple(arguments.sizes), arguments.cases, arguments.seed, arguments.runs)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")
    text = "\n".join(["# Cold plans", "", *provenance_lines(provenance()), "", *_TEXT, "", *report(rows)]) + "\n"
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
