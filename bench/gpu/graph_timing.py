"""Times contenders in turns: on a GPU in CUDA graphs, without the host; on a CPU by the host's clock."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..harness.interleaved import in_order

Call = Callable[[], object]
_LEAST_SECONDS = 2e-3  # of one replay, so that the start of a graph is small beside it
_MOST_REPEATS = 50


class Timer(ABC):
    """Times contenders in turns."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def time(self, prepared: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Seconds a call of each contender, one figure a round, from what `prepare` returns for it."""
        seconds: dict[str, list[float]] = {side: [] for side in prepared}
        for number in range(self.rounds):
            for side in in_order(prepared, number):
                seconds[side].append(prepared[side]())
        return seconds

    @abstractmethod
    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        """A function that runs one round and returns the seconds of one call; the calls do the same on buffers of their
        own."""


class GraphTimer(Timer):
    """Times calls in a CUDA graph, by events."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        graph = self._capture(calls, 1)
        once = min(self._replay(graph) for _ in range(2))
        repeats = min(max(round(_LEAST_SECONDS / max(once, 1e-7)), 1), _MOST_REPEATS)
        if repeats > 1:
            graph = self._capture(calls, repeats)
        return lambda: self._replay(graph) / (repeats * len(calls))

    def _capture(self, calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
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

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class HostTimer(Timer):
    """Times calls by the host's clock: for CPUs, and for runs that have no figures.

    Args:
        least_seconds: the least that a round takes; 0: a round is one of each call.
    """

    def __init__(self, rounds: int = 1, least_seconds: float = 0.0) -> None:
        super().__init__(rounds)
        self.least_seconds = least_seconds

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        repeats = 1
        if self.least_seconds:
            self._run(calls, 1)  # a first call touches fresh pages
            repeats = max(1, math.ceil(self.least_seconds / max(self._run(calls, 1) * len(calls), 1e-7)))
        return partial(self._run, calls, repeats)

    def _run(self, calls: Sequence[Call], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        return (time.perf_counter() - began) / (repeats * len(calls))


def kernel_seconds(call: Call) -> tuple[float, int]:
    """The sum of the times of the kernels that a call launches on the GPU, by the profiler, and their number.

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
