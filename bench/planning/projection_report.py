"""What a projection says: a table, a picture, and where plans differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planner import Topology
from ..harness.markdown import provenance_lines
from ..workloads.record_workloads import WORKLOADS
from . import validation
from .growth import GROWTHS
from .projection_rows import Row, totals

_MATTERS_US, _ROUNDING_US = 5.0, 0.01


def report(
    about: dict[str, Any], rows: Sequence[Row], measured: dict[str, Any] | None, topologies: Sequence[Topology]
) -> str:
    """Markdown. `about`: what `machine.provenance()` has; `measured`: that, and the runs of a validation."""
    found = totals(rows)
    sizes = sorted({ranks for _, _, ranks in found})
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
    for workload, topology in dict.fromkeys((workload, topology) for workload, topology, _ in found):
        cells = [
            "{:.1f} / {:.1f}".format(*found[workload, topology, n]) if (workload, topology, n) in found else "-"
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
    lines += ["", "## Where plans differ", ""]
    lines += [*_differences(rows, topologies[0]), "", _cheaper(rows)]
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
    """Rows of a table: the links of each topology over which anything goes."""
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


def _cheaper(rows: Sequence[Row]) -> str:
    """What is said of rows in which torch's steps cost less."""
    known = [(row, row.stock_us) for row in rows if row.stock_us is not None]
    ratios = [row.ours_us / us for row, us in known if us < row.ours_us - _ROUNDING_US]
    if not ratios:
        return f"In none of {len(known)} rows of projection.json is torch's plan cheaper."
    return (
        f"In {len(ratios)} of {len(known)} rows of projection.json torch's steps, each done as well as can be, cost "
        f"less than the plan that was found, at most by a factor of {max(ratios):.2f}: the search is not exhaustive."
    )


def _differences(rows: Sequence[Row], topology: Topology) -> list[str]:
    """Rows of a table, at each workload's largest size: where torch's plan costs more, most first."""
    first = [row for row in rows if row.topology == topology.name]
    lines = [
        f"On {topology.name}, at each workload's largest size, where torch's plan costs over 5% and",
        f"{_MATTERS_US:.0f} µs more, in µs and bytes of a call.",
        "",
        "| workload | ranks | redistribution | shardweave µs | torch µs | ratio | shardweave bytes | torch bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.workload for row in first):
        largest = max(row.ranks for row in first if row.workload == name)
        of = [row for row in first if row.workload == name and row.ranks == largest]
        worse = [(us / max(row.ours_us, 0.001), us, row) for row in of if (us := row.stock_us) is not None]
        for ratio, us, row in sorted(worse, key=lambda found: -found[0]):
            if ratio > 1.05 and us > row.ours_us + _MATTERS_US:
                lines.append(
                    f"| {name} | {row.ranks:,} | {row.case} | {row.ours_us:,.0f} | {us:,.0f} | {ratio:.1f} | "
                    f"{row.ours_bytes:,} | {row.stock_bytes:,} |"
                )
        lines += [
            f"| {name} | {row.ranks:,} | {row.case} | {row.ours_us:,.0f} | no plan | - | {row.ours_bytes:,} | - |"
            for row in of
            if row.stock_us is None
        ]
    return lines
