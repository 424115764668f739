"""The time of calls: on a GPU in CUDA graphs, without the host; in a dry run by the host's clock.

Each function takes calls that do the same on buffers of their own, and returns one that runs a round of them and
returns the seconds of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

Call = Callable[[], object]
Round = Callable[[], float]
_LEAST_SECONDS = 2e-3  # of one replay, so that the start of a graph is small beside it
_MOST_REPEATS = 50


def in_graph(calls: Sequence[Call]) -> Round:
    """Time calls in a CUDA graph, by events."""

    def captured(repeats: int) -> torch.cuda.CUDAGraph:
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

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    graph = captured(1)
    once = min(replay() for _ in range(2))
    repeats = min(max(round(_LEAST_SECONDS / max(once, 1e-7)), 1), _MOST_REPEATS)
    if repeats > 1:
        graph = captured(repeats)
    return lambda: replay() / (repeats * len(calls))


def by_the_clock(calls: Sequence[Call]) -> Round:
    """Time one of each call by the host's clock."""

    def run() -> float:
        began = perf_counter()
        for call in calls:
            call()
        return (perf_counter() - began) / len(calls)

    return run


def kernel_seconds(call: Call) -> float:
    """The sum of the times of the kernels that a call launches on the GPU, by the profiler.

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
    return sum(e.time_range.elapsed_us() for e in kernels) / 1e6
