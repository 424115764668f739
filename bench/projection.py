"""`python -m shardweave.bench.projection --out DIR`: what recorded workloads would cost on up to 131,072 GPUs.

Writes projection.json, projection.md and projection.svg. Nothing is communicated: these are the planner's prices, of
its own plan and of torch's, on stated topologies. torch's plan is the steps that its own planner makes, each priced as
the cheapest program that does that step: the algorithm inside one of its collectives is taken to be as good as any that
the planner knows.

`--validate 2,4,8` first holds the same prices against measurements, on a topology fitted to this machine's ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import shardweave
from shardweave import Layout, Topology
from shardweave.planner import ITEMSIZE, Mesh, plan

from ..errors import ArgumentError
from ..runtime.trace import Entry, Trace
from . import validation
from .growth import GROWTHS, Growth
from .machine import provenance
from .projection_report import SAID, Slowest, report
from .projection_rows import VERSION, Row
from .ranks import RanksFailed
from .record_workloads import RECORDED
from .replay_cases import distinct
from .result_file import read_versioned
from .stock_plans import issued, stock
from .theme import standalone

RANKS = (8, 32, 128, 512, 2048, 8192, 32768, 131072)
LARGEST_DOMAIN = 64  # ranks that one NVLink domain is taken to have
_INFINIBAND = shardweave.NVLINK_INFINIBAND.network
TOPOLOGIES = (
    shardweave.NVLINK_INFINIBAND,
    Topology("flat InfiniBand", 1, _INFINIBAND, _INFINIBAND, shardweave.NVLINK_INFINIBAND.memory_gigabytes_per_s),
    shardweave.NVLINK_NODE,
)
"""By what is drawn first. In the flat one each GPU is a node of its own."""


def project(
    names: Sequence[str], sizes: Sequence[int], topologies: Sequence[Topology], slowest: Slowest
) -> Iterator[Row]:
    """Every redistribution of some workloads, with what costs nothing left out."""
    for name in names:
        growth = GROWTHS[name]
        entries = [(case.entries[0], case.cost.calls) for case in distinct(load(name))]
        for ranks in sizes:
            world = growth.world(ranks)
            if world is None:
                continue
            for topology in topologies:
                if topology.node_size is None and ranks > LARGEST_DOMAIN:
                    continue
                yield from _rows(name, growth, entries, world, topology, slowest)


def load(name: str) -> Trace:
    return Trace.read(RECORDED / f"{name}.json")


def _rows(
    name: str,
    growth: Growth,
    entries: Sequence[tuple[Entry, int]],
    world: Mesh,
    topology: Topology,
    slowest: Slowest,
) -> Iterator[Row]:
    for recorded, calls in entries:
        entry = growth.grown(recorded, world)
        source, target = (Layout.parse(text) for text in (entry.source, entry.target))
        ours = shardweave.redistribute_cost(entry.mesh, entry.shape, entry.dtype, source, target, topology)
        theirs = stock_us(entry.mesh, entry.shape, entry.dtype, source, target, topology)
        if not ours and not theirs:
            continue
        text = f"{recorded.source} → {recorded.target}"
        at = f"{name}, {text} of {entry.dtype}{list(entry.shape)} on {entry.mesh}, {topology.name}"
        yield Row(
            name,
            f"{text}, {recorded.dtype}{list(recorded.shape)}",
            topology.name,
            world.size,
            str(entry.mesh),
            calls,
            round(ours, 3),
            None if theirs is None else round(theirs, 3),
            slowest.timed(at, partial(received, entry, topology)),
            None if theirs is None else stock_received(entry.mesh, entry.shape, entry.dtype, source, target),
        )


def stock_stops(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> list[Layout] | None:
    """The layouts that torch's collectives lead through; None where its planner has no way."""
    # Mesh dims of one rank are none to torch, which would issue collectives for them.
    source, target = (layout.without_size_one(mesh.shape) for layout in (source, target))
    try:
        return stock(mesh.shape, False).stops(shape, source, target)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return None


