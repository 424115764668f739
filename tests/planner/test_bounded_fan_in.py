"""Reductions over more ranks than `MAX_FAN_IN`: done in stages, in memory proportional to peers and terms."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import brute_force_oracle as oracle
import pytest
import torch
from box_checks import assert_boxes_match_oracle, assert_matches_program_of_all

import shardweave
from shardweave import NVLINK_INFINIBAND, Layout, Mesh, Topology, redistribute_cost
from shardweave.planner import bounded_fan_in, plan, search

pytestmark = pytest.mark.plan

MODULE = import_module("shardweave.planner.plan")  # the package has the function by this name
TERMS = 4


@pytest.fixture
def few_terms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lower `MAX_FAN_IN`, without cached plans from before or after."""
    caches = (MODULE._planner, MODULE._cached_program, MODULE._search, MODULE._cost)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(bounded_fan_in, "MAX_FAN_IN", TERMS)
    monkeypatch.setattr(search, "MAX_FAN_IN", TERMS)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("topology", [None, NVLINK_INFINIBAND], ids=["bytes", "nodes"])
@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        ((16,), "P", "S0"),
        ((16,), "P", "R"),
        ((16,), "Pavg", "S0"),
        ((8,), "Pmax", "S0"),
        ((12, 2), "P S0", "S0 S0 @ 0:1,0"),
        ((12, 2), "P S0", "S0 S0"),
        ((2, 8), "P P", "S1 S0"),
        ((2, 8), "R P", "S1 R"),
    ],
)
def test_plan_with_bounded_fan_in(
    few_terms: None, mesh: tuple[int, ...], source: str, target: str, topology: Topology | None
) -> None:
    shape, names = (48, 2), ("a", "b")[: len(mesh)]
    request = Mesh(mesh, names), shape, "float64", source, target
    program = plan(*request, topology=topology)
    assert max(step.boxes.sender.shape[1] for step in program.steps) <= TERMS < max(mesh)
    assert_boxes_match_oracle(program)
    assert_matches_program_of_all(plan(*request, rank=5, topology=topology), program)
    # Whole numbers, so that no order of summation rounds.
    generator = torch.Generator().manual_seed(0)
    contributed = torch.randint(-99, 99, oracle.contribution_shape(mesh, shape, source), generator=generator).double()
    outputs = shardweave.simulate(program, oracle.local_shards(mesh, shape, source, contributed))
    whole = oracle.whole_of(mesh, source, contributed)
    for output, indices in zip(outputs, oracle.held_indices(mesh, shape, target), strict=True):
        torch.testing.assert_close(output, whole.reshape(-1)[indices], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("mesh", "shape", "source", "target"),
    [
        ((7, 2), (56, 4), "P S0", "S0 S0"),  # 7 is prime
        ((8, 2), (20, 4), "P S0", "S0 S0"),  # uneven shards
        ((8, 2), (48, 4), "P S0", "P S1"),  # nothing is reduced
        ((4, 2), (48, 4), "P S0", "S0 S0"),
    ],
)
def test_plan_keeps_mesh_dims_that_cannot_split(
    few_terms: None, mesh: tuple[int, ...], shape: tuple[int, ...], source: str, target: str
) -> None:
    program = plan(mesh, shape, "float32", source, target)
    assert program.mesh.shape == mesh
    assert_boxes_match_oracle(program)


@pytest.mark.parametrize("topology", [None, NVLINK_INFINIBAND], ids=["bytes", "nodes"])
@pytest.mark.parametrize("target", ["S0 S0", "R S0"])
def test_plan_one_rank_of_131072(target: str, topology: Topology | None) -> None:
    """Without stages the boxes of 16,384 peers would each have 16,384 senders, which takes gigabytes."""
    tracemalloc.start()
    program = plan((16384, 8), (1 << 17, 64), "bfloat16", "P S0", target, rank=77777, topology=topology)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert program.mesh.size == 1 << 17 and peak < 200e6
    assert all(step.boxes.sender.shape[1] <= bounded_fan_in.MAX_FAN_IN for step in program.steps)
    reduced = (1 << 17) // 8 * 64 * 2
    assert reduced * (1 - 1 / 128) <= program.bytes_received[0] <= (2 if target == "S0 S0" else 4) * reduced


@pytest.mark.parametrize("node_size", [1, 8])
@pytest.mark.parametrize("shape", [(4096, 14336), (4096, 4096), (14336, 4096)])
@pytest.mark.parametrize(
    ("source", "target"), [("P P S1", "R S0 S1"), ("P P S0", "R S0 S0 @ 0:2,1"), ("P P R", "R R R")]
)
def test_redistribute_cost_at_most_sum_of_stages(
    shape: tuple[int, ...], source: str, target: str, node_size: int
) -> None:
    mesh, topology = Mesh((32, 128, 8), ("replicas", "dp", "tp")), replace(NVLINK_INFINIBAND, node_size=node_size)
    layouts = bounded_fan_in.bound_fan_in(mesh, (Layout.parse(source), Layout.parse(target)))
    assert len(layouts) == 3
    us = [redistribute_cost(mesh, shape, "float32", a, b, topology) for a, b in pairwise(layouts)]
    assert redistribute_cost(mesh, shape, "float32", source, target, topology) <= sum(us) * (1 + 1e-12)
