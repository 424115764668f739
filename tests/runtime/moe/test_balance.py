"""balance_experts: against all maps by brute force, against the dispatcher's own loads, and refused arguments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of

from shardweave.errors import ArgumentError
from shardweave.runtime.moe.balance import balance_experts
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

RATIO = 1.2
"""The bound on the largest load of a rank, divided by the optimum. Not proved; held over random loads."""


def loads_of(pairs: np.ndarray, expert_map) -> np.ndarray:
    """Pairs of each rank by the documented rule: its own replica, else replica r mod n of n in order of ranks."""
    ranks, experts = pairs.shape
    loads = np.zeros(ranks)
    for e in range(experts):
        replicas = [rank for rank, held in enumerate(expert_map) if e in held]
        for r in range(ranks):
            loads[r if r in replicas else replicas[r % len(replicas)]] += pairs[r, e]
    return loads


def in_order(ranks: int, experts: int, each: int) -> list[list[int]]:
    return [[(rank * each + i) % experts for i in range(each)] for rank in range(ranks)]


def optimum(pairs: np.ndarray, each: int) -> float:
    """The smallest largest load of all maps in which a rank has no expert twice."""
    ranks, experts = pairs.shape
    subsets = [s for n in range(1, ranks + 1) for s in itertools.combinations(range(ranks), n)]
    of = {(e, s): loads_of(pairs[:, [e]], [[0] if r in s else [] for r in range(ranks)])
          for e in range(experts) for s in subsets}  # fmt: skip
    best = np.inf
    for chosen in itertools.product(itertools.combinations(range(experts), each), repeat=ranks):
        where = [tuple(r for r in range(ranks) if e in chosen[r]) for e in range(experts)]
        if all(where):
            best = min(best, sum(of[e, s] for e, s in enumerate(where)).max())
    return best


def random_pairs(kind: int, ranks: int, experts: int, g: np.random.Generator) -> np.ndarray:
    if kind == 0:
        return g.integers(0, 50, (ranks, experts))
    if kind == 1:
        return g.zipf(1.6, (1, experts)).clip(max=500) * g.integers(1, 10, (ranks, 1))
    if kind == 2:
        return (g.pareto(1, (ranks, experts)) * 10).astype(int)
    return np.tile(g.integers(0, 100, experts), (ranks, 1))


def worst_ratio(cases, rounds: int) -> float:
    g, worst = np.random.default_rng(0), 1.0
    for ranks, experts, each in cases:
        for i in range(rounds):
            pairs = random_pairs(i % 4, ranks, experts, g)
            plan = balance_experts(torch.tensor(pairs), each)
            loads = loads_of(pairs, plan.expert_map)
            np.testing.assert_allclose(plan.per_rank, loads)
            assert all(len(set(held)) == each for held in plan.expert_map)
            assert all(type(e) is int for held in plan.expert_map for e in held)
            assert loads.max() <= loads_of(pairs, in_order(ranks, experts, each)).max()
            best = optimum(pairs, each)
            assert best * RATIO >= loads.max() >= best, (pairs, plan)
            worst = max(worst, loads.max() / best) if best else worst
    return worst


@pytest.mark.plan
def test_near_the_optimum_of_all_maps():
    assert worst_ratio([(2, 4, 3), (3, 4, 2), (2, 6, 3), (3, 3, 1), (1, 3, 3), (4, 4, 1)], 8) <= RATIO


@pytest.mark.plan
@pytest.mark.parametrize("nodes, groups", [(2, None), (2, 4), (4, 4)])
def test_groups_stay_on_a_node(nodes, groups):
    """The largest load of a node is at most the bound times the best of all assignments of groups."""
    g = np.random.default_rng(nodes)
    ranks, experts, each = 4, 8, 3 if nodes == 2 else 2
    for i in range(4):
        pairs = random_pairs(i, ranks, experts, g)
        plan = balance_experts(torch.tensor(pairs), each, nodes=nodes, groups=groups)
        number = groups or experts
        node_of = {}
        for rank, held in enumerate(plan.expert_map):
            for e in held:
                assert node_of.setdefault(e * number // experts, rank * nodes // ranks) == rank * nodes // ranks
        loads = loads_of(pairs, plan.expert_map)
        np.testing.assert_allclose(plan.per_rank, loads)
        sizes = pairs.sum(0).reshape(number, -1).sum(1)
        best = min(
            np.bincount(of, sizes, nodes).max()
            for of in itertools.product(range(nodes), repeat=number)
            if (np.bincount(of, minlength=nodes) == number // nodes).all()
        )
        assert loads.reshape(nodes, -1).sum(1).max() <= best * RATIO
        away = sum(pairs[r, e] for r in range(ranks) for e in range(experts)
                   if node_of[e * number // experts] != r * nodes // ranks)  # fmt: skip
        assert plan.crossing == pytest.approx(away / pairs.sum() if pairs.sum() else 0)


@pytest.mark.plan
def test_experts_go_to_the_node_of_their_tokens():
    """Nodes' loads are equal in any case; pairs cross nodes only if experts are on the wrong one."""
    pairs = torch.zeros(4, 8)
    pairs[:2, 1::2], pairs[2:, ::2] = 5, 5
    plan = balance_experts(pairs, 2, nodes=2)
    assert plan.crossing == 0 and plan.imbalance == 1