@cache
def stock_us(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
) -> float | None:
    """The price of torch's plan, step by step, in one call."""
    stops = stock_stops(mesh, shape, source, target)
    if stops is None:
        return None
    steps = replace(topology, call_us=0.0)
    us = sum(shardweave.redistribute_cost(mesh, shape, dtype, a, b, steps) for a, b in pairwise(stops))
    return us + topology.call_us if us else 0.0


def sampled(mesh: Mesh) -> list[int]:
    """The positions whose own programs are made: of other coordinates along every mesh dim."""
    return sorted({0, min(1, mesh.size - 1), mesh.size // 3, mesh.size // 2, mesh.size - 1})


def received(entry: Entry, topology: Topology) -> int:
    """The most bytes that one of a few ranks receives by its own program."""
    asked = entry.mesh, entry.shape, entry.dtype, entry.source, entry.target
    return max(plan(*asked, rank=r, topology=topology).bytes_received[0] for r in sampled(entry.mesh))


def stock_received(mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout) -> int:
    """The same by torch's collectives, padded as it pads them."""
    stops = stock_stops(mesh, shape, source, target)
    assert stops is not None
    came = [sum(issued(mesh, shape, a, b, r) for a, b in pairwise(stops)) for r in sampled(mesh)]
    return max(came) * ITEMSIZE[dtype]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is there")
    parser.add_argument("--only", action="append", choices=sorted(GROWTHS), help="a workload (default: all)")
    parser.add_argument("--largest", type=int, default=RANKS[-1], metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--validate", metavar="N,…", help="measure too, with so many ranks of this machine each")
    arguments = parser.parse_args(argv)
    try:
        if find_spec("matplotlib") is None:
            raise ArgumentError(
                "the projection draws with matplotlib, which is not here: pip install 'shardweave[bench]'"
            )
        if not os.access(arguments.out, os.W_OK) or not arguments.out.is_dir():
            raise ArgumentError(f"--out: {str(arguments.out)!r} cannot be written; allowed: a folder that is there")
        measured = arguments.out / "validation.json"
        if arguments.validate:
            runs = validation.measure(_numbers(arguments.validate))
            text = json.dumps({"version": validation.VERSION, **provenance(), "runs": runs}, indent=1) + "\n"
            measured.write_text(text, encoding="utf-8")
        known = read_validation(measured) if measured.exists() else None
        slowest = Slowest()
        sizes = [n for n in RANKS if n <= arguments.largest]
        rows = list(project(arguments.only or list(GROWTHS), sizes, TOPOLOGIES, slowest))
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RanksFailed as failure:
        print(f"error: the validation ends: {failure}", file=sys.stderr)
        return 1
    data = {"version": VERSION, **provenance(), "rows": [asdict(row) for row in rows]}
    (arguments.out / "projection.json").write_text(_json(data), encoding="utf-8")
    _draw(rows, arguments.out / "projection.svg")
    text = report({**data, "validation": known}, rows, slowest, TOPOLOGIES)
    (arguments.out / "projection.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _draw(rows: Sequence[Row], path: Path) -> None:
    from .pictures import cost_against_ranks

    picture = cost_against_ranks(rows)
    if picture is not None:
        path.write_text(standalone(picture), encoding="utf-8")


def read_validation(path: Path) -> dict[str, Any]:
    """
    Raises:
        ArgumentError: it is cut short, of another version or something else.
    """
    what = "what --validate writes there, or no such file"
    given = read_versioned(path, "--out", validation.VERSION, what, "runs")
    about = given.get("machine")
    whole = isinstance(given.get("command"), str) and isinstance(about, dict) and about.keys() >= SAID
    if not whole or not all(map(validation.is_run, given["runs"])):
        raise ArgumentError(f"--out: {str(path)!r} is something else; allowed: {what}")
    return given


def _json(data: dict[str, Any]) -> str:
    """A row a line."""
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in data["rows"])
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, ensure_ascii=False)
    return f'{head[:-1]},\n "rows": [\n  {lines}\n ]}}\n'


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ArgumentError(f"--validate: {text!r}; allowed: numbers of ranks above 1, separated by commas")
    return list(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
