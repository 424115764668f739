"""Plans of tensors of different shapes: cached parts give the same results in any order."""

from __future__ import annotations

import sys
from itertools import product
from random import Random

import numpy as np
import pytest
from box_checks import BOX_COLUMNS, rows_of_rank
from variants import crossed

from shardweave.planner import Layout, Mesh, Program, plan
from shardweave.planner.exchange import senders
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.exchange.senders import transfer_table
from shardweave.planner.exchange.transfer_table import TransferTable

pytestmark = pytest.mark.plan

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 1000, 1001, 1003)
PAIRS = {
    (4,): (("S0", "R"), ("S1", "R"), ("R", "S0"), ("S0", "S1"), ("P", "S0"), ("P", "R"), ("R", "P"), ("S0", "P")),
    (2, 2): (("S0 S1", "R R"), ("S0 R", "R S1"), ("S0 S0", "S0 S0 @ 0:1,0"), ("P S0", "S0 R"), ("S0//3 R", "R S0")),
    (2, 3): (("S0 S0", "R S0"), ("P P", "S1 R"), ("S1 S0", "S0 S1"), ("R S0", "S0 S0")),
}
MESHES = {(4,): None, (2, 2): (3, 1, 0, 2), (2, 3): None}


def clear_planner_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("shardweave.planner."):
            for cache in vars(module).values():
                if hasattr(cache, "cache_clear"):
                    cache.cache_clear()


def assert_same_rows(actual: TransferTable, expected: TransferTable, context: object) -> None:
    assert actual.axes == expected.axes, context
    for name in BOX_COLUMNS:
        assert np.array_equal(getattr(actual, name), getattr(expected, name)), (context, name)


# Each mesh, with nodes or without.
@crossed(
    "mesh_shape, node_size, dtype", list(PAIRS), [None, 2], ["float32", "int64"], ids=str,
    gate=lambda mesh_shape, node_size, dtype: dtype == "float32" and node_size == (2 if len(mesh_shape) > 1 else None),
)  # fmt: skip
def test_boxes_of_one_rank_same_on_all_code_paths(
    mesh_shape: tuple[int, ...], node_size: int | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached pairs as Python numbers and as arrays, pairs computed for one shape, and the rows of all ranks."""
    mesh = Mesh(mesh_shape, ranks=MESHES[mesh_shape])
    for (source, target), length in product(PAIRS[mesh_shape], LENGTHS):
        change, as_arrays = (
            LayoutChange(mesh, dtype, Layout.parse(source), Layout.parse(target), node_size) for _ in range(2)
        )
        with monkeypatch.context() as patched:
            patched.setattr(senders, "_MAX_SCALAR_PAIRS", 0)
            for rank in range(mesh.size):
                transfer_table(as_arrays, (0, 0), rank)  # fills the cache of the change while patched
        for shape in ((length, 6), (6, length)):
            whole = transfer_table(change, shape)
            for rank in range(mesh.size):
                context = source, target, shape, rank
                cached = transfer_table(change, shape, rank)
                with monkeypatch.context() as patched:
                    patched.setattr(senders, "_MAX_CACHED_GROUP", 0)
                    assert_same_rows(transfer_table(change, shape, rank), cached, context)
                assert_same_rows(cached, rows_of_rank(whole, rank), context)
                assert_same_rows(transfer_table(as_arrays, shape, rank), cached, context)
                assert cached.rows() == rows_of_rank(whole, rank).rows(), context


def planned(requests: list[tuple], order: list[int], cold: bool) -> dict[int, tuple[str, int]]:
    clear_planner_caches()
    plans: dict[int, tuple[str, int]] = {}
    for number in order:
        if cold:
            clear_planner_caches()
        mesh_shape, shape, source, target, rank = requests[number]
        mesh = Mesh(mesh_shape, ranks=MESHES[mesh_shape])
        program: Program = plan(mesh, shape, "float32", source, target, rank=rank)
        assert program.steps == () or program.bytes_received  # computed on demand and cached on the program
        plans[number] = program.to_json(), program.digest
    return plans


@crossed("seed", range(3), gate=lambda seed: seed == 0)
def test_plan_independent_of_order_of_shapes(seed: int) -> None:
    requests = [
        (mesh_shape, shape, *pair, rank)
        for mesh_shape, pairs in PAIRS.items()
        for pair in pairs
        for length in (0, 1, 3, 5, 1001)
        for shape in ((length, 6), (6, length))
        for rank in (0, 3)
    ]
    order = Random(seed).sample(range(len(requests)), 120)
    cold = planned(requests, order, cold=True)
    warm = planned(requests, order, cold=False)
    assert warm == cold == planned(requests, order[::-1], cold=False)
    digests: dict[tuple, int] = {}
    for number in order:
        mesh_shape, shape, source, target, _ = requests[number]
        digests[mesh_shape, shape, source, target] = cold[number][1]
    assert len(set(digests.values())) == len(digests)


def test_planner_caches_bounded() -> None:
    plan((4,), (8, 8), "float32", "S0", "R", rank=0)
    bounds = {
        f"{name}.{key}": cache.cache_parameters()["maxsize"]
        for name, module in list(sys.modules.items())
        if name.startswith("shardweave.planner.")
        for key, cache in vars(module).items()
        if hasattr(cache, "cache_parameters")
    }
    assert bounds and all(bounds.values()), bounds
