"""What a replay says: the table, the sums, the notes, and the three most expensive redistributions.

What was timed and what was priced is shown alike: a case with seconds of either side.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from ..planner.explanation import format_bytes
from ..runtime.trace import Trace
from ..runtime.trace_merging import ranks_text
from .replay_cases import Case
from .terminal import show_table

_MOST_EXPENSIVE = 3
_TEXTS = ("where", "mesh", "tensor", "layouts")


class Compared(Protocol):
    """A case, and seconds of a call by torch and by shardweave; None: torch refuses, or has no plan.

    Attributes:
        stock_bytes: that torch's plan brings a rank; None: not known.
        our_bytes: that shardweave's does.
    """

    @property
    def case(self) -> Case: ...
    @property
    def stock(self) -> float | None: ...
    @property
    def ours(self) -> float: ...
    @property
    def stock_bytes(self) -> int | None: ...
    @property
    def our_bytes(self) -> int: ...


@dataclass(frozen=True)
class Replayed:
    """A case that was run: seconds of the slowest rank in each round; no rounds of torch's: it was not run.

    Attributes:
        cold: whether what calls read had left the cache.
    """

    case: Case
    stock_rounds: tuple[float, ...]
    our_rounds: tuple[float, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    cold: bool
    stock_bytes = None  # its plan is run, not counted

    @property
    def our_bytes(self) -> int:
        return self.case.bytes_received

    @property
    def stock(self) -> float | None:
        return statistics.median(self.stock_rounds) if self.stock_rounds else None

    @property
    def ours(self) -> float:
        return statistics.median(self.our_rounds)

    def to_dict(self) -> dict[str, Any]:
        return {
            **case_dict(self.case),
            "replayed_shape": list(self.case.shape),
            "replayed_bytes_received": self.case.bytes_received,
            "torch_s": self.stock,
            "torch_quartiles_s": quartiles(self.stock_rounds),
            "shardweave_s": self.ours,
            "shardweave_quartiles_s": quartiles(self.our_rounds),
            "cold": self.cold,
            "torch_is": f"torch.distributed's {self.case.collective}" if self.case.collective else "DTensor",
            "notes": list(self.notes),
            "faults": list(self.faults),
        }


def case_dict(case: Case) -> dict[str, Any]:
    """What was recorded of it."""
    return {
        **case.entry.to_dict(),
        "meshes": len(case.entries),
        "calls": case.cost.calls,
        "bytes_received": case.cost.bytes_received,
        "where": list(case.wheres),
    }


def quartiles(rounds: Sequence[float]) -> list[float] | None:
    """The first and the third; None where there are no rounds."""
    if len(rounds) < 2:
        return [rounds[0], rounds[0]] if rounds else None
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return [low, high]


def seconds(one: Compared) -> float:
    """Of all calls of the program as it is: by torch, or by shardweave where torch refuses."""
    return (one.ours if one.stock is None else one.stock) * one.case.cost.calls


def saved(one: Compared) -> float:
    """Seconds over all calls of the program."""
    return 0.0 if one.stock is None else (one.stock - one.ours) * one.case.cost.calls


def together(found: Sequence[Compared]) -> tuple[float, float]:
    """Seconds of all calls by torch and by shardweave, of what torch does at all."""
    both = [one for one in found if one.stock is not None]
    return sum(map(seconds, both)), sum(one.ours * one.case.cost.calls for one in both)


def show_cases(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[Case, Sequence[str]]]
) -> None:
    """A table of cases.

    Args:
        rows: a case and its figures, named by `columns`.
    """
    cells = [(*_cells(case), *figures) for case, figures in rows]
    show_table(console, escape(title), _TEXTS, ("calls", *columns), cells)


def _cells(case: Case) -> tuple[str, ...]:
    """With rich's marks escaped."""
    entry, wheres = case.entry, case.wheres
    mesh = str(entry.mesh) if entry.target_mesh is None else f"{entry.mesh} to {entry.target_mesh}"
    if len(case.entries) > 1:
        mesh += f", {len(case.entries)} at once"
    cells = (
        "\n".join(wheres[:3]) + (f"\nand {len(wheres) - 3} more" if len(wheres) > 3 else ""),
        mesh,
        f"{entry.dtype}{list(case.shape)}",
        f"{entry.source} → {entry.target}",
        str(case.cost.calls),
    )
    return tuple(map(escape, cells))  # names of files and of mesh dims may have brackets


def ratio(one: Compared) -> str:
    return f"{one.stock / one.ours:.1f}" if one.stock and one.ours else "-"


def redistributions(found: Sequence[object]) -> str:
    return f"{len(found)} redistribution{'' if len(found) == 1 else 's'}"