@pytest.mark.plan
@pytest.mark.parametrize("pairs", [np.zeros((3, 5)), np.eye(3, 5) * 1e12, np.full((3, 5), 1e-9)])
def test_unusual_loads(pairs):
    plan = balance_experts(torch.tensor(pairs), 2)
    assert {e for held in plan.expert_map for e in held} == set(range(5))
    assert plan.imbalance >= 1 and (pairs.any() or plan.imbalance == 1)
    every = balance_experts(torch.tensor(pairs), 5)
    assert every.expert_map == (tuple(range(5)),) * 3  # each rank has all experts


def test_loads_are_those_of_the_dispatcher():
    """The plan's loads, and `per_source`, are what dispatches with the old and the new map count."""
    ids = [tokens_of(r, n, 2, 7, 4, torch.float32, "zipf").ids for r, n in enumerate((31, 0, 17))]
    ids[0][3, 1] = -1
    xs, weights = [torch.zeros(len(i), 4) for i in ids], [torch.ones(len(i), 2) for i in ids]

    def load(expert_map):
        sizes = {"num_experts": 7, "top_k": 2, "hidden": 4, "max_tokens": 31, "dtype": torch.float32}
        return (
            VirtualTokenDispatcher(3, **with_options(**sizes, expert_map=expert_map))
            .dispatch(xs, ids, weights)[0]
            .load()
        )

    before = load([[0, 1, 2], [3, 4, 0], [5, 6, 1]])
    want = torch.stack([torch.bincount(i[i >= 0], minlength=7) for i in ids])
    assert torch.equal(before.per_source, want) and before.per_source.dtype is torch.int64
    assert torch.equal(load(None).per_source, want)
    plan = balance_experts(before.per_source, 3)
    after = load(plan.expert_map)
    assert tuple(after.per_rank.tolist()) == plan.per_rank
    assert after.imbalance.item() == pytest.approx(plan.imbalance) and plan.imbalance < before.imbalance


@pytest.mark.plan
@pytest.mark.parametrize(
    "pairs, each, more, text",
    [
        (torch.zeros(3), 1, {}, r"pairs: torch.float32 of shape \(3,\); allowed: numbers \[W, E\]"),
        ([[1.0]], 1, {}, r"pairs: \[\[1.0\]\]; allowed"),
        (torch.zeros(0, 3), 1, {}, "pairs: .*at least one each"),
        (torch.tensor([[1.0, float("nan")]]), 2, {}, "pairs: nan to nan; allowed: finite numbers"),
        (torch.tensor([[1, -2]]), 2, {}, "pairs: -2.0 to 1.0; allowed"),
        (torch.ones(2, 4), 1, {}, "experts_per_rank: 1; allowed: a whole number, 2 to 4"),
        (torch.ones(2, 4), 3, {"nodes": 2}, "experts_per_rank: 3; allowed: a whole number, 2 to 2"),
        (torch.ones(2, 4), 2, {"nodes": 3}, "nodes: 3; allowed: a divisor of the 2 ranks"),
        (torch.ones(4, 4), 2, {"nodes": 4, "groups": 2}, "groups: 2; allowed: a divisor of 4 experts, a multiple"),
        (torch.ones(2, 3), 2, {"nodes": 2}, "groups: 3; allowed: .* a multiple of 2 nodes"),
    ],
)
def test_refused_arguments(pairs, each, more, text):
    with pytest.raises(ArgumentError, match=text):
        balance_experts(pairs, each, **more)
