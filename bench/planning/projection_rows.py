"""The rows of a projection, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One redistribution on one topology at one size; microseconds and bytes of a call on the rank that has most of
    them, of bytes among those ranks whose programs are made. None: torch has no plan."""

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


def totals(rows: Sequence[Row]) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Milliseconds of all calls of a step, ours and torch's, by workload, topology and ranks; without what torch has no
    plan for."""
    found: dict[tuple[str, str, int], tuple[float, float]] = {}
    for row in rows:
        if row.stock_us is not None:
            ours, theirs = found.get((row.workload, row.topology, row.ranks), (0.0, 0.0))
            added = row.calls * row.ours_us / 1e3, row.calls * row.stock_us / 1e3
            found[row.workload, row.topology, row.ranks] = ours + added[0], theirs + added[1]
    return found
