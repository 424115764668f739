"""The cheapest way from one layout to another: a path over layouts, each edge one exchange on any mesh dims."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import ArgumentError, UnsupportedError
from .cost import Price, price, ranks_of
from .exchange import Change
from .layout import Layout, Partial, Placement, Replicate, Shard, StridedShard
from .mesh import Mesh
from .topology import Topology

MOST_EXPANSIONS = 6
"""Layouts from which steps are tried at most; the cheapest path known by then is taken."""
_OTHERS = 3
_MOST_TENSOR_DIMS = 4  # that stops are cut along: those that source or target cut, then the largest


@dataclass(frozen=True)
class Route:
    """The layouts a program passes through, the first its source, the last its target.

    Attributes:
        us: what its steps take together.
        peak_bytes: what a rank holds at most.
        others: the next best, and the direct exchange, the cheapest first.
    """

    stops: tuple[Layout, ...]
    us: float
    peak_bytes: int
    others: tuple[Route, ...] = ()


class Search:
    """From `source` to `target`, layouts in which mesh dims of size 1 are replicated.

    Best first over the layouts of `_nearby`, with what a path must still cost at least (`Price.least_us`) to leave out
    those that cannot win. Depends on its arguments alone, so that every rank finds the same.
    """

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
    ) -> None:
        self.mesh, self.shape, self.dtype, self.topology = mesh, shape, dtype, topology
        self.source, self.target = source, target
        self._prices: dict[tuple[Layout, Layout], Price] = {}
        used = {p.dim for x in (source, target) for p in x.placements if isinstance(p, Shard)}
        by_size = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (d not in used, -shape[d]))
        self.tensor_dims = sorted(by_size[:_MOST_TENSOR_DIMS])
        self.inside = ranks_of(mesh, topology).inside

    def price(self, a: Layout, b: Layout) -> Price:
        """Of one step; microseconds in whole nanoseconds, so that no rounding decides between two plans."""
        found = self._prices.get((a, b))
        if found is None:
            change = Change(self.mesh, self.shape, self.dtype, a, b, self.topology.node_size)
            raw = price(change, self.topology)
            found = self._prices[a, b] = Price(round(raw.us, 3), round(raw.least_us, 3), raw.peak_bytes)
        return found

    def cheapest(self, max_bytes: int | None = None) -> Route:
        """The cheapest route found.

        Raises:
            ArgumentError: none that was found stays within `max_bytes` on every rank.
        """
        source, target = self.source, self.target
        held = self.price(source, source).peak_bytes // 2
        direct = Route((source, target), self.price(source, target).us, self.price(source, target).peak_bytes)
        found, best = {direct.stops: direct}, direct.us
        if max_bytes is not None and direct.peak_bytes > max_bytes:
            best = float("inf")
        soonest = min(self.topology.node.latency_us, self.topology.network.latency_us)  # of a step that communicates
        serial = itertools.count()
        start = Route((source,), 0.0, 0)
        reached = {source: 0.0}
        queue = [(self.price(source, target).least_us, next(serial), start)]
        for _ in range(MOST_EXPANSIONS):
            if not queue or queue[0][0] >= best:
                break
            _, _, route = heapq.heappop(queue)
            here = route.stops[-1]
            if route.us > reached[here]:
                continue
            beside = held if here != source else 0
            for stop in self._nearby(here):
                step = self.price(here, stop)
                there = Route((*route.stops, stop), route.us + step.us, max(route.peak_bytes, step.peak_bytes + beside))
                if there.us >= min(best - soonest, reached.get(stop, float("inf"))):
                    continue
                last = self.price(stop, target)
                whole = Route((*there.stops, target), there.us + last.us, max(there.peak_bytes, last.peak_bytes + held))
                found[whole.stops] = whole
                if max_bytes is not None and there.peak_bytes > max_bytes:
                    continue
                reached[stop] = there.us
                if max_bytes is None or whole.peak_bytes <= max_bytes:
                    best = min(best, whole.us)
                heapq.heappush(queue, (there.us + last.least_us, next(serial), there))
        ranked = sorted(found.values(), key=lambda route: (route.us, len(route.stops)))
        fitting = [route for route in ranked if max_bytes is None or route.peak_bytes <= max_bytes]
        if not fitting:
            least = min(ranked, key=lambda route: route.peak_bytes)
            steps = " → ".join(f"({stop})" for stop in least.stops)
            raise ArgumentError(
                f"max_bytes: {max_bytes}; the plan found that holds least, {steps}, needs {least.peak_bytes}"
            )
        chosen = fitting[0]
        others = [route for route in ranked if route is not chosen]
        shown = [route for i, route in enumerate(others) if i < _OTHERS or route is direct]
        return replace(chosen, others=tuple(shown))

    def _nearby(self, x: Layout) -> Iterator[Layout]:
        """The layouts a step from `x` may lead to, besides the target.

        One mesh dim changed to what it is in the target, to replicated, or to a shard cut last; the mesh dims inside
        nodes changed all at once, or those across; these, or those of them that the target replicates, cutting one
        tensor dim, so that a node's ranks share what it takes in; all partial mesh dims scattered.
        """
        target, ndim = self.target, self.mesh.ndim
        dims = [m for m in range(ndim) if self.mesh.shape[m] > 1]
        across = [m for m in dims if m not in self.inside]
        pending = [m for m in dims if isinstance(x.placements[m], Partial) and x.placements[m] != target.placements[m]]
        replicated = [m for m in self.inside if target.placements[m] == Replicate()]
        changes: list[tuple[Layout, Mapping[int, Placement]]] = []
        changes += [(x, {m: target.placements[m] for m in level}) for level in (self.inside, across)]
        for d in self.tensor_dims:
            changes.append((target, {m: Shard(d) for m in replicated}))
            changes += [(base, {m: Shard(d) for m in self.inside}) for base in (target, x)]
            changes.append((x, {m: Shard(d) for m in pending}))
            changes.append((x, {m: Shard(d) for m in pending if m in self.inside}))
        for m in dims:
            options = [target.placements[m], Replicate(), *map(Shard, self.tensor_dims)]
            changes += [(x, {m: option}) for option in options]
        seen = {x, target}
        for base, change in changes:
            try:
                found = replaced(base, change, target)
            except UnsupportedError:  # partial ops that do not mix
                continue
            if found not in seen:
                seen.add(found)
                yield found


def replaced(layout: Layout, change: Mapping[int, Placement], like: Layout) -> Layout:
    """`layout` with other placements on some mesh dims; new shards cut last, in their order in `like`."""
    placements = [change.get(m, p) for m, p in enumerate(layout.placements)]
    orders: dict[int, tuple[int, ...]] = {}
    for d in sorted({p.dim for p in placements if isinstance(p, Shard)}):
        cut_by = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == d]
        if any(isinstance(placements[m], StridedShard) for m in cut_by):
            continue  # has no order
        wanted = like.order(d)
        if sorted(wanted) == cut_by:
            orders[d] = wanted
            continue
        kept = [m for m in layout.order(d) if m in cut_by]
        new = [m for m in cut_by if m not in kept]
        orders[d] = (*kept, *sorted(new, key=lambda m: (wanted.index(m) if m in wanted else len(wanted), m)))
    return Layout(placements, orders)
