"""What has to be reached on a GPU of token dispatch: shares of the ceiling, latencies, and times beside others'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardweave.bench.baselines.libraries import why_absent
from shardweave.bench.baselines.token_kernels import Rival, combining, permuting, routing_and_permuting
from shardweave.bench.gpu.graph_timing import Times
from shardweave.bench.gpu.kernel_cases import Case, rotation
from shardweave.bench.gpu.target_bench import Bench
from shardweave.bench.gpu.target_rows import Row
from shardweave.bench.gpu.token_cases import FEW_SETS, Made, Shape, VirtualRank, verified


def token_rows(bench: Bench, row_of: type[Row]) -> None:
    """Rows that have a share of the ceiling to reach, or a time; then those beside others' ways, which take longer."""
    large = Shape(8, 64, 2, 8, 4) if bench.dry else Shape(4096, 7168, 8, 256, 8)
    few = Shape(3, 64, 2, 8, 4) if bench.dry else Shape(128, 7168, 8, 256, 8)
    rank = VirtualRank(large, bench.device)
    for name, make in (("push_rows", partial(rank.push, False)), ("combine_rows", rank.combine)):
        case = Case(f"{name}, {large}", 0.85, large.moved, make)
        bench.measure(row_of(case.name, "of the ceiling", case.share, True), partial(bench.kernel, case))
    row = row_of(f"route_tokens, {large}", "µs", 30.0, False)
    bench.measure(row, lambda row: latency(bench, row, rank.routed, FEW_SETS))
    row = row_of(f"decode: route + push + combine, {few}", "µs", 60.0, False)
    bench.measure(row, lambda row: latency(bench, row, VirtualRank(few, bench.device).both,
                                           rotation(2 * few.moved, bench.cache)))  # fmt: skip
    for name, target, ours, rivals in (
        ("push_rows: the best of others ÷ ours", 1.0, partial(rank.push, False), permuting(rank, bench.dry)),
        ("combine_rows: the best of others ÷ ours", 1.0, rank.combine, combining(rank, bench.dry)),
        (
            "route + push: the best of others ÷ ours",
            1.2,
            partial(rank.push, True),
            routing_and_permuting(rank, bench.dry),
        ),
    ):
        row = row_of(f"{name}, {large}", "×", target, True)
        bench.measure(row, partial(beside, bench, ours=ours, rivals=rivals, moved=large.moved))


def latency(bench: Bench, row: Row, make: Callable[[], Made], sets: int) -> None:
    times = bench.timer.time(verified([make() for _ in range(sets)]))
    row.rounds = {"ours": times}
    row.value = times.seconds * 1e6
    row.detail = {"microseconds": row.value, "spread": times.spread, "sets_of_buffers": sets}


def beside(bench: Bench, row: Row, ours: Callable[[], Made], rivals: list[Rival], moved: int) -> None:
    """The least time of others over ours. One that is not installed, or fails here, is named with the reason."""
    sets = rotation(moved, bench.cache)
    best = bench.timer.time(verified([ours() for _ in range(sets)]))
    found: dict[str, Times] = {}
    for rival in rivals:
        try:
            if bench.left() < rival.seconds:
                raise TimeoutError("no time was left")
            found[rival.name] = bench.timer.time(verified([rival.make() for _ in range(sets)]))
        except Exception as error:
            if bench.dry and not isinstance(error, ImportError):
                raise
            row.absent[rival.name] = why_absent(rival.name, error)
    if not found:
        raise RuntimeError(f"nothing to compare with: {row.absent}")
    row.rounds = {"ours": best, **found}
    row.value = min(times.seconds for times in found.values()) / best.seconds
    row.detail = {"microseconds": best.seconds * 1e6, "spread": best.spread}
    row.note = "; ".join([f"{name} {times.seconds * 1e6:.0f} µs" for name, times in found.items()]
                         + [f"{name}: {why}" for name, why in row.absent.items()])  # fmt: skip
