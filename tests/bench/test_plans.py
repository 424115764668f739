"""The counting of torch's plans, against figures counted from the collectives that it issues."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave import Layout, Mesh
from shardweave.bench.baselines.stock_plans import Stock, count_stock
from shardweave.bench.planning import plan_times
from shardweave.bench.planning.plans import EVEN, TOPOLOGIES, compare, compare_prices, count_ours, wasteful

pytestmark = pytest.mark.plan


@pytest.fixture(autouse=True)
def nobody_else() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh", "source", "target", "greedy", "graph", "bound"),
    [
        ((4, 4), "S0 S1", "S1 S0", 96, 96, 16),
        ((2, 8), "S0 S1", "S1 S0", 176, 44, 16),
        ((4, 4), "R S0", "S0 S0", 192, 60, 16),
        ((2, 8), "R S0", "S0 S0", 224, 42, 16),
        ((4, 4), "S0 S0", "R S0", 240, 108, 64),
    ],
)
def test_count_stock_on_multi_step_plans(
    mesh: tuple[int, ...], source: str, target: str, greedy: int, graph: int, bound: int
) -> None:
    shape, layouts = (8192, 8192), (Layout.parse(source), Layout.parse(target))
    for uses_graph, mebibytes in ((False, greedy), (True, graph)):
        found = count_stock(Mesh(mesh), shape, Stock(mesh, uses_graph).layouts(shape, *layouts))
        assert found.received == mebibytes << 20
    ours, least = count_ours(Mesh(mesh), shape, *layouts)
    assert ours.received == least == bound << 20 and ours.collectives == 1


def test_a_row_for_each_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.bench.planning.plans.MESHES", ((2, 2),))
    rows = list(compare(EVEN[:2]))
    assert [row.split("|")[1].strip() for row in rows] == ["torch greedy", "torch graph", "shardweave"]
    assert "| 1.00 | 1.00 | 1.0 | 1.0 | 100.0% | 100% / 0% / 0% / 0% |" in rows[2]
    # With one tensor dim there are 4 layouts, with two 9: all 12 + 72 pairs are in one column or the other.
    assert all(row.split("|")[2].strip() == "66" and row.endswith("| 0 of 18 |") for row in rows)


def test_compare_prices_has_no_cheaper_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.bench.planning.plans.MESHES", ((2, 2),))
    for topology, partial in product(TOPOLOGIES, (False, True)):
        rows = list(compare_prices(topology, EVEN[:2], partial))
        assert len(rows) == 2 and all(row.endswith("| 0 |") for row in rows), rows


def test_wasteful_rows() -> None:
    rows = [row.split(" | ") for row in wasteful()]
    assert [row[2:] for row in rows] == [
        ["96", "96", "16 in 1", "16 |"],
        ["176", "44", "16 in 1", "16 |"],
        ["192", "60", "16 in 1", "16 |"],
        ["224", "42", "16 in 1", "16 |"],
        ["240", "108", "64 in 1", "64 |"],
        ["-", "-", "16 in 1", "16 |"],
        ["384", "108", "64 in 1", "- |"],
        ["768", "480", "480 in 2", "- |"],
    ]


def test_timed_requests_cover_all_kinds() -> None:
    pairs = plan_times.requests(200)
    assert pairs == plan_times.requests(200) and {shape for shape, _, _ in pairs} == set(plan_times.SHAPES)
    for sign in ("P", "@", "R", "S3"):
        assert any(sign in source for _, source, _ in pairs) and any(sign in target for _, _, target in pairs)
