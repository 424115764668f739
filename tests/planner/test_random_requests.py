"""Plans of random requests against the brute-force oracle."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace

import brute_force_oracle as oracle
import pytest
from box_checks import assert_boxes_match_oracle, assert_matches_program_of_all
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from shardweave.planner import ITEMSIZE, NVLINK_INFINIBAND, NVLINK_NODE, Link, Mesh, Topology, plan
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.layouts.node_layout import NodeLayout

pytestmark = pytest.mark.plan

SLOW = Link(latency_us=50, gigabytes_per_s=1, one_sided=False, message_us=10)
TOPOLOGIES = [
    None,
    NVLINK_NODE,
    *(replace(NVLINK_INFINIBAND, node_size=n) for n in (1, 2, 3, 4, 8)),
    replace(NVLINK_INFINIBAND, name="slow network", node_size=4, network=SLOW),
    Topology("all two-sided", 2, SLOW, SLOW, 1000.0),
]
# Partial ops that a request may have, by dtype. Only floats have averages, and only sum and avg mix.
OPS = {
    "float32": (("P", "Pavg"), ("Pmax",), ("Pmin",)),
    "bfloat16": (("P", "Pavg"), ("Pmax",), ("Pmin",)),
    "int64": (("P",), ("Pmax",), ("Pmin",)),
    "bool": (("P",), ("Pmax",), ("Pmin",)),
    "complex64": (("P", "Pavg"),),
}
_MAX_RANKS, _MAX_ELEMENTS = 16, 400


@dataclass(frozen=True)
class Request:
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: str
    source: str
    target: str
    topology: Topology | None
    rank: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.mesh_shape, ranks=self.ranks)


def bounded(draw: st.DrawFn, sizes: st.SearchStrategy[int], least: int, max_product: int) -> tuple[int, ...]:
    """Up to 4 sizes, clipped so that their product stays within `max_product`."""
    sizes_drawn: list[int] = []
    for n in draw(st.lists(sizes, min_size=least, max_size=4)):
        sizes_drawn.append(min(n, max_product // max(1, math.prod(sizes_drawn))))
    return tuple(sizes_drawn)


@st.composite
def layout_texts(draw: st.DrawFn, mesh_dims: int, tokens: list[str]) -> str:
    """A layout of random tokens and shard order."""
    chosen = " ".join(draw(st.lists(st.sampled_from(tokens), min_size=mesh_dims, max_size=mesh_dims)))
    cuts = oracle.read(chosen).orders.items()
    orders = {d: draw(st.permutations(order)) for d, order in cuts}
    odd = [f"{d}:{','.join(map(str, order))}" for d, order in sorted(orders.items()) if order != sorted(order)]
    return f"{chosen} @ {' '.join(odd)}" if odd else chosen


@st.composite
def requests(draw: st.DrawFn) -> Request:
    mesh_shape = bounded(draw, st.integers(1, 8), 1, _MAX_RANKS)
    shape = bounded(draw, st.integers(0, 17), 0, _MAX_ELEMENTS)
    size = math.prod(mesh_shape)
    dtype = draw(st.sampled_from(sorted(OPS)))
    shards = [f"S{d}{split}" for d in range(len(shape)) for split in ("", "//2", "//3")]
    tokens = ["R", *(shards if draw(st.booleans()) else shards[::3]), *draw(st.sampled_from(OPS[dtype]))]
    return Request(
        mesh_shape,
        draw(st.none() | st.permutations(range(size)).map(tuple)),
        shape,
        dtype,
        draw(layout_texts(len(mesh_shape), tokens)),
        draw(layout_texts(len(mesh_shape), tokens)),
        draw(st.sampled_from(TOPOLOGIES)),
        draw(st.integers(0, size - 1)),
    )


def check(request: Request) -> None:
    mesh, topology, itemsize = request.mesh, request.topology, ITEMSIZE[request.dtype]
    arguments = (mesh, request.shape, request.dtype, request.source, request.target)
    program = plan(*arguments, topology=topology)
    floating = request.dtype not in ("int64", "bool")
    mesh_shape = program.mesh.shape  # mesh dims that span several nodes are split in two

    ends = [(str(step.source), str(step.target)) for step in program.steps]
    # Shares by node have no text that the oracle knows; values of such programs are compared elsewhere, by `simulate`.
    through_shares = any(isinstance(step.target, NodeLayout) for step in program.steps)
    if not through_shares:
        by_step = [
            [itemsize * n for n in oracle.step_elements(mesh_shape, request.shape, *pair, floating)] for pair in ends
        ]
        assert program.bytes_received == ([sum(column) for column in zip(*by_step, strict=True)] or [0] * mesh.size)
    if "P" in request.source + request.target:
        assert program.bytes_bound is None
    else:
        least = oracle.bound_elements(request.mesh_shape, request.shape, request.source, request.target)
        assert program.bytes_bound == [itemsize * n for n in least], program.explain()
        if topology is None or not any(least):
            assert program.bytes_received == program.bytes_bound, program.explain()
    if not through_shares:
        assert_boxes_match_oracle(program)

    alone = plan(*arguments, rank=request.rank, topology=topology)
    assert_matches_program_of_all(alone, program)
    if topology is not None and program.steps:
        a, b = (x.without_size_one(mesh_shape) for x in (program.source, program.target))
        direct = step_price(
            LayoutChange(program.mesh, request.dtype, a, b, topology.node_size), request.shape, topology
        )
        assert program.cost_us is not None and program.cost_us <= direct.us + 0.001 * len(program.steps) + 1e-9


def clear_planner_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("shardweave.planner."):
            for cache in vars(module).values():
                if hasattr(cache, "cache_clear"):
                    cache.cache_clear()


def check_history(first: Request, second: Request) -> None:
    """Check that the plan of the first request is the same with and without earlier plans."""
    before = plan(first.mesh, first.shape, first.dtype, first.source, first.target, topology=first.topology)
    plan(second.mesh, second.shape, second.dtype, second.source, second.target, topology=second.topology)
    clear_planner_caches()
    again = plan(first.mesh, first.shape, first.dtype, first.source, first.target, topology=first.topology)
    assert again.to_json() == before.to_json() and again.digest == before.digest


QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# Each part has 2,000 requests and its own seed.
PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
LONG = settings(QUICK, max_examples=2000, derandomize=False, database=None)


@QUICK
@given(requests())
def test_plan_random_requests(request: Request) -> None:
    check(request)


@settings(QUICK, max_examples=40)
@given(requests(), requests())
def test_plan_independent_of_history(first: Request, second: Request) -> None:
    check_history(first, second)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_plan_random_requests_long(part: int) -> None:
    seed(part)(LONG(given(requests())(check)))()


@pytest.mark.long
def test_plan_independent_of_history_long() -> None:
    seed(0)(settings(LONG, max_examples=50 * PARTS)(given(requests(), requests())(check_history)))()


def test_planner_caches_are_bounded() -> None:
    plan((4,), (8, 8), "float32", "S0", "R", rank=0)
    bounds = {
        f"{name}.{key}": cache.cache_parameters()["maxsize"]
        for name, module in list(sys.modules.items())
        if name.startswith("shardweave.planner.")
        for key, cache in vars(module).items()
        if hasattr(cache, "cache_parameters")
    }
    assert bounds and all(bounds.values()), bounds
