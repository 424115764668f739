"""`python -m shardweave.bench.planning.projection --out DIR`: what recorded workloads would cost on up to 131,072 GPUs.

Writes projection.json and projection.md. Nothing is communicated: these are the planner's prices, of its own plan and
of torch's, on stated topologies. torch's plan is the steps that its own planner makes, each priced as the cheapest
program that does that step: the algorithm inside one of its collectives is taken to be as good as any that the planner
knows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import shardweave
from shardweave import Layout, Topology
from shardweave.planner import ITEMSIZE, Mesh, Partial, Placement, Replicate, StridedShard, plan

from ...errors import ArgumentError
from ...runtime.tracing.trace_file import Entry, Trace
from ..baselines.stock_plans import issued, stock
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
from ..harness.writable import check_writable
from ..workloads.record_workloads import RECORDED, WORKLOADS
from ..workloads.trace_cases import distinct

RANKS = (8, 32, 128, 512, 2048, 8192, 32768, 131072)
LARGEST_DOMAIN = 64  # ranks that one NVLink domain is taken to have
_INFINIBAND = shardweave.NVLINK_INFINIBAND.network
TOPOLOGIES = (
    shardweave.NVLINK_INFINIBAND,
    Topology("flat InfiniBand", 1, _INFINIBAND, _INFINIBAND, shardweave.NVLINK_INFINIBAND.memory_gigabytes_per_s),
    shardweave.NVLINK_NODE,
)
"""In the flat one each GPU is a node of its own."""


@dataclass(frozen=True)
class Row:
    """The cost of one redistribution on one topology and number of ranks.

    Attributes:
        calls: the calls in a step.
        ours_us, stock_us: microseconds of a call on the slowest rank; None: torch has no plan.
    """

    workload: str
    case: str
    topology: str
    ranks: int
    mesh: str
    calls: int
    ours_us: float
    stock_us: float | None


TENSOR = 8  # ranks of tensor parallelism, which stays within a node


@dataclass(frozen=True)
class Growth:
    """How a mesh of replicas × dp × tp grows with the number of ranks: first dp, then replicas.

    Attributes:
        about: the rule in words.
        largest: size of dp.
        has_replicas: whether the program was recorded with replicas. If not, gradients of weights, which it reduces
            over dp, are reduced over replicas too. Tensors whose first size is 1 (a batch of one sequence) are no
            gradients of weights, and each replica has its own.
    """

    about: str
    largest: int
    has_replicas: bool = True

    def full_mesh(self, ranks: int) -> Mesh | None:
        """The mesh of so many ranks; None if tensor parallelism does not divide their number."""
        left, rest = divmod(ranks, TENSOR)
        if rest or not left:
            return None
        dp = math.gcd(left, self.largest)
        return Mesh((left // dp, dp, TENSOR), ("replicas", "dp", "tp"))

    def grown(self, entry: Entry, full_mesh: Mesh) -> Entry:
        """The redistribution on a mesh of another size. FSDP2's flat tensors are padded to the size of their group.

        Raises:
            ArgumentError: the mesh has no dim of such a name, or the entry has two meshes, unnamed mesh dims, or
                strided shards, which depend on the sizes of mesh dims.
        """
        names = entry.mesh.names
        source, target = (Layout.parse(text, entry.mesh.shape) for text in (entry.source, entry.target))
        strided = any(isinstance(p, StridedShard) for p in (*source.placements, *target.placements))
        if entry.target_mesh is not None or names is None or strided:
            raise ArgumentError(
                f"{entry.source} → {entry.target} on {entry.mesh}; allowed: one mesh with names, and shard orders"
            )
        if not self.has_replicas and "dp" in names and entry.shape[:1] != (1,):
            if isinstance(source.placements[names.index("dp")], Partial) and not target.has_partial:
                names = ("replicas", *names)
                source, target = _with_replicas(Partial(), source), _with_replicas(Replicate(), target)
        mesh = full_mesh[tuple(names)]  # that of the first rank
        shape = entry.shape
        if entry.where.startswith("FSDP"):
            shape = (-(-shape[0] // mesh.shape[-1]) * mesh.shape[-1],)
        return replace(entry, mesh=mesh, shape=shape, source=str(source), target=str(target))


def _with_replicas(placement: Placement, layout: Layout) -> Layout:
    """The layout on a mesh with one more dim, which comes first and has this placement."""
    return Layout((placement, *layout.placements), {d: [m + 1 for m in order] for d, order in layout.orders})


_TENSOR = "tensor parallelism stays within a node of 8"
GROWTHS = {
    "llama3_8b": Growth(f"{_TENSOR}; FSDP's shards grow up to 64, then its replicas", 64),
    "llama3_70b": Growth(f"{_TENSOR}; FSDP's shards grow up to 128, then its replicas", 128),
    "solver": Growth(
        f"{_TENSOR}; data parallelism, over which weights are cut too, grows up to 128, then replicas, over which "
        "gradients of weights are summed as well", 128, has_replicas=False,
    ),
}  # fmt: skip


def project(names: Sequence[str], sizes: Sequence[int]) -> Iterator[Row]:
    """All redistributions of some workloads that cost anything."""
    for name in names:
        growth = GROWTHS[name]
        cases = [(case.entries[0], case.cost.calls) for case in distinct(load(name))]
        for full_mesh, topology in product(filter(None, map(growth.full_mesh, sizes)), TOPOLOGIES):
            if topology.node_size is None and full_mesh.size > LARGEST_DOMAIN:
                continue
            for recorded, calls in cases:
                entry = growth.grown(recorded, full_mesh)
                request = entry.mesh, entry.shape, entry.dtype, Layout.parse(entry.source), Layout.parse(entry.target)
                ours, stock = shardweave.redistribute_cost(*request, topology), stock_us(*request, topology)
                if not (ours or stock):
                    continue
                case = f"{recorded.source} → {recorded.target}, {recorded.dtype}{list(recorded.shape)}"
                known = None if stock is None else round(stock, 3)
                yield Row(name, case, topology.name, full_mesh.size, str(entry.mesh), calls, round(ours, 3), known)


def load(name: str) -> Trace:
    return Trace.read(RECORDED / f"{name}.json")


def stock_layouts(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> list[Layout] | None:
    """The layouts after each of torch's collectives, the source first; None if its planner has no plan."""
    # torch would issue collectives along mesh dims of one rank.
    source, target = (layout.without_size_one(mesh.shape) for layout in (source, target))
    try:
        return stock(mesh.shape, False).layouts(shape, source, target)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return None


