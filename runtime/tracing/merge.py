"""One trace of several ranks of a program, and whether they are of one run of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from ...errors import ArgumentError
from .trace import Cost, Entry, Trace


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of the ranks of several: of what more than one asked for, the most calls that one of them made.

    Raises:
        ArgumentError: none, or traces that are not of one run: of programs of different sizes, of one rank twice, or of
            processes that were not alive at the same time.
    """
    _check_one_run(traces)
    found: dict[Entry, Cost] = {}
    left_out: dict[str, int] = {}
    for trace in traces:
        for entry, cost in trace.found.items():
            before = found.get(entry, cost)
            found[entry] = Cost(max(before.calls, cost.calls), max(before.bytes_received, cost.bytes_received))
        for why, calls in trace.left_out.items():
            left_out[why] = max(calls, left_out.get(why, 0))
    ranks = tuple(sorted({rank for trace in traces for rank in trace.ranks}))
    alive = max(trace.alive[0] for trace in traces), min(trace.alive[1] for trace in traces)
    return Trace(traces[0].torch, traces[0].world_size, ranks, found, left_out, alive, _ended(traces))


def _ended(traces: Sequence[Trace]) -> str | None:
    """Which ranks each exception ended."""
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        if trace.ended is not None:
            ranks.setdefault(trace.ended, []).extend(trace.ranks)
    return "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks.items()) or None


def _check_one_run(traces: Sequence[Trace]) -> None:
    """Ranks of one run have met, so their processes were all alive at one time, and nothing that they exchange, nor
    what their launcher tells them, is needed to see that."""
    allowed = "allowed: one or more, of ranks of one run"
    sizes: dict[int, list[int]] = {}
    for trace in traces:
        sizes.setdefault(trace.world_size, []).extend(trace.ranks)
    if len(sizes) != 1:
        found = ", ".join(f"{ranks_text(sizes[size])} of a run of {size}" for size in sorted(sizes)) or "none"
        raise ArgumentError(f"traces: {found}; {allowed}")
    twice = [rank for rank, times in Counter(rank for trace in traces for rank in trace.ranks).items() if times > 1]
    if twice:
        raise ArgumentError(f"traces: {ranks_text(twice)} more than once; {allowed}")
    latest, earliest = max(traces, key=lambda one: one.alive[0]), min(traces, key=lambda one: one.alive[1])
    if latest.alive[0] > earliest.alive[1]:
        ended, began = (datetime.fromtimestamp(t) for t in (earliest.alive[1], latest.alive[0]))
        raise ArgumentError(
            f"traces: that of {ranks_text(earliest.ranks)} was written at {ended:%Y-%m-%d %H:%M:%S}, and the process "
            f"of {ranks_text(latest.ranks)} began after it, at {began:%Y-%m-%d %H:%M:%S}; {allowed}"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 2", "ranks 0-3, 7"."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    ranges = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
    return f"rank{'s' if len(ordered) > 1 else ''} {ranges}"
