"""How long planning takes, cold, beside torch's graph planner, and how much a rank's program of a large mesh takes."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import shardweave
from shardweave import Layout, Topology
from shardweave.planner import plan

MESH = (2, 2, 2, 2)
SHAPES = ((64, 64, 64, 64), (256, 32, 512, 128), (9, 17, 5, 33), (7, 16, 31, 8))
TOPOLOGIES: tuple[Topology | None, ...] = (
    None,
    shardweave.NVLINK_NODE,
    *(replace(shardweave.NVLINK_INFINIBAND, name=f"nodes of {n}", node_size=n) for n in (8, 4, 2)),
)
PAIRS, STOCK_PAIRS = 2000, 50
LARGE = (16, 64, 64)
LARGE_PAIRS = (("S0 S0 S1", "R S0 R"), ("S0 S0 S1", "S0 S1 S0"), ("R S0 R", "R S1 R"), ("P S0 S1", "S0 S0 S1"))

Shape = tuple[int, ...]
Request = tuple[Shape, str, str]


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


class _Pauses:
    """Seconds that Python's garbage collector has taken: it goes through every object that torch has made."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def __call__(self, phase: str, _: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._start = now
        else:
            self.seconds += now - self._start

    def __enter__(self) -> _Pauses:
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self)


def milliseconds(calls: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Of each call: without the pauses of the garbage collector, and with them."""
    found = []
    with _Pauses() as pauses:
        for call in calls:
            before, start = pauses.seconds, time.perf_counter()
            call()
            took = time.perf_counter() - start
            found.append(((took - pauses.seconds + before) * 1e3, took * 1e3))
    return found


def _row(name: str, found: Sequence[tuple[float, float]]) -> str:
    own, whole = (sorted(column) for column in zip(*found, strict=True))
    figures = f"{statistics.median(own):.2f} | {own[int(0.99 * len(own))]:.1f} | {own[-1]:.1f} | {whole[-1]:.1f}"
    return f"| {name} | {len(found)} | {figures} |"


def cold(stock_planning: Callable[[Shape, Layout, Layout], Callable[[], object]]) -> Iterator[str]:
    """Rows of planning times; what `stock_planning` returns is torch's planner on a mesh of the same shape."""
    pairs = requests(PAIRS)
    for topology in TOPOLOGIES:
        calls = [partial(plan, MESH, shape, "float32", a, b, topology=topology) for shape, a, b in pairs]
        yield _row(f"shardweave, {topology.name if topology else 'no topology'}", milliseconds(calls))
    plain = [(n, Layout.parse(a), Layout.parse(b)) for n, a, b in pairs if "P" not in a + b and "@" not in a + b]
    plain = [pair for pair in plain if pair[1] != pair[2]][:STOCK_PAIRS]
    yield _row("torch's graph planner, default orders", milliseconds([stock_planning(*pair) for pair in plain]))


def large() -> Iterator[str]:
    """Rows of the program of one rank of a large mesh: time first, then memory in a run of its own."""
    for topology in (None, shardweave.NVLINK_INFINIBAND):
        for source, target in LARGE_PAIRS:
            asked = partial(plan, LARGE, dtype="bfloat16", src=source, dst=target, rank=12345, topology=topology)
            ((took, _),) = milliseconds([partial(asked, shape=(65537, 4097))])
            tracemalloc.start()
            asked(shape=(65539, 4097))  # another request, so that nothing is known of it
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            yield f"| {source} → {target} | {topology.name if topology else 'none'} | {took:.1f} | {peak / 1e6:.1f} |"