@cache
def stock_us(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
) -> float | None:
    """The microseconds of torch's plan: the sum over its steps, in one call."""
    layouts = stock_layouts(mesh, shape, source, target)
    if layouts is None:
        return None
    steps = replace(topology, call_us=0.0)
    us = sum(shardweave.redistribute_cost(mesh, shape, dtype, a, b, steps) for a, b in pairwise(layouts))
    return us + topology.call_us if us else 0.0


def sampled(mesh: Mesh) -> list[int]:
    """Up to five mesh positions, different along every mesh dim, for which programs are made."""
    return sorted({0, min(1, mesh.size - 1), mesh.size // 3, mesh.size // 2, mesh.size - 1})


def received(entry: Entry, topology: Topology) -> int:
    """The bytes received by the sampled rank that receives most, by shardweave's plan."""
    request = entry.mesh, entry.shape, entry.dtype, entry.source, entry.target
    return max(plan(*request, rank=r, topology=topology).bytes_received[0] for r in sampled(entry.mesh))


def stock_received(mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout) -> int:
    """The bytes received by the sampled rank that receives most, by torch's collectives with their padding."""
    layouts = stock_layouts(mesh, shape, source, target)
    assert layouts is not None
    return ITEMSIZE[dtype] * max(
        sum(issued(mesh, shape, a, b, rank) for a, b in pairwise(layouts)) for rank in sampled(mesh)
    )


def totals(rows: Sequence[Row]) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Milliseconds of a step, (shardweave, torch), by workload, topology and ranks, without rows that torch has no plan
    for."""
    sums: dict[tuple[str, str, int], tuple[float, float]] = {}
    for row in rows:
        if row.stock_us is not None:
            key = row.workload, row.topology, row.ranks
            ours, theirs = sums.get(key, (0.0, 0.0))
            sums[key] = ours + row.calls * row.ours_us / 1e3, theirs + row.calls * row.stock_us / 1e3
    return sums


def report(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page as Markdown; `about`: `machine.provenance()`."""
    sums = totals(rows)
    sizes = sorted({ranks for _, _, ranks in sums})
    costs = [
        [workload, topology, *("{:.1f} / {:.1f}".format(*sums[k]) if (k := (workload, topology, n)) in sums else "-"
                               for n in sizes)]
        for workload, topology in dict.fromkeys((workload, topology) for workload, topology, _ in sums)
    ]  # fmt: skip
    shown = {row.topology for row in rows}
    links = [
        (topology.name, f"{where}, assumed, not measured", f"{link.latency_us:g}", f"{link.gigabytes_per_s:g}",
         f"{link.message_us:g} µs" if link.message_us else "none", f"{topology.memory_gigabytes_per_s:g}")
        for topology in TOPOLOGIES
        for where, link, used in (("inside a node", topology.node, topology.node_size != 1),
                                  ("between nodes", topology.network, topology.node_size is not None))
        if used and topology.name in shown
    ]  # fmt: skip
    lines = [
        "# Cost at scale, projected",
        "",
        *provenance_lines(about),
        "",
        "Prices, not times.",
        "",
        "All redistributions of one step of each workload (`bench/workloads/recorded`), one after another, on the rank",
        "that takes longest, in milliseconds: shardweave's plans / torch's. torch's are the steps of its own planner,",
        "each priced as the cheapest program that does it: where torch issues one collective, both cost the same.",
        "Memory is not considered: a model may not fit on so few ranks.",
        "",
        *table(("workload", "topology", *(f"{n:,}" for n in sizes)), costs),
        "",
        "Links and memory are assumed, not measured. A call costs nothing beside its steps: hosts run ahead of GPUs.",
        "",
        *table(("topology", "link", "latency µs", "GB/s of a rank, each way", "beside, a peer", "memory, GB/s"), links),
        "",
        "Meshes grow so:",
        "",
        *(
            f"- {name} ({WORKLOADS[name].about}): {GROWTHS[name].about}."
            for name in dict.fromkeys(row.workload for row in rows)
        ),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is there")
    parser.add_argument("--only", action="append", choices=sorted(GROWTHS), help="a workload (default: all)")
    parser.add_argument("--largest", type=int, default=RANKS[-1], metavar="N", help="ranks (default: %(default)s)")
    arguments = parser.parse_args(argv)
    folder = arguments.out
    try:
        if arguments.largest < RANKS[0]:
            raise ArgumentError(f"--largest: {arguments.largest}; allowed: {RANKS[0]} ranks or more")
        check_writable("--out", folder / "projection.json")
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = list(project(arguments.only or list(GROWTHS), [n for n in RANKS if n <= arguments.largest]))
    about = provenance()
    lines = ",\n  ".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)  # one row a line
    content = f'{json.dumps(about, ensure_ascii=False)[:-1]},\n "rows": [\n  {lines}\n ]}}\n'
    (folder / "projection.json").write_text(content, encoding="utf-8")
    page = report(about, rows)
    (folder / "projection.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
