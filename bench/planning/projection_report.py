"""The rows of a projection, what they add up to, and its page: costs, assumptions, and the error of the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...planner import Topology
from ..harness.markdown import provenance_lines, table
from ..harness.result_file import load
from ..workloads.record_workloads import WORKLOADS
from . import validation
from .growth import GROWTHS


@dataclass(frozen=True)
class Row:
    """The cost of one redistribution on one topology and number of ranks.

    Attributes:
        calls: the calls in a step.
        ours_us, stock_us: microseconds of a call on the slowest rank; None: torch has no plan.
        ours_bytes, stock_bytes: bytes received in a call by the sampled rank that receives most.
    """

    workload: str
    case: str
    topology: str
    ranks: int
    mesh: str
    calls: int
    ours_us: float
    stock_us: float | None
    ours_bytes: int
    stock_bytes: int | None


def read_projection(path: Path, argument: str) -> dict[str, Any]:
    """Read a projection's JSON, with its "rows" as `Row`.

    Raises:
        ArgumentError: it is missing, cut short or something else; the text names `argument`.
    """
    allowed = "what `python -m shardweave.bench.planning.projection` writes"
    return load(
        path, argument, allowed,
        lambda content: {"command": content["command"], "rows": [Row(**row) for row in content["rows"]]},
    )  # fmt: skip


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


def report(
    about: dict[str, Any], rows: Sequence[Row], measured: dict[str, Any] | None, topologies: Sequence[Topology]
) -> str:
    """The page as Markdown.

    Args:
        about: the provenance of the rows (`machine.provenance()`).
        measured: the provenance and the "runs" of a validation; None: no validation.
    """
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
        for topology in topologies
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
        "![cost against ranks](projection.svg)",
        "",
        "Where one line hides another, they differ by less than its width.",
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
    if measured is not None:
        lines += [
            "",
            "## Predicted against measured",
            "",
            *provenance_lines(measured),
            "",
            "Redistributions of `bench/workloads` between ranks of this machine, in the transports it has: the price",
            "on a topology that was fitted to the same ranks just before, against the median time of the slowest rank.",
            "An error of 100% is twice as much, or half. A price is bound by latency where half of it or more is what",
            "calls, steps and peers cost however little moves; otherwise, unless nothing moves between ranks, by",
            "bandwidth.",
            "",
            *validation.rows(measured["runs"]),
        ]
    return "\n".join(lines) + "\n"
