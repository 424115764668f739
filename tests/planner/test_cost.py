"""Step prices of large meshes, for which ranks are sampled, against prices of all ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from random_requests import Request, random_requests

from shardweave import NVLINK_INFINIBAND, NVLINK_NODE, Layout, Link, Mesh
from shardweave.planner import MachineFigures, found_topology
from shardweave.planner.cost import priced_ranks
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.search import Search

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "source", "target"),
    [
        ((64, 8), (256, 64), "S0 S0 @ 0:1,0", "R S0"),  # half of the ranks hold nothing
        ((64, 8), (7, 8192), "S0 S1", "R S1"),  # most ranks hold nothing
        ((64, 8), (7, 8192), "S0 S1", "S1 S0"),
        ((64, 8), (40, 4096), "S0 R", "S1 R"),  # some ranks send, all receive
        ((64, 8), (4096, 64), "S0 S0", "R S0"),
        ((64, 8), (4096, 64), "P S0", "S0 S0"),
        ((16, 16), (4096, 64), "S0 S1", "S1 S0"),  # ranks whose coordinates are equal hold what they want
        ((16, 16), (64, 4096), "S1 S1", "R S1"),
        ((64, 8), (4096, 64), "P R", "S0 S0"),  # several ranks of a node hold the same term
        ((64, 8), (24576,), "S0/2 R", "R S0"),  # a shard of the target meets those of most ranks
    ],
)
def test_step_price_of_sampled_ranks(
    mesh_shape: tuple[int, int], shape: tuple[int, ...], source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(mesh_shape)
    change = LayoutChange(mesh, "bfloat16", Layout.parse(source), Layout.parse(target), NVLINK_INFINIBAND.node_size)
    sampled = step_price(change, shape, NVLINK_INFINIBAND).us
    monkeypatch.setattr(priced_ranks, "PRICED_WHOLE", mesh.size)
    priced_ranks.priced_ranks.cache_clear()
    exact = step_price(change, shape, NVLINK_INFINIBAND).us
    priced_ranks.priced_ranks.cache_clear()
    assert sampled == pytest.approx(exact, rel=0.1)


def test_step_price_of_sampled_ranks_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank waits for all others, not for the sampled ones."""
    topology = replace(NVLINK_NODE, node=Link(5.0, 100.0, one_sided=True, message_us=1.0))
    for source, target, peers in (("S0", "R", 255), ("S0", "S1", 255), ("R", "S0", 0)):
        change = LayoutChange(Mesh((256,)), "bfloat16", Layout.parse(source), Layout.parse(target))
        us = step_price(change, (256, 256), topology).us
        assert (us // 1 >= 5 + peers) == (peers > 0) and us < 10 + peers


SAMPLED_CASES = [case for case in random_requests(256, 45, seed=7) if case.family != "strided"]


@pytest.mark.parametrize("case", SAMPLED_CASES, ids=lambda case: f"{case.mesh} {case.source} -> {case.target}")
def test_search_with_sampled_ranks(case: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priced on all ranks, the path that a search finds with sampled ranks is as good as that which it finds with all,
    and the lower bound of sampled ranks is none above that."""
    mesh = Mesh(case.mesh)
    source, target = (Layout.parse(text).without_size_one(mesh.shape) for text in (case.source, case.target))
    topology = found_topology(case.node_of_ranks(), [MachineFigures("NVIDIA H100", "RDMA", 8)])
    assert topology is not None
    search = Search(mesh, case.shape, "bfloat16", source, target, topology)
    bound, path = search.price(source, target).lower_bound_us, search.cheapest()
    monkeypatch.setattr(priced_ranks, "PRICED_WHOLE", mesh.size)
    priced_ranks.priced_ranks.cache_clear()
    best = search.cheapest()
    us = sum(step.us for step in search.prices(list(pairwise(path.layouts))))
    priced_ranks.priced_ranks.cache_clear()
    assert us <= 1.2 * best.us
    assert bound <= best.us * (1 + 1e-9)


def test_messages_of_sampled_ranks() -> None:
    """A rank that gathers even shards receives from each other holder once, however many indices a shard has: quotients
    of floats are off by one for shards of 77."""
    mesh = Mesh((28, 16))
    assert mesh.size > priced_ranks.PRICED_WHOLE
    source, target = Layout.parse("S0 R"), Layout.parse("R R")
    change = LayoutChange(mesh, "float32", source, target, 1)
    with_messages = replace(NVLINK_INFINIBAND, node_size=1)
    without = replace(with_messages, network=replace(with_messages.network, message_us=0.0))
    for held in range(1, 150):
        us = [step_price(change, (28 * held,), topology).us for topology in (with_messages, without)]
        assert us[0] - us[1] == pytest.approx(27 * with_messages.network.message_us)


@pytest.mark.parametrize(("mesh_shape", "node_size"), [((2, 3, 4), 6), ((5, 4), 3), ((4, 8, 8), 8), ((40, 6), 12)])
@pytest.mark.parametrize("layout", ["R", "S0", "S1 first", "S0 all"])
def test_first_of_shard_and_terms_on_node(mesh_shape: tuple[int, ...], node_size: int, layout: str) -> None:
    """Of the ranks of a node with equal shards the first counts, by comparison of all pairs, on meshes of which all
    ranks are priced and on sampled ones."""
    mesh, dims = Mesh(mesh_shape), range(len(mesh_shape))
    tokens = {"R": ["R" for _ in dims], "S0": ["S0" if m else "R" for m in dims], "S0 all": ["S0" for _ in dims]}
    shards = Layout.parse(" ".join(tokens.get(layout, ["R" if m else "S1" for m in dims])))
    sharding = [m for _, order in shards.orders for m in order]
    ranks = priced_ranks.priced_ranks(mesh, replace(NVLINK_INFINIBAND, node_size=node_size))

    def is_first(position: int) -> bool:
        shard = [mesh.coordinate(position)[m] for m in sharding]
        earlier = range(position // node_size * node_size, position)
        return all([mesh.coordinate(other)[m] for m in sharding] != shard for other in earlier)

    receivers = ranks.positions[ranks.receivers].tolist()
    assert ranks.first_receivers(shards).tolist() == list(map(is_first, receivers))
    peers = ranks.positions[ranks.peers]
    wanted = [[is_near and is_first(p) for is_near, p in zip(*row, strict=True)]
              for row in zip(ranks.near.tolist(), peers.tolist(), strict=True)]  # fmt: skip
    assert (ranks.first_peers(shards)[0] == wanted).all()

    for reduced in ((), (0,), tuple(dims)):
        terms = [
            {tuple(mesh.coordinate(p)[m] for m in reduced) for p in ranks.positions.tolist() if p // node_size == node}
            for node in range(-(-mesh.size // node_size))
        ]
        assert ranks.terms_on_node(reduced) == max(map(len, terms))
