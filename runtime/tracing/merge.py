"""Merges the traces of several ranks of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from ...errors import ArgumentError
from .trace_file import Cost, Entry, Trace


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Merge the traces of several ranks into one. Calls and bytes of a redistribution are the maximum over the ranks.

    Raises:
        ArgumentError: no traces, or traces of several runs: of different world sizes, of the same rank twice, or of
            processes that were not alive at the same time.
    """
    _check_one_run(traces)
    redistributions: dict[Entry, Cost] = {}
    left_out: dict[str, int] = {}
    for trace in traces:
        for entry, cost in trace.redistributions.items():
            before = redistributions.get(entry, cost)
            redistributions[entry] = Cost(
                max(before.calls, cost.calls), max(before.bytes_received, cost.bytes_received)
            )
        for why, calls in trace.left_out.items():
            left_out[why] = max(calls, left_out.get(why, 0))
    ranks = tuple(sorted({rank for trace in traces for rank in trace.ranks}))
    alive = max(trace.alive[0] for trace in traces), min(trace.alive[1] for trace in traces)
    return Trace(traces[0].torch, traces[0].world_size, ranks, redistributions, left_out, alive, _ended(traces))


def _ended(traces: Sequence[Trace]) -> str | None:
    """The exceptions, each with the ranks that it ended."""
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        if trace.ended is not None:
            ranks.setdefault(trace.ended, []).extend(trace.ranks)
    return "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks.items()) or None


def _check_one_run(traces: Sequence[Trace]) -> None:
    """Check that the traces are of one run. The ranks of a run communicate, so all of their processes were alive at one
    time; this check needs no identifier from the launcher."""
    allowed = "allowed: one or more traces, of different ranks of one run"
    sizes: dict[int, list[int]] = {}
    for trace in traces:
        sizes.setdefault(trace.world_size, []).extend(trace.ranks)
    if len(sizes) != 1:
        runs = ", ".join(f"{ranks_text(sizes[size])} of a run of {size}" for size in sorted(sizes)) or "none"
        raise ArgumentError(f"traces: {runs}; {allowed}")
    twice = [rank for rank, times in Counter(rank for trace in traces for rank in trace.ranks).items() if times > 1]
    if twice:
        raise ArgumentError(f"traces: {ranks_text(twice)} more than once; {allowed}")
    latest, earliest = max(traces, key=lambda one: one.alive[0]), min(traces, key=lambda one: one.alive[1])
    if latest.alive[0] > earliest.alive[1]:
        ended, began = (datetime.fromtimestamp(t) for t in (earliest.alive[1], latest.alive[0]))
        raise ArgumentError(
            f"traces: that of {ranks_text(earliest.ranks)} was written at {ended:%Y-%m-%d %H:%M:%S}, and the process "
            f"of {ranks_text(latest.ranks)} began later, at {began:%Y-%m-%d %H:%M:%S}; {allowed}"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 2", "ranks 0-3, 7"."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    ranges = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
    return f"rank{'s' if len(ordered) > 1 else ''} {ranges}"
