"""Time on a GPU without the host in it: calls captured in a CUDA graph, over buffers that rotate past the L2 cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..harness.interleaved import in_order

Call = Callable[[], object]
_LEAST_SECONDS = 2e-3  # of one replay, so that what a graph's start costs is small beside it
_MOST_REPEATS = 50


@dataclass(frozen=True)
class Times:
    """Seconds a call, one for each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The widest distance of a round from the median, as a part of it."""
        return max(abs(t - self.seconds) for t in self.rounds) / self.seconds


class GraphTimer:
    """Times calls in a CUDA graph, by events."""

    def __init__(self, rounds: int = 9) -> None:
        self.rounds = rounds

    def time(self, calls: Sequence[Call]) -> Times:
        """What one of `calls` takes; they do the same on buffers of their own, in turns."""
        (found,) = self.time_in_turns({"": calls}).values()
        return found

    def time_in_turns(self, sides: Mapping[str, Sequence[Call]]) -> dict[str, Times]:
        """The same of several sides, whose rounds take turns."""
        made = {}
        for side, calls in sides.items():
            graph = self._captured(calls, 1)
            once = self._replayed(graph, 2)
            repeats = min(max(round(_LEAST_SECONDS / max(min(once), 1e-7)), 1), _MOST_REPEATS)
            made[side] = (self._captured(calls, repeats) if repeats > 1 else graph, repeats * len(calls))
        found: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds):
            for side in in_order(made, number):
                graph, calls_in_graph = made[side]
                found[side] += [t / calls_in_graph for t in self._replayed(graph, 1)]
        return {side: Times(tuple(rounds)) for side, rounds in found.items()}

    def _captured(self, calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a first call compiles or allocates is not for the graph
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph, rounds: int) -> list[float]:
        found = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return found


class HostTimer:
    """The same interface by the host's clock: for what the CPU does, and for runs that have no figures.

    Args:
        least_seconds: of a round, which has as many calls; 0: one of each.
    """

    def __init__(self, rounds: int = 1, least_seconds: float = 0.0) -> None:
        self.rounds, self.least_seconds = rounds, least_seconds

    def time(self, calls: Sequence[Call]) -> Times:
        (found,) = self.time_in_turns({"": calls}).values()
        return found

    def time_in_turns(self, sides: Mapping[str, Sequence[Call]]) -> dict[str, Times]:
        repeats = dict.fromkeys(sides, 1)
        if self.least_seconds:
            for side, calls in sides.items():
                self._once(calls, 1)  # a first call touches fresh pages
                once = self._once(calls, 1) * len(calls)
                repeats[side] = max(1, math.ceil(self.least_seconds / max(once, 1e-7)))
        found: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds):
            for side in in_order(sides, number):
                found[side].append(self._once(sides[side], repeats[side]))
        return {side: Times(tuple(rounds)) for side, rounds in found.items()}

    def _once(self, calls: Sequence[Call], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        return (time.perf_counter() - began) / (repeats * len(calls))


def kernel_seconds(call: Call) -> tuple[float, int]:
    """The sum of the kernels that a call launches on the GPU, as the profiler sees them, and their number.

    Raises:
        RuntimeError: the profiler sees no kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in profiled.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        raise RuntimeError("the profiler sees no kernel on this machine")
    return sum(e.time_range.elapsed_us() for e in kernels) / 1e6, len(kernels)
