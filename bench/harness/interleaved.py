"""Times several contenders in turns on every rank, so that a noisy machine favours none of them.

Buffers rotate so that what a call reads is in no cache any more, as far as `MOST_SETS` of them go: with those of all
ranks they are more than the last-level cache.
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

KEPT = 4  # calls for which a caller keeps each output
TURN_SECONDS = 0.03  # a turn has as many calls as take this long, so that leaving the barrier before it does not count
MOST_CALLS = 400
MOST_SETS = 1024


@dataclass(frozen=True)
class Rotation:
    """How many sets of buffers take turns, and whether none is in the last-level cache when its turn comes."""

    sets: int
    set_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, rank_bytes: int, ranks: int, cache_bytes: int | None = None) -> Rotation:
        """For calls that read `rank_bytes` on each of the ranks, which share the cache."""
        cache = last_level_cache() if cache_bytes is None else cache_bytes
        each = max(rank_bytes * ranks, 1)
        return cls(min(max(2, math.ceil(2 * cache / each) + 1), MOST_SETS), rank_bytes * ranks, cache)

    @property
    def cold(self) -> bool:
        return (self.sets - 1) * self.set_bytes > self.cache_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"sets": self.sets, "set_bytes": self.set_bytes, "cache_bytes": self.cache_bytes, "cold": self.cold}


def rotating(call: Callable[[Any], Any], sets: Sequence[Any]) -> Callable[[], Any]:
    """`call` on one set after the other, from the first again after the last."""
    turn = itertools.cycle(sets)
    return lambda: call(next(turn))


def rotation_of(local: torch.Tensor, ranks: int, cache_bytes: int | None = None) -> Rotation:
    """How tensors like it take turns, alike on all ranks; `ranks` of them share the cache. All of the default group
    call it together."""
    most = torch.tensor(local.numel() * local.element_size())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Rotation.of(int(most), ranks, cache_bytes)


def rotated(x: DTensor, cache_bytes: int | None = None) -> tuple[list[DTensor], Rotation]:
    """`x` and copies of it, as many on all ranks of its mesh, and how they take turns. All ranks call it together."""
    local = x.to_local()
    rotation = rotation_of(local, x.device_mesh.size(), cache_bytes)
    again = (
        DTensor.from_local(
            local.clone(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
        for _ in range(rotation.sets - 1)
    )
    return [x, *again], rotation


def copies(most: int, rotation: Rotation) -> Callable[[], Any]:
    """A bare copy of as many bytes: the ceiling of what is timed beside it."""
    sources = [torch.ones(most, dtype=torch.uint8) for _ in range(rotation.sets)]
    target = torch.zeros(most, dtype=torch.uint8)
    return rotating(target.copy_, sources)


def time_sides(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    kept: Mapping[str, int] | None = None,
    turn_seconds: float = TURN_SECONDS,
    finish: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a call on this rank, one figure a round, of each side. All ranks of the default group call it together.

    Args:
        kept: outputs of a side that stay alive; `KEPT` where it is not named.
        finish: waits for what calls have begun: once in each turn, within its time.
    """
    alive: dict[str, deque[Any]] = {side: deque(maxlen=(kept or {}).get(side, KEPT)) for side in sides}

    def turn(side: str, calls: int) -> float:
        call, keep = sides[side], alive[side]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            keep.append(call())
        finish()
        return (time.perf_counter() - start) / calls

    # Twice as many calls as outputs are alive while it counts: the first bind programs and touch fresh pages, the next
    # say how many make a turn, the same on all ranks.
    for side in sides:
        turn(side, 2 * KEPT)
    warm = torch.tensor([turn(side, 2 * KEPT) for side in sides])
    dist.all_reduce(warm, op=dist.ReduceOp.MAX)
    calls = {s: max(1, min(MOST_CALLS, math.ceil(turn_seconds / t))) for s, t in zip(sides, warm.tolist(), strict=True)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in in_order(sides, number):
            seconds[side].append(turn(side, calls[side]))
    return seconds


def in_order(sides: Iterable[str], number: int) -> list[str]:
    """The sides as they follow each other in a round: each round another begins."""
    names = list(sides)
    first = number % len(names)
    return names[first:] + names[:first]


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]], side: str) -> list[float]:
    """Of each round the slowest rank's seconds."""
    return [max(rounds) for rounds in zip(*(found[side] for found in by_rank), strict=True)]
