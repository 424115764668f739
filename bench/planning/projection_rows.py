"""The rows of a projection, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def totals(rows: Sequence[Row]) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Milliseconds of a step, (shardweave, torch), by workload, topology and ranks, without rows that torch has no plan
    for."""
    sums: dict[tuple[str, str, int], tuple[float, float]] = {}
    for row in rows:
        if row.stock_us is not None:
            ours, theirs = sums.get((row.workload, row.topology, row.ranks), (0.0, 0.0))
            added = row.calls * row.ours_us / 1e3, row.calls * row.stock_us / 1e3
            sums[row.workload, row.topology, row.ranks] = ours + added[0], theirs + added[1]
    return sums
