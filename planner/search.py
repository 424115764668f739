"""The cheapest way from one layout to another: a path over layouts, each edge one exchange on any mesh dims."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import ArgumentError
from .bounded_fan_in import MOST_TERMS, is_too_wide, staged
from .cost import Price, elements, prices
from .dtypes import ITEMSIZE
from .exchange import change_of
from .intermediate_layouts import Stops
from .layout import Layout
from .mesh import Mesh
from .placements import Partial
from .ranks import ranks_of
from .topology import Topology

MOST_ROUNDS = 4
"""Rounds of a search, in each of which steps are tried from the most promising layouts reached so far."""
_AT_ONCE = 2  # of these layouts: to price many steps together is cheaper
_OTHERS = 3
_LEAST = 8  # routes, by their prices, of which the one that holds least is looked for


@dataclass(frozen=True)
class Route:
    """The layouts a program passes through, the first its source, the last its target.

    Attributes:
        us: what a call takes: its steps, and what it costs beside them.
        peak_bytes: what a rank holds at most, as prices say.
        others: the next best, and the direct exchange, the cheapest first.
    """

    stops: tuple[Layout, ...]
    us: float
    peak_bytes: int
    others: tuple[Route, ...] = ()

    def __str__(self) -> str:
        return " → ".join(f"({stop})" for stop in self.stops)


def _with_others(ranked: Sequence[Route], chosen: int) -> Route:
    others = [route for i, route in enumerate(ranked) if i != chosen]
    shown = [route for i, route in enumerate(others) if i < _OTHERS or len(route.stops) == 2]
    return replace(ranked[chosen], others=tuple(shown))


class Search:
    """From `source` to `target`, layouts in which mesh dims of size 1 are replicated.

    Best first over `Stops`, with what a path must still cost at least (`Price.least_us`) to leave out those that cannot
    win. Depends on its arguments alone, so that every rank finds the same.
    """

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
    ) -> None:
        self.mesh, self.shape, self.dtype, self.topology = mesh, shape, dtype, topology
        self.source, self.target = source, target

    def price(self, a: Layout, b: Layout) -> Price:
        """Of one step; microseconds in whole nanoseconds, so that no rounding decides between two plans."""
        return self.prices([(a, b)])[0]

    def prices(self, pairs: Sequence[tuple[Layout, Layout]], unbounded: int = 0) -> list[Price]:
        """`price` of some steps, which takes little more than of one; of the first `unbounded` not of `least_us`."""
        changes = [change_of(self.mesh, self.dtype, a, b, self.topology.node_size) for a, b in pairs]
        found = prices(changes, self.shape, self.topology, unbounded)
        # What `staged` would do in stages is not tried at once.
        wide = [is_too_wide(self.mesh, a, b) for a, b in pairs] if self.mesh.size > MOST_TERMS else [False] * len(pairs)
        return [
            Price(math.inf if too_wide else round(us, 3), round(least_us, 3), peak_bytes)
            for (us, least_us, peak_bytes), too_wide in zip(found, wide, strict=True)
        ]

    def cheapest(self) -> Route:
        """The cheapest route found."""
        return _with_others(self.ranked(), 0)

    def cheapest_within(self, max_bytes: int, held: Callable[[Route], int]) -> Route:
        """The cheapest route found of which `held` says that no rank holds more than `max_bytes`.

        Raises:
            ArgumentError: there is none; the text has the one that holds least.
        """
        ranked = self.ranked(max_bytes)
        for i, route in enumerate(ranked):
            # A price knows shares of what several ranks could send, and boxes are whole: it may be off by some.
            if route.peak_bytes <= 2 * max_bytes and held(route) <= max_bytes:
                return _with_others(ranked, i)
        ranked = sorted([*ranked, *self.ranked()], key=lambda route: route.peak_bytes)
        least = min(ranked[:_LEAST], key=held)
        raise ArgumentError(f"max_bytes: {max_bytes}; the plan found that holds least, {least}, needs {held(least)}")

    def ranked(self, max_bytes: float = math.inf) -> list[Route]:
        """All routes found, the cheapest first; each is one call."""
        found = (replace(route, us=route.us + self.topology.call_us) for route in self._found(max_bytes))
        return sorted(found, key=lambda route: (route.us, len(route.stops)))

    def _staged(self) -> list[tuple[Layout, ...]]:
        """The direct exchange; where it has stages, in these, and with each of them as the cheapest way by itself."""
        stages = staged(self.mesh, (self.source, self.target))
        if len(stages) == 2:
            return [stages]
        found = [self.source]
        for a, b in pairwise(stages):
            leg = Search(self.mesh, self.shape, self.dtype, a, b, self.topology).cheapest()
            found += leg.stops[1:]
        return list(dict.fromkeys([stages, tuple(found)]))

    def _found(self, max_bytes: float) -> list[Route]:
        """Routes to the target, the direct exchange first; one that holds more than `max_bytes` is led no further."""
        source, target = self.source, self.target
        at, stops = ranks_of(self.mesh, self.topology), Stops(self.mesh, self.shape, source, target, self.topology)
        held = int(elements(at, self.shape, [source]).max()) * ITEMSIZE[self.dtype]
        # One more stop is one more step, and a step takes a latency; but to become partial may take no communication.
        turns_partial = any(
            isinstance(p, Partial) and p != source.placements[m] for m, p in enumerate(target.placements)
        )
        soonest = 0.0 if turns_partial else min(self.topology.node.latency_us, self.topology.network.latency_us)
        paths = [*self._staged(), *stops.down_and_up(source)]
        direct, *steps = self.prices([(source, target), *(pair for path in paths for pair in pairwise(path))])
        left, found = iter(steps), []
        for path in paths:
            steps = [next(left) for _ in pairwise(path)]
            peak = max(step.peak_bytes + (held if i else 0) for i, step in enumerate(steps))
            found.append(Route(path, sum(step.us for step in steps), peak))
        best = min((route.us for route in found if route.peak_bytes <= max_bytes), default=math.inf)
        reached, rest = {source: 0.0}, {source: direct}
        queue = [(direct.least_us, 0, Route((source,), 0.0, 0))]
        for _ in range(MOST_ROUNDS):
            routes: list[Route] = []
            while queue and len(routes) < _AT_ONCE and queue[0][0] + soonest < best:
                _, _, route = heapq.heappop(queue)
                if route.us <= reached[route.stops[-1]]:
                    routes.append(route)
            ways = [
                (route, stop)
                for route in routes
                for stop in stops.beside(route.stops[-1])
                if reached.get(stop, math.inf) > route.us
                and (stop not in rest or route.us + rest[stop].least_us + soonest < best)
            ]
            new = [stop for stop in dict.fromkeys(stop for _, stop in ways) if stop not in rest]
            # All at once: to price a few steps more costs less than to price twice.
            pairs = [(route.stops[-1], stop) for route, stop in ways] + [(stop, target) for stop in new]
            priced = self.prices(pairs, unbounded=len(ways))
            rest.update(zip(new, priced[len(ways) :], strict=True))
            there = [
                Route(
                    (*route.stops, stop),
                    route.us + step.us,
                    max(route.peak_bytes, step.peak_bytes + (held if len(route.stops) > 1 else 0)),
                )
                for (route, stop), step in zip(ways, priced, strict=False)
            ]
            for x in there:
                here, last = x.stops[-1], rest[x.stops[-1]]
                if x.us >= min(best - soonest, reached.get(here, math.inf)):
                    continue
                whole = Route((*x.stops, target), x.us + last.us, max(x.peak_bytes, last.peak_bytes + held))
                found.append(whole)
                if x.peak_bytes > max_bytes:
                    continue
                reached[here] = x.us
                if whole.peak_bytes <= max_bytes:
                    best = min(best, whole.us)
                heapq.heappush(queue, (x.us + last.least_us, len(found), x))
        return found
