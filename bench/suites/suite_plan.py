"""Planning: the time of a plan that is not cached.

Times are of single plans, each of another request, and a sample is one of them: the same request has the same place in
every run. `bench/plans.py` counts the bytes that plans move.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import shardweave
from shardweave import Layout, Topology
from shardweave.bench.harness.measure import Sink
from shardweave.planner import plan

SUITE = "plan"
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
PAIRS = {"full": 1000, "quick": 200, "dry": 4}
STOCK_PAIRS = {"full": 50, "quick": 20, "dry": 1}
_SIDES = ("ours", "stock, greedy", "stock, graph")
_DEFAULT_ORDERS = "cold plan, default orders, no partial"
_ONE_RANK = "cold program of one rank of 16×64×64"


def cold_cases() -> dict[str, Topology | None]:
    return {f"cold plan, {t.name if t else 'no topology'}": t for t in TOPOLOGIES}


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    del scale
    return dict.fromkeys(cold_cases(), ("ours",)) | {
        _DEFAULT_ORDERS: _SIDES,
        _ONE_RANK: ("ours",),
    }


def test_plan(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    plan((2,), (4,), "float32", "S0", "R")  # imports, not a plan that is measured
    detail = {"mesh": list(MESH), "pairs": PAIRS[scale], "garbage collection": "left out"}
    pairs = requests(PAIRS[scale])
    for name, topology in cold_cases().items():
        if name in names:
            sink.begin(name)
            calls = [partial(plan, MESH, n, "float32", a, b, topology=topology) for n, a, b in pairs]
            sink.row(name, "ours", "ms", milliseconds(calls), detail=detail)
    if _DEFAULT_ORDERS in names:
        sink.begin(_DEFAULT_ORDERS)
        _beside_stock(scale, sink)
    if _ONE_RANK in names:
        sink.begin(_ONE_RANK)
        calls = [partial(plan, LARGE, (65537, 4097), "bfloat16", a, b, rank=12345) for a, b in LARGE_PAIRS]
        sink.row(_ONE_RANK, "ours", "ms", milliseconds(calls))


def _beside_stock(scale: str, sink: Sink) -> None:
    """Each request by all three, one after the other; of shapes that no other case has planned.

    Only the planners are timed, from parsed layouts: torch's returns a list of placements to go through, ours the
    program of a rank, with its boxes.
    """
    from shardweave.bench.baselines.stock_plans import stock

    random, times = Random(11), dict[str, list[float]]()
    wanted: list[tuple[tuple[int, ...], Layout, Layout]] = []
    for _, source, target in requests(100 * STOCK_PAIRS[scale], seed=5):
        both = source + target
        if "P" not in both and "@" not in both and source != target and len(wanted) < STOCK_PAIRS[scale]:
            shape = tuple(random.randrange(16, 300) for _ in range(4))
            wanted.append((shape, Layout.parse(source), Layout.parse(target)))
    for shape, a, b in wanted:
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(plan, MESH, shape, "float32", a, b),
            "stock, greedy": stock(MESH, False).planning(shape, a, b),
            "stock, graph": stock(MESH, True).planning(shape, a, b),
        }
        for side, call in calls.items():
            times.setdefault(side, []).extend(milliseconds([call]))
    for side, samples in times.items():
        sink.row(_DEFAULT_ORDERS, side, "ms", samples, detail={"pairs": len(wanted)})


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