def show_replayed(
    console: Console, trace: Trace, replayed: list[Replayed], scaled: bool, device: str, left_out: str = ""
) -> None:
    """
    Args:
        left_out: how many of the trace's redistributions were not replayed, and why; none: all were.
    """
    size = " (sizes an eighth)" if scaled else ""
    of = f"{size}, of {len(replayed)} replayed{left_out}" if left_out else size
    columns = ("received", "torch\nms", "shardweave\nms", "ratio", "saved\nms", "cache")
    rows = [
        (
            one.case,
            (
                format_bytes(one.case.bytes_received),
                _milliseconds(one.stock_rounds),
                _milliseconds(one.our_rounds),
                ratio(one),
                "-" if one.stock is None else f"{saved(one) * 1e3:.1f}",
                "cold" if one.cold else "warm",
            ),
        )
        for one in sorted(replayed, key=seconds, reverse=True)
    ]
    show_cases(console, f"{redistributions(replayed)}{size}{left_out}", columns, rows)
    console.print(
        "A time is the median over rounds of the slowest rank, ± half of what lies between the quartiles. cold: what a "
        "call reads is in no cache."
    )
    stock, ours = together(replayed)
    where = f"{os.cpu_count()} cores" if device == "cpu" else device
    console.print(
        f"All calls of a rank, on {trace.world_size} rank{'s' * (trace.world_size > 1)} of this machine ({where}){of}: "
        f"torch {stock * 1e3:.1f} ms, shardweave {ours * 1e3:.1f} ms.",
        markup=False,
    )
    if any(one.case.collective for one in replayed):
        console.print(
            "What FSDP2 issues itself is timed on torch's side as FSDP2 does it: by torch.distributed's all_gather, "
            "reduce_scatter and all_reduce of its flat tensor."
        )
    for one in replayed:
        for text in (*one.notes, *(f"shardweave is wrong: {fault}" for fault in one.faults)):
            entry = one.case.entry
            console.print(f"{entry.source} → {entry.target} of {list(one.case.shape)}: {text}", markup=False)
    show_end(console, trace, replayed, of, "torch refuses")


def _milliseconds(rounds: Sequence[float]) -> str:
    found = quartiles(rounds)
    if found is None:
        return "-"
    middle = statistics.median(rounds)
    return f"{middle * 1e3:.3f} ±{(found[1] - found[0]) / 2 / middle if middle else 0:4.0%}"


def show_end(console: Console, trace: Trace, found: Sequence[Compared], of: str, no_stock: str) -> None:
    """What the trace lacks, and what to look at first."""
    if trace.ended is not None:
        said = f"The program did not end well, so the trace lacks what was to come: {trace.ended}"
        console.print(said, style="bold", markup=False)
    for why, calls in trace.left_out.items():
        console.print(f"not in the trace: {calls} call{'' if calls == 1 else 's'}: {why}", markup=False)
    if trace.missing:
        console.print(
            f"Recorded by {ranks_text(trace.ranks)} of {trace.world_size}: what {ranks_text(trace.missing)} alone "
            f"redistribute is not here.",
            markup=False,
        )
    for line in most_expensive(found, of, no_stock):
        console.print(line, markup=False)


def most_expensive(found: Sequence[Compared], of: str, no_stock: str) -> list[str]:
    """What a program is to look at first: place, request, and what all calls cost by either.

    Args:
        of: what is to be said of the figures, if anything.
        no_stock: what is said where torch has no seconds.
    """
    shown = sorted(found, key=seconds, reverse=True)[:_MOST_EXPENSIVE]
    number = f"{len(shown)} most expensive redistributions" if len(shown) > 1 else "most expensive redistribution"
    lines = [f"\nThe {number} of a rank, all calls together{of}:"]
    for place, one in enumerate(shown, 1):
        case, calls = one.case, one.case.cost.calls
        more = f" and {len(case.wheres) - 1} more" if len(case.wheres) > 1 else ""
        entry, times = case.entry, f"{calls} call{'' if calls == 1 else 's'}"
        stock = no_stock if one.stock is None else f"torch {one.stock * calls * 1e3:.2f} ms"
        ours, received = f"shardweave {one.ours * calls * 1e3:.2f} ms", format_bytes(one.our_bytes)
        if one.stock_bytes is None:
            costs = f"{times} of {received}: {stock}, {ours}"
        else:
            costs = f"{times}: {stock} ({format_bytes(one.stock_bytes)} a call), {ours} ({received})"
        lines += [
            f" {place}. {entry.source} → {entry.target} of {entry.dtype}{list(case.shape)}, {case.wheres[0]}{more}",
            f"    {costs}",
        ]
    return lines
