"""Requests whose planning is timed, and the clock for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import shardweave
from shardweave import Topology

MESH = (2, 2, 2, 2)
SHAPES = ((64, 64, 64, 64), (256, 32, 512, 128), (9, 17, 5, 33), (7, 16, 31, 8))
TOPOLOGIES: tuple[Topology | None, ...] = (
    None,
    shardweave.NVLINK_NODE,
    *(replace(shardweave.NVLINK_INFINIBAND, name=f"nodes of {n}", node_size=n) for n in (8, 4, 2)),
)
LARGE = (16, 64, 64)
LARGE_PAIRS = (("S0 S0 S1", "R S0 R"), ("S0 S0 S1", "S0 S1 S0"), ("R S0 R", "R S1 R"), ("P S0 S1", "S0 S0 S1"))

Request = tuple[tuple[int, ...], str, str]


def requests(count: int, seed: int = 3) -> list[Request]:
    """Shapes and pairs of layouts: of each four sources two partial, of each four targets one; any shard order."""
    random = Random(seed)
    return [(random.choice(SHAPES), _layout(random, i % 2 == 1), _layout(random, i % 4 == 3)) for i in range(count)]


def _layout(random: Random, sums: bool) -> str:
    tokens = [random.choice(["R", "S0", "S1", "S2", "S3", *(["P"] if sums else [])]) for _ in MESH]
    cuts: dict[str, list[int]] = {}
    for m, token in enumerate(tokens):
        if token[0] == "S":
            cuts.setdefault(token[1:], []).append(m)
    drawn = {d: random.sample(order, len(order)) for d, order in sorted(cuts.items())}
    orders = [f"{d}:{','.join(map(str, order))}" for d, order in drawn.items() if order != cuts[d]]
    return " ".join(tokens) + (" @ " + " ".join(orders) if orders else "")


def milliseconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The time of each call. The garbage collector is off: it would traverse every object that torch has created."""
    times = []
    gc.disable()
    try:
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    return times
