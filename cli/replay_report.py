"""The report of a replay: the table, the sums, the notes, and the three most expensive redistributions.

Measured times and computed costs are shown in the same way, as seconds of both sides.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape

from ..bench.harness.terminal import Console, print_rows
from ..bench.workloads.trace_cases import Case
from ..planner import Topology
from ..planner.render.explain import format_bytes
from ..runtime.tracing.merge import ranks_text
from ..runtime.tracing.trace_file import Trace

_MOST_EXPENSIVE = 3


@dataclass(frozen=True)
class Compared:
    """A case with the seconds of a call on torch and on shardweave, on the slowest rank.

    Attributes:
        stock: torch's seconds; None where torch refuses, has no plan, or one through strided shards that are not a
            shard order.
        ours: shardweave's seconds.
        stock_bytes: the bytes that a rank receives by torch's plan; None: not known.
        our_bytes: the bytes that a rank receives by shardweave's plan.
    """

    case: Case
    stock: float | None
    ours: float
    stock_bytes: int | None
    our_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of all calls of the program on torch, or on shardweave where torch has none."""
        return (self.ours if self.stock is None else self.stock) * self.case.cost.calls

    @property
    def saved(self) -> float:
        """The seconds that shardweave saves over all calls of the program."""
        return 0.0 if self.stock is None else (self.stock - self.ours) * self.case.cost.calls

    @property
    def ratio(self) -> str:
        return f"{self.stock / self.ours:.1f}" if self.stock and self.ours else "-"

    def to_dict(self) -> dict[str, Any]:
        case = self.case
        return {
            **case.entry.to_dict(),
            "meshes": len(case.entries),
            "calls": case.cost.calls,
            "bytes_received": case.cost.bytes_received,
            "where": list(case.wheres),
            "torch_s": self.stock,
            "torch_bytes_received": self.stock_bytes,
            "shardweave_s": self.ours,
            "shardweave_bytes_received": self.our_bytes,
        }


@dataclass(frozen=True)
class Replayed(Compared):
    """A case that was run.

    Attributes:
        stock_rounds, our_rounds: the seconds of the slowest rank by round, of which `stock` and `ours` are the medians;
            empty: torch was not run.
        notes, faults: texts of the ranks.
        cold: whether the sources were evicted from the cache before each call.
    """

    stock_rounds: tuple[float, ...]
    our_rounds: tuple[float, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    cold: bool

    @classmethod
    def of(cls, case: Case, stock: Sequence[float], ours: Sequence[float], *rest: Any) -> Replayed:
        median = statistics.median(stock) if stock else None
        return cls(case, median, statistics.median(ours), None, case.bytes_received, tuple(stock), tuple(ours), *rest)

    def to_dict(self) -> dict[str, Any]:
        collective = self.case.collective
        return {
            **super().to_dict(),
            "replayed_shape": list(self.case.shape),
            "replayed_bytes_received": self.case.bytes_received,
            "torch_quartiles_s": quartiles(self.stock_rounds),
            "shardweave_quartiles_s": quartiles(self.our_rounds),
            "cold": self.cold,
            "torch_is": f"torch.distributed's {collective}" if collective else "DTensor",
            "notes": list(self.notes),
            "faults": list(self.faults),
        }


def quartiles(rounds: Sequence[float]) -> list[float] | None:
    """The first and the third quartile; None without rounds."""
    if not rounds:
        return None
    low, *_, high = statistics.quantiles([*rounds] * (1 + (len(rounds) == 1)), n=4, method="inclusive")
    return [low, high]


def totals(cases: Sequence[Compared]) -> tuple[float, float]:
    """The seconds of all calls on torch and on shardweave, over the cases that torch supports."""
    both = [one for one in cases if one.stock is not None]
    return sum(one.seconds for one in both), sum(one.ours * one.case.cost.calls for one in both)


def _count(cases: Sequence[object]) -> str:
    return f"{len(cases)} redistribution{'s' * (len(cases) != 1)}"


def show_cases(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[Case, Sequence[str]]]
) -> None:
    """Print cases with their figures, whose headings are `columns`."""
    # File names and mesh dims may contain brackets, which rich would take for markup.
    cells = [[*map(escape, _cells(case)), *figures] for case, figures in rows]
    print_rows(console, escape(title), ("where", "mesh", "tensor", "layouts"), ("calls", *columns), cells)


def _cells(case: Case) -> list[str]:
    entry, wheres = case.entry, case.wheres
    mesh = str(entry.mesh) if entry.target_mesh is None else f"{entry.mesh} to {entry.target_mesh}"
    return [
        "\n".join(wheres[:3]) + (f"\nand {len(wheres) - 3} more" if len(wheres) > 3 else ""),
        mesh + (f", {len(case.entries)} at once" if len(case.entries) > 1 else ""),
        f"{entry.dtype}{list(case.shape)}",
        f"{entry.source} → {entry.target}",
        str(case.cost.calls),
    ]


