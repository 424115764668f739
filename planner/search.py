"""Searches for the cheapest path from one layout to another; each edge is one exchange along any mesh dims."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from ..errors import ArgumentError
from .bounded_fan_in import MAX_FAN_IN, bound_fan_in, exceeds_fan_in
from .cost.priced_ranks import priced_ranks
from .cost.step_cost import StepPrice, shard_elements, step_prices
from .cost.topology import Topology
from .exchange.node_change import layout_change
from .intermediate_layouts import IntermediateLayouts
from .layouts.dtypes import ITEMSIZE
from .layouts.layout import Layout
from .layouts.mesh import Mesh
from .layouts.placements import Partial
from .path import Path, with_others

MAX_ROUNDS = 4
"""Rounds of a search; each expands the most promising layouts reached so far."""
_LAYOUTS_PER_ROUND = 2  # pricing many steps together is cheaper than one by one
_SMALLEST = 8  # paths of least estimated memory among which the error of `cheapest_within` looks for the smallest


class Search:
    """A best-first search from `source` to `target`, in which mesh dims of size 1 are replicated.

    It expands `IntermediateLayouts`, and leaves out layouts from which the lower bound on the remaining time
    (`StepPrice.lower_bound_us`) cannot beat the best path. The result depends on the arguments alone, so every rank
    finds the same path.
    """

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, topology: Topology
    ) -> None:
        self.mesh, self.shape, self.dtype, self.topology = mesh, shape, dtype, topology
        self.source, self.target = source, target
        self._priced: dict[tuple[Layout, Layout, bool], StepPrice] = {}

    def price(self, a: Layout, b: Layout) -> StepPrice:
        """The price of the step from `a` to `b`, rounded to nanoseconds, so that rounding errors never decide between
        two paths."""
        return self.prices([(a, b)])[0]

    def prices(self, pairs: Sequence[tuple[Layout, Layout]], with_lower_bound: bool = True) -> list[StepPrice]:
        """The `price` of several steps; little slower than of one. Without
        `with_lower_bound` their lower bounds may be 0."""
        new = [(a, b) for a, b in pairs if (a, b, with_lower_bound) not in self._priced]
        changes = [layout_change(self.mesh, self.dtype, a, b, self.topology.rank_nodes) for a, b in new]
        priced = step_prices(changes, self.shape, self.topology, with_lower_bound)
        for (a, b), change, (us, lower_bound_us, peak_bytes) in zip(new, changes, priced, strict=True):
            # Steps that `bound_fan_in` would split are excluded.
            if change.contributors > MAX_FAN_IN and exceeds_fan_in(self.mesh, a, b):
                us = math.inf
            price = StepPrice(round(us, 3), round(lower_bound_us, 3), peak_bytes)
            self._priced[a, b, with_lower_bound] = self._priced[a, b, False] = price
        return [self._priced[a, b, with_lower_bound] for a, b in pairs]

    def cheapest(self) -> Path:
        """The cheapest path found."""
        return with_others(self.ranked(), 0)

    def cheapest_within(self, max_bytes: int, peak_bytes: Callable[[Path], int]) -> Path:
        """The cheapest path found on which no rank holds more than `max_bytes`.

        Args:
            peak_bytes: the exact peak of a path.

        Raises:
            ArgumentError: there is none; the message gives the smallest path found.
        """
        ranked = self.ranked(max_bytes)
        for i, path in enumerate(ranked):
            # The estimate charges equal holders equal shares of a box, which in fact one of them sends: it may be off.
            if path.peak_bytes <= 2 * max_bytes and peak_bytes(path) <= max_bytes:
                return with_others(ranked, i)
        smallest_first = sorted(dict.fromkeys([*ranked, *self.ranked()]), key=lambda path: path.peak_bytes)
        peaks = {path: peak_bytes(path) for path in smallest_first[:_SMALLEST]}
        smallest = min(peaks, key=peaks.__getitem__)
        if peaks[smallest] <= max_bytes:
            refused = [path for path in ranked if path != smallest]
            return with_others([*refused, smallest], len(refused))
        raise ArgumentError(
            f"max_bytes: {max_bytes}; allowed: at least {peaks[smallest]}, needed by the smallest plan found, "
            f"{smallest}"
        )

    def ranked(self, max_bytes: float = math.inf) -> list[Path]:
        """All paths found, cheapest first, with the overhead of one call added to each."""
        paths = (replace(path, us=path.us + self.topology.call_us) for path in self._paths(max_bytes))
        return sorted(paths, key=lambda path: (path.us, len(path.layouts)))

    def _direct_paths(self) -> list[tuple[Layout, ...]]:
        """The direct exchange. If its fan-in must be bounded: in stages, and with the cheapest path for each stage."""
        stages = bound_fan_in(self.mesh, (self.source, self.target))
        if len(stages) == 2:
            return [stages]
        layouts = [self.source]
        for a, b in pairwise(stages):
            search = Search(self.mesh, self.shape, self.dtype, a, b, self.topology)
            search._priced = self._priced  # steps of one stage are also steps of the whole path
            layouts += search.cheapest().layouts[1:]
        return list(dict.fromkeys([stages, tuple(layouts)]))

    @cached_property
    def _source_bytes(self) -> int:
        """The bytes of the largest shard of the source."""
        ranks = priced_ranks(self.mesh, self.topology)
        return int(shard_elements(ranks, self.shape, self.source).max()) * ITEMSIZE[self.dtype]

    @property
    def _least_step_us(self) -> float:
        """The least that a further step takes: a latency, unless it may be local, as steps to a new partial are."""
        for a, b in zip(self.source.placements, self.target.placements, strict=True):
            if isinstance(b, Partial) and a != b:
                return 0.0
        return min(self.topology.node.latency_us, self.topology.network.latency_us)

    def _first_paths(self, intermediate: IntermediateLayouts) -> list[Path]:
        """The direct exchange, and hierarchical reductions."""
        sequences = [*self._direct_paths(), *intermediate.hierarchical_paths(self.source)]
        first = dict.fromkeys([(self.source, self.target), *(step for path in sequences for step in pairwise(path))])
        self.prices(list(first))
        paths = []
        for layouts in sequences:
            steps = self.prices(list(pairwise(layouts)))
            peak = max(step.peak_bytes + (self._source_bytes if i else 0) for i, step in enumerate(steps))
            paths.append(Path(layouts, sum(step.us for step in steps), peak))
        return paths

    def _paths(self, max_bytes: float) -> list[Path]:
        """Paths to the target, the direct exchange first. A path that exceeds `max_bytes` is not extended."""
        source, target, least_step_us = self.source, self.target, self._least_step_us
        intermediate = IntermediateLayouts(self.mesh, self.shape, source, target, self.topology)
        paths = self._first_paths(intermediate)
        best = min((path.us for path in paths if path.peak_bytes <= max_bytes), default=math.inf)
        reached_us, tried, to_target = {source: 0.0}, {source}, {source: self.price(source, target)}

        def remaining_us(layout: Layout) -> float:
            return to_target[layout].lower_bound_us

        queue = [(remaining_us(source), 0, Path((source,), 0.0, 0))]
        for index in range(MAX_ROUNDS):
            expanded: list[Path] = []
            while queue and len(expanded) < _LAYOUTS_PER_ROUND and queue[0][0] + least_step_us < best:
                _, _, path = heapq.heappop(queue)
                if path.us <= reached_us[path.layouts[-1]]:
                    expanded.append(path)
            if not expanded:
                break
            steps_tried = [
                (path, layout)
                for path in expanded
                for layout in intermediate.next_layouts(path.layouts[-1])
                if reached_us.get(layout, math.inf) > path.us
                and (layout not in to_target or path.us + remaining_us(layout) + least_step_us < best)
            ]
            prices = self.prices([(path.layouts[-1], layout) for path, layout in steps_tried], with_lower_bound=False)
            extended = [
                (path, layout, step, path.us + step.us)
                for (path, layout), step in zip(steps_tried, prices, strict=True)
                if path.us + step.us < min(best - least_step_us, reached_us.get(layout, math.inf))
            ]
            # Most steps already cost too much; only the layouts that the others reach are priced to the target.
            new = [layout for layout in dict.fromkeys(layout for _, layout, *_ in extended) if layout not in to_target]
            last_steps = self.prices([(layout, target) for layout in new], with_lower_bound=index + 1 < MAX_ROUNDS)
            to_target.update(zip(new, last_steps, strict=True))
            best_before, tried_before = best, tried.copy()
            tried.update(layout for _, layout in steps_tried)
            # A layout that an earlier round tried must also be able to beat the best path of the rounds before.
            for path, layout, step, us in extended:
                last = to_target[layout]
                if us >= min(best - least_step_us, reached_us.get(layout, math.inf)) or (
                    layout in tried_before and path.us + remaining_us(layout) + least_step_us >= best_before
                ):
                    continue
                peak = max(path.peak_bytes, step.peak_bytes + (self._source_bytes if len(path.layouts) > 1 else 0))
                longer = Path((*path.layouts, layout), us, peak)
                complete = Path(
                    (*longer.layouts, target), us + last.us, max(peak, last.peak_bytes + self._source_bytes)
                )
                paths.append(complete)
                if peak > max_bytes:
                    continue
                reached_us[layout] = us
                if complete.peak_bytes <= max_bytes:
                    best = min(best, complete.us)
                heapq.heappush(queue, (us + remaining_us(layout), len(paths), longer))
        return paths
