"""Merges the traces of several ranks of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise, product

from ...errors import ArgumentError
from .trace_file import Cost, Entry, Trace


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Merge the traces of several ranks into one. Calls and bytes of a redistribution are the maximum over the ranks.

    Ranks that made a call together by shardweave are of one run, whatever their clocks say. Where traces have no such
    call in common, the clocks of their machines are compared.

    Raises:
        ArgumentError: no traces, or traces of several runs: of different world sizes, of the same rank twice, or
            without a call in common and of processes that were not alive at the same time.
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
    sessions = tuple(sorted({name for trace in traces for name in trace.sessions}))
    ended = _ended(traces)
    return Trace(traces[0].torch, traces[0].world_size, ranks, redistributions, left_out, alive, ended, sessions)


def _ended(traces: Sequence[Trace]) -> str | None:
    """The exceptions, each with the ranks that it ended."""
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        if trace.ended is not None:
            ranks.setdefault(trace.ended, []).extend(trace.ranks)
    return "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks.items()) or None


def _check_one_run(traces: Sequence[Trace]) -> None:
    """Check that the traces are of one run, by what the ranks agreed on when they communicated. Ranks that did not are
    of one run if all of their processes were alive at one time."""
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
    groups = list(enumerate(_that_met(traces)))
    # Of two groups each: a process of one group that began last, and the first trace of another that was written.
    latest = sorted(
        ((max(group, key=lambda one: one.alive[0]), i) for i, group in groups), key=lambda x: -x[0].alive[0]
    )
    earliest = sorted(
        ((min(group, key=lambda one: one.alive[1]), i) for i, group in groups), key=lambda x: x[0].alive[1]
    )
    for (late, i), (early, j) in product(latest[:2], earliest[:2]):
        if i != j and late.alive[0] > early.alive[1]:
            ended, began = (datetime.fromtimestamp(t) for t in (early.alive[1], late.alive[0]))
            raise ArgumentError(
                f"traces: that of {ranks_text(early.ranks)} was written at {ended:%Y-%m-%d %H:%M:%S}, and the process "
                f"of {ranks_text(late.ranks)} began later, at {began:%Y-%m-%d %H:%M:%S}, by the clocks of their "
                f"machines, since they have no call by shardweave in common; {allowed}"
            )


def _that_met(traces: Sequence[Trace]) -> list[list[Trace]]:
    """The traces in groups whose ranks made calls together, directly or by way of others."""
    groups: list[tuple[set[str], list[Trace]]] = []
    for trace in traces:
        names, together = set(trace.sessions), [trace]
        apart = []
        for group in groups:
            if names.isdisjoint(group[0]):
                apart.append(group)
            else:
                names |= group[0]
                together = [*group[1], *together]
        groups = [*apart, (names, together)]
    return [together for _, together in groups]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 2", "ranks 0-3, 7"."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    ranges = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
    return f"rank{'s' if len(ordered) > 1 else ''} {ranges}"