def show_replayed(
    console: Console, trace: Trace, replayed: list[Replayed], scaled: bool, device: str, left_out: str = ""
) -> None:
    """Print the report of measured cases.

    Args:
        left_out: text with the number of redistributions that were not replayed and the reason; empty: none.
    """
    size = " (sizes an eighth)" if scaled else ""
    of = f"{size}, of {len(replayed)} replayed{left_out}" if left_out else size
    columns = ("received", "torch\nms", "shardweave\nms", "ratio", "saved\nms", "cache")
    rows = [
        (one.case, (format_bytes(one.our_bytes), _milliseconds(one.stock_rounds), _milliseconds(one.our_rounds),
                    one.ratio, "-" if one.stock is None else f"{one.saved * 1e3:.1f}", "cold" if one.cold else "warm"))
        for one in sorted(replayed, key=lambda one: -one.seconds)
    ]  # fmt: skip
    show_cases(console, f"{_count(replayed)}{size}{left_out}", columns, rows)
    console.print(
        "A time is the median over rounds of the slowest rank, ± half of the interquartile range. cold: the source of "
        "a call is in no cache."
    )
    stock, ours = totals(replayed)
    where = f"{os.cpu_count()} cores" if device == "cpu" else device
    console.print(
        f"All calls of a rank, on {trace.world_size} rank{'s' * (trace.world_size > 1)} of this machine ({where}){of}: "
        f"torch {stock * 1e3:.1f} ms, shardweave {ours * 1e3:.1f} ms.",
        markup=False,
    )
    if any(one.case.collective for one in replayed):
        console.print(
            "FSDP2's own collectives are timed on torch's side as FSDP2 issues them: all_gather, reduce_scatter "
            "and all_reduce of torch.distributed on its flat tensor."
        )
    for one in replayed:
        for text in (*one.notes, *(f"shardweave is wrong: {fault}" for fault in one.faults)):
            entry = one.case.entry
            console.print(f"{entry.source} → {entry.target} of {list(one.case.shape)}: {text}", markup=False)
    show_end(console, trace, replayed, of, "torch refuses")


def _milliseconds(rounds: Sequence[float]) -> str:
    low_high = quartiles(rounds)
    if low_high is None:
        return "-"
    low, high = low_high
    median = statistics.median(rounds)
    return f"{median * 1e3:.3f} ±{(high - low) / 2 / median if median else 0:4.0%}"


def show_computed(
    console: Console, trace: Trace, cases: Sequence[Compared], topology: Topology, rows: int, left_out: str
) -> None:
    """Print the report of computed costs, the largest savings first.

    Args:
        rows: the most rows of the table; sums are over all cases.
        left_out: text with the number of redistributions without costs and the reason; empty: none.
    """
    first = sorted(cases, key=lambda one: (-round(one.saved, 9), -one.seconds))[:rows]
    number = f"{len(first)} of {_count(cases)}" if len(first) < len(cases) else _count(cases)
    of = f", of {len(cases)} priced{left_out}" if left_out else ""
    columns = ("torch\nreceives", "shardweave\nreceives", "torch\nms", "shardweave\nms", "ratio", "saved\nms")
    cells = []
    for one in first:
        theirs, ms, saved = "-", "-", "-"
        if one.stock is not None and one.stock_bytes is not None:
            theirs, ms, saved = format_bytes(one.stock_bytes), f"{one.stock * 1e3:.3f}", f"{one.saved * 1e3:.3f}"
        cells.append((one.case, (theirs, format_bytes(one.our_bytes), ms, f"{one.ours * 1e3:.3f}", one.ratio, saved)))
    show_cases(
        console, f"{number}{left_out}, simulated on {topology.name}: nothing was run or measured", columns, cells
    )
    stock, ours = totals(cases)
    console.print(
        f"All calls of a rank, of {trace.world_size}, simulated on {topology.name}{of}: torch {stock * 1e3:.1f} ms, "
        f"shardweave {ours * 1e3:.1f} ms. These are the planner's costs; a step of torch's plan costs as much as the "
        f"cheapest program that does it.",
        markup=False,
    )
    if any(one.stock is None for one in cases):
        console.print("-: torch has no plan, as between meshes, or one through strided shards, whose cost is unknown.")
    show_end(console, trace, cases, f", simulated{of}", "torch has no cost")


def show_end(console: Console, trace: Trace, cases: Sequence[Compared], of: str, no_stock: str) -> None:
    """Print what the trace does not contain, and the most expensive redistributions."""
    if trace.ended is not None:
        text = f"An exception ended the program, so the trace is incomplete: {trace.ended}"
        console.print(text, style="bold", markup=False)
    for why, calls in trace.left_out.items():
        console.print(f"not in the trace: {calls} call{'s' * (calls != 1)}: {why}", markup=False)
    if trace.missing:
        console.print(
            f"Recorded by {ranks_text(trace.ranks)} of {trace.world_size}: redistributions of "
            f"{ranks_text(trace.missing)} alone are missing.",
            markup=False,
        )
    for line in most_expensive(cases, of, no_stock):
        console.print(line, markup=False)


def most_expensive(cases: Sequence[Compared], of: str, no_stock: str) -> list[str]:
    """The most expensive redistributions: request, calling line, and the costs of all calls on both sides.

    Args:
        of: text about the figures.
        no_stock: text where torch has no seconds.
    """
    shown = sorted(cases, key=lambda one: -one.seconds)[:_MOST_EXPENSIVE]
    number = f"{len(shown)} most expensive redistributions" if len(shown) > 1 else "most expensive redistribution"
    lines = [f"\nThe {number} of a rank, all calls together{of}:"]
    for place, one in enumerate(shown, 1):
        case, calls = one.case, one.case.cost.calls
        more = f" and {len(case.wheres) - 1} more" if len(case.wheres) > 1 else ""
        entry, times = case.entry, f"{calls} call{'s' * (calls != 1)}"
        stock = no_stock if one.stock is None else f"torch {one.stock * calls * 1e3:.2f} ms"
        ours, received = f"shardweave {one.ours * calls * 1e3:.2f} ms", format_bytes(one.our_bytes)
        costs = f"{times}: {stock} ({format_bytes(one.stock_bytes or 0)} a call), {ours} ({received})"
        lines += [
            f" {place}. {entry.source} → {entry.target} of {entry.dtype}{list(case.shape)}, {case.wheres[0]}{more}",
            f"    {f'{times} of {received}: {stock}, {ours}' if one.stock_bytes is None else costs}",
        ]
    return lines
