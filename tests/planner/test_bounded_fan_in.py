"""Reductions over more ranks than `MAX_FAN_IN`: done in stages, in memory proportional to peers and terms."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import brute_force_oracle as oracle
import pytest
import torch
from box_checks import assert_boxes_match_oracle, assert_matches_program_of_all
from test_simulate import poison  # noqa: F401

import shardweave
from shardweave import NVLINK_INFINIBAND, Mesh, Topology, redistribute_cost
from shardweave.planner import Program, bounded_fan_in, plan, search

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


UNEVEN_NODES = replace(
    NVLINK_INFINIBAND, node_size=None, nodes=(0, 0, 0, 1, 2, 2, 1, 1, *(3 + i // 5 for i in range(32)))
)


NODES_OF_4 = replace(NVLINK_INFINIBAND, node_size=4)


@pytest.mark.parametrize("topology", [None, NODES_OF_4, UNEVEN_NODES], ids=["bytes", "nodes", "uneven nodes"])
@pytest.mark.parametrize(
    ("mesh", "shape", "source", "target"),
    [
        ((16,), (29, 2), "P", "S0"),
        ((16,), (3, 2), "Pavg", "S1"),
        ((8, 2), (20, 4), "P S0", "S0 S0"),
        ((8, 2), (21, 5), "P P", "S0 S0 @ 0:1,0"),
        ((8, 2), (21, 5), "Pmax R", "S0/2 S1"),
        ((8, 5), (21, 5), "P P", "S1 R"),
        ((16, 2), (21, 5), "P S1", "S0 S1"),
    ],
)
def test_reduction_to_uneven_shards_in_stages(
    few_terms: None,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    source: str,
    target: str,
    topology: Topology | None,
    poison: None,  # noqa: F811
) -> None:
    """Values are reduced to nested shards, which a last step makes those that are wanted."""
    request = Mesh(mesh), shape, "float64", source, target
    program = plan(*request, topology=topology)
    assert program.is_cross_mesh and program.target_mesh.shape == mesh and program.requested is not None
    assert max(step.boxes.sender.shape[1] for step in program.steps) < mesh[0]
    for rank in (0, 5, math.prod(mesh) - 1):
        assert_matches_program_of_all(plan(*request, rank=rank, topology=topology), program)
    assert Program.from_json(program.to_json()).explain() == program.explain()
    if topology is not None:
        assert redistribute_cost(*request, topology) == pytest.approx(program.cost_us, abs=0.01)
    generator = torch.Generator().manual_seed(0)
    low = 0 if "max" in source else -99
    given = torch.randint(low, 99, oracle.contribution_shape(mesh, shape, source), generator=generator).double()
    outputs = shardweave.simulate(program, oracle.local_shards(mesh, shape, source, given))
    held = oracle.assembled(mesh, target, [x.double() for x in outputs])
    reduced = " ".join("R" if token.startswith("P") else token for token in target.split(" @ ")[0].split())
    text = reduced + target[len(target.split(" @ ")[0]) :]
    whole = oracle.whole_of(mesh, source, given)
    wanted = oracle.local_shards(mesh, shape, text, whole.reshape((1,) * len(mesh) + whole.shape))
    for got, expected in zip(held, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


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
