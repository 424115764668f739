"""The page of a projection: the table and picture of costs, its assumptions, and the error of the costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planner import Topology
from ..harness.markdown import provenance_lines
from ..workloads.record_workloads import WORKLOADS
from . import validation
from .growth import GROWTHS
from .projection_rows import Row, totals


def report(
    about: dict[str, Any], rows: Sequence[Row], measured: dict[str, Any] | None, topologies: Sequence[Topology]
) -> str:
    """The page as Markdown.

    Args:
        about: the provenance of the rows (`machine.provenance()`).
        measured: the provenance and the "runs" of a validation; None: no validation.
    """
    by_case = totals(rows)
    sizes = sorted({ranks for _, _, ranks in by_case})
    lines = [
        "# Cost at scale, projected",
        "",
        *provenance_lines(about),
        "",
        "Prices, not times.",
        "",
        "All redistributions of one step of each workload (`bench/workloads/recorded`), one after another, on the rank",
        "that takes longest, in milliseconds: shardweave's plans / torch's. torch's are the steps of its own planner,",
        "each priced as the cheapest program that does it: where torch issues one collective, both cost the same. Of",
        "memory nothing is said: a model may not fit on so few ranks.",
        "",
        f"| workload | topology | {' | '.join(f'{n:,}' for n in sizes)} |",
        f"|---|---|{'---|' * len(sizes)}",
    ]
    for workload, topology in dict.fromkeys((workload, topology) for workload, topology, _ in by_case):
        cells = [
            "{:.1f} / {:.1f}".format(*by_case[workload, topology, n]) if (workload, topology, n) in by_case else "-"
            for n in sizes
        ]
        lines.append(f"| {workload} | {topology} | {' | '.join(cells)} |")
    lines += [
        "",
        "![cost against ranks](projection.svg)",
        "",
        "Where one line hides another, they differ by less than its width.",
    ]
    shown = {row.topology for row in rows}
    lines += [
        "",
        "Links and memory are assumed, not measured. A call costs nothing beside its steps: hosts run ahead of GPUs.",
        "",
    ]
    lines += _links([topology for topology in topologies if topology.name in shown])
    lines += ["", "Meshes grow so:", ""]
    names = dict.fromkeys(row.workload for row in rows)
    lines += [f"- {name} ({WORKLOADS[name].about}): {GROWTHS[name].about}." for name in names]
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


def _links(topologies: Sequence[Topology]) -> list[str]:
    """A table of the links that each topology uses."""
    lines = [
        "| topology | link | latency µs | GB/s of a rank, each way | beside, a peer | memory, GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for topology in topologies:
        links = [("inside a node", topology.node)] if topology.node_size != 1 else []
        links += [("between nodes", topology.network)] if topology.node_size is not None else []
        for where, link in links:
            message = f"{link.message_us:g} µs" if link.message_us else "none"
            figures = (
                f"{link.latency_us:g} | {link.gigabytes_per_s:g} | {message} | {topology.memory_gigabytes_per_s:g}"
            )
            lines.append(f"| {topology.name} | {where}, assumed, not measured | {figures} |")
    return lines
