"""`python -m shardweave.bench.planning.projection --out DIR`: what recorded workloads would cost on up to 131,072 GPUs.

Writes projection.json, projection.md and projection.svg. Nothing is communicated: these are the planner's prices, of
its own plan and of torch's, on stated topologies. torch's plan is the steps that its own planner makes, each priced as
the cheapest program that does that step: the algorithm inside one of its collectives is taken to be as good as any that
the planner knows.

`--validate 2,4,8` first holds the same prices against measurements, on a topology fitted to this machine's ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

import shardweave
from shardweave import Layout, Topology
from shardweave.planner import ITEMSIZE, Mesh, plan

from ...errors import ArgumentError
from ...runtime.tracing.trace_file import Entry, Trace
from ..baselines.stock_plans import issued, stock
from ..harness.machine import provenance
from ..harness.result_file import load as load_json
from ..harness.writable import check_writable
from ..workloads.record_workloads import RECORDED
from ..workloads.trace_cases import distinct
from . import validation
from .growth import GROWTHS
from .projection_report import Row, report

RANKS = (8, 32, 128, 512, 2048, 8192, 32768, 131072)
LARGEST_DOMAIN = 64  # ranks that one NVLink domain is taken to have
_INFINIBAND = shardweave.NVLINK_INFINIBAND.network
TOPOLOGIES = (
    shardweave.NVLINK_INFINIBAND,
    Topology("flat InfiniBand", 1, _INFINIBAND, _INFINIBAND, shardweave.NVLINK_INFINIBAND.memory_gigabytes_per_s),
    shardweave.NVLINK_NODE,
)
"""In the order in which they are drawn. In the flat one each GPU is a node of its own."""


def project(names: Sequence[str], sizes: Sequence[int], topologies: Sequence[Topology]) -> Iterator[Row]:
    """All redistributions of some workloads that cost anything."""
    for name in names:
        growth = GROWTHS[name]
        cases = [(case.entries[0], case.cost.calls) for case in distinct(load(name))]
        for full_mesh, topology in product(filter(None, map(growth.full_mesh, sizes)), topologies):
            if topology.node_size is None and full_mesh.size > LARGEST_DOMAIN:
                continue
            for recorded, calls in cases:
                entry = growth.grown(recorded, full_mesh)
                request = entry.mesh, entry.shape, entry.dtype, Layout.parse(entry.source), Layout.parse(entry.target)
                ours, stock = shardweave.redistribute_cost(*request, topology), stock_us(*request, topology)
                if not (ours or stock):
                    continue
                case = f"{recorded.source} → {recorded.target}, {recorded.dtype}{list(recorded.shape)}"
                mesh, nbytes = str(entry.mesh), received(entry, topology)
                of_stock = (
                    (None, nbytes, None) if stock is None else (round(stock, 3), nbytes, stock_received(*request))
                )
                yield Row(name, case, topology.name, full_mesh.size, mesh, calls, round(ours, 3), *of_stock)


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is there")
    parser.add_argument("--only", action="append", choices=sorted(GROWTHS), help="a workload (default: all)")
    parser.add_argument("--largest", type=int, default=RANKS[-1], metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--validate", metavar="N,…", help="measure too, with so many ranks of this machine each")
    arguments = parser.parse_args(argv)
    folder = arguments.out
    try:
        if find_spec("matplotlib") is None:
            raise ArgumentError("--out: matplotlib is not here; allowed: pip install 'shardweave[report]'")
        check_writable("--out", folder / "projection.json")
        measured = folder / "validation.json"
        if arguments.validate:
            sizes = arguments.validate.split(",")
            if not all(size.isdecimal() and int(size) > 1 for size in sizes):
                raise ArgumentError(
                    f"--validate: {arguments.validate!r}; allowed: numbers of ranks above 1, separated by commas"
                )
            runs = validation.measure(list(map(int, sizes)))
            measured.write_text(json.dumps({**provenance(), "runs": runs}, indent=1) + "\n", encoding="utf-8")
        known = None
        if measured.exists():
            known = load_json(
                measured, "--out", "what --validate writes there, or no such file",
                lambda content: {key: content[key] for key in ("command", "date", "machine", "runs")},
            )  # fmt: skip
        rows = list(project(arguments.only or list(GROWTHS), [n for n in RANKS if n <= arguments.largest], TOPOLOGIES))
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(f"error: the validation failed: {failure}", file=sys.stderr)
        return 1
    from ..harness.charts import cost_against_ranks, standalone

    about = provenance()
    picture = cost_against_ranks(rows)
    if picture is not None:
        (folder / "projection.svg").write_text(standalone(picture), encoding="utf-8")
    lines = ",\n  ".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)  # one row a line
    content = f'{json.dumps(about, ensure_ascii=False)[:-1]},\n "rows": [\n  {lines}\n ]}}\n'
    (folder / "projection.json").write_text(content, encoding="utf-8")
    page = report(about, rows, known, TOPOLOGIES)
    (folder / "projection.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
