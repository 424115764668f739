"""Times several contenders in turns on every rank, so that a noisy machine favours none of them.

Buffers take turns, so that what a call reads is no longer in a cache: with those of all ranks they are larger than the
last-level cache, as far as `MOST_SETS` of them go.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .machine import last_level_cache

KEPT = 4  # outputs of a contender that stay alive
TURN_SECONDS = 0.03  # the least time of the calls of a turn, so that leaving the barrier before it does not count
MOST_CALLS = 400
MOST_SETS = 1024


@dataclass(frozen=True)
class Rotation:
    """How many sets of buffers take turns."""

    sets: int
    set_bytes: int  # of all ranks
    cache_bytes: int

    @classmethod
    def of(cls, rank_bytes: int, ranks: int, cache_bytes: int | None = None) -> Rotation:
        """For calls that read `rank_bytes` on each of the ranks, which share the cache."""
        cache = last_level_cache() if cache_bytes is None else cache_bytes
        set_bytes = rank_bytes * ranks
        return cls(min(max(2, math.ceil(2 * cache / max(set_bytes, 1)) + 1), MOST_SETS), set_bytes, cache)

    @property
    def cold(self) -> bool:
        """Whether no set is in the last-level cache when its turn comes."""
        return (self.sets - 1) * self.set_bytes > self.cache_bytes


def rotating(call: Callable[[Any], Any], sets: Sequence[Any]) -> Callable[[], Any]:
    """`call` on one set after the other, and on the first again after the last."""
    turn = itertools.cycle(sets)
    return lambda: call(next(turn))


def rotation_of(local: torch.Tensor, ranks: int, cache_bytes: int | None = None) -> Rotation:
    """The rotation of tensors like this one, the same on all ranks. All ranks of the default group call it together."""
    most = torch.tensor(local.nbytes)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Rotation.of(int(most), ranks, cache_bytes)


def rotated(x: DTensor, cache_bytes: int | None = None) -> tuple[list[DTensor], Rotation]:
    """`x` and copies of it, and their rotation. All ranks of the default group call it together."""
    local, mesh = x.to_local(), x.device_mesh
    rotation = rotation_of(local, mesh.size(), cache_bytes)
    layout: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    more = (DTensor.from_local(local.clone(), mesh, x.placements, **layout) for _ in range(rotation.sets - 1))
    return [x, *more], rotation


def copies(nbytes: int, rotation: Rotation) -> Callable[[], Any]:
    """A bare copy of so many bytes: the ceiling of what is timed beside it."""
    sources = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(rotation.sets)]
    return rotating(torch.zeros(nbytes, dtype=torch.uint8).copy_, sources)


def time_sides(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    turn_seconds: float = TURN_SECONDS,
    finish: Callable[[], Any] = lambda: None,
    warm_calls: int = 2 * KEPT,
) -> dict[str, list[float]]:
    """Time the calls of each contender in turns. All ranks of the default group call it together.

    Args:
        turn_seconds: a turn has as many calls as take this long.
        finish: waits for pending calls; called once in each turn, within its time.
        warm_calls: of each contender before the first round, twice.

    Returns:
        For each contender the seconds of a call on this rank, one figure a round.
    """
    alive: dict[str, deque[Any]] = {side: deque(maxlen=KEPT) for side in sides}

    def turn(side: str, calls: int) -> float:
        call, outputs = sides[side], alive[side]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            outputs.append(call())
        finish()
        return (time.perf_counter() - start) / calls

    # The first calls bind programs and touch fresh pages. The next determine how many calls make a turn, on all ranks.
    for side in sides:
        turn(side, warm_calls)
    warm = torch.tensor([turn(side, warm_calls) for side in sides])
    dist.all_reduce(warm, op=dist.ReduceOp.MAX)
    calls = {s: max(1, min(MOST_CALLS, math.ceil(turn_seconds / t))) for s, t in zip(sides, warm.tolist(), strict=True)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in in_order(sides, number):
            seconds[side].append(turn(side, calls[side]))
    return seconds


def in_order(sides: Iterable[str], number: int) -> list[str]:
    """The order of contenders in a round: each round starts with another, and every other one is backwards, so that
    none always follows the same one."""
    names = list(sides)
    first = number % len(names)
    names = names[first:] + names[:first]
    return names[::-1] if number % 2 else names


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]], side: str) -> list[float]:
    """The seconds of the slowest rank in each round."""
    return [max(rounds) for rounds in zip(*(seconds[side] for seconds in by_rank), strict=True)]
