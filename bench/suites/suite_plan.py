"""Planning: the time of a plan that is not cached, and the bytes that plans move, as multiples of the bound.

Times are of single plans, each of another request, and a sample is one of them: the same request has the same place in
every run. Bytes are counted, not timed: those of the rank that receives most by those of the rank that has to, over
seeded pairs of layouts without partial; torch's collectives as `bench/baselines/stock_plans.py` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from random import Random

from shardweave import Layout, Mesh, Topology
from shardweave.bench.harness.measure import Sink
from shardweave.bench.planning import plan_times
from shardweave.planner import plan

SUITE = "plan"
PAIRS = {"full": 1000, "quick": 200, "dry": 4}
STOCK_PAIRS = {"full": 50, "quick": 20, "dry": 1}
COUNTED = {"full": 2000, "quick": 200, "dry": 3}
BYTES = "bytes ÷ bound"
_SIDES = ("ours", "stock, greedy", "stock, graph")
_DEFAULT_ORDERS = "cold plan, default orders, no partial"
_ONE_RANK = "cold program of one rank of 16×64×64"


def cold_cases() -> dict[str, Topology | None]:
    return {f"cold plan, {t.name if t else 'no topology'}": t for t in plan_times.TOPOLOGIES}


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    del scale
    return dict.fromkeys(cold_cases(), ("ours",)) | {
        _DEFAULT_ORDERS: _SIDES,
        _ONE_RANK: ("ours",),
        f"{BYTES}, even shapes": _SIDES,
        f"{BYTES}, uneven shapes": _SIDES,
    }


def test_plan(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    from shardweave.bench.planning import plans

    plan((2,), (4,), "float32", "S0", "R")  # imports, not a plan that is measured
    detail = {"mesh": list(plan_times.MESH), "pairs": PAIRS[scale], "garbage collection": "left out"}
    pairs = plan_times.requests(PAIRS[scale])
    for name, topology in cold_cases().items():
        if name in names:
            sink.begin(name)
            calls = [partial(plan, plan_times.MESH, n, "float32", a, b, topology=topology) for n, a, b in pairs]
            sink.row(name, "ours", "ms", plan_times.milliseconds(calls), paired=True, detail=detail)
    if _DEFAULT_ORDERS in names:
        sink.begin(_DEFAULT_ORDERS)
        _beside_stock(scale, sink)
    if _ONE_RANK in names:
        sink.begin(_ONE_RANK)
        calls = [
            partial(plan, plan_times.LARGE, (65537, 4097), "bfloat16", a, b, rank=12345)
            for a, b in plan_times.LARGE_PAIRS
        ]
        sink.row(_ONE_RANK, "ours", "ms", plan_times.milliseconds(calls), paired=True)
    for what, shapes in (("even", plans.EVEN), ("uneven", plans.UNEVEN)):
        if f"{BYTES}, {what} shapes" in names:
            sink.begin(f"{BYTES}, {what} shapes")
            _count(f"{BYTES}, {what} shapes", shapes, COUNTED[scale], sink)


def _beside_stock(scale: str, sink: Sink) -> None:
    """Each request by all three, one after the other; of shapes that no other case has planned.

    Only the planners are timed, from parsed layouts: torch's returns a list of placements to go through, ours the
    program of a rank, with its boxes.
    """
    from shardweave.bench.baselines.stock_plans import stock

    random, times = Random(11), dict[str, list[float]]()
    wanted: list[tuple[tuple[int, ...], Layout, Layout]] = []
    for _, source, target in plan_times.requests(100 * STOCK_PAIRS[scale], seed=5):
        both = source + target
        if "P" not in both and "@" not in both and source != target and len(wanted) < STOCK_PAIRS[scale]:
            shape = tuple(random.randrange(16, 300) for _ in range(4))
            wanted.append((shape, Layout.parse(source), Layout.parse(target)))
    for shape, a, b in wanted:
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(plan, plan_times.MESH, shape, "float32", a, b),
            "stock, greedy": stock(plan_times.MESH, False).planning(shape, a, b),
            "stock, graph": stock(plan_times.MESH, True).planning(shape, a, b),
        }
        for side, call in calls.items():
            times.setdefault(side, []).extend(plan_times.milliseconds([call]))
    for side, samples in times.items():
        sink.row(_DEFAULT_ORDERS, side, "ms", samples, paired=True, detail={"pairs": len(wanted)})


def _count(case: str, shapes: Sequence[tuple[int, ...]], pairs: int, sink: Sink) -> None:
    """Count a seeded sample of all pairs that `bench/planning/plans.py` counts, of those that move something."""
    from shardweave.bench.baselines.stock_plans import count_stock, stock
    from shardweave.bench.planning.plans import MESHES, count_ours, layouts

    every = [
        (mesh, shape, source, target)
        for mesh in map(Mesh, MESHES)
        for shape in shapes
        for source, target in product(layouts(mesh.ndim, len(shape)), repeat=2)
    ]
    ratios: dict[str, list[float]] = {side: [] for side in _SIDES}
    for mesh, shape, source, target in Random(7).sample(every, len(every)):
        if len(ratios["ours"]) == pairs:
            break
        if source == target:
            continue
        ours, bound = count_ours(mesh, shape, source, target)
        if not bound:
            continue
        ratios["ours"].append(ours.received / bound)
        for side, graph in (("stock, greedy", False), ("stock, graph", True)):
            counted = count_stock(mesh, shape, stock(mesh.shape, graph).layouts(shape, source, target))
            ratios[side].append(counted.received / bound)
    detail = {"pairs": pairs, "of": len(every), "meshes": list(map(list, MESHES)), "shapes": list(map(list, shapes))}
    for side, samples in ratios.items():
        sink.row(case, side, "×", samples, paired=True, detail=detail)
