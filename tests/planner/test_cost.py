"""Step prices of large meshes, for which ranks are sampled, against prices of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave import NVLINK_INFINIBAND, NVLINK_NODE, Layout, Link, Mesh
from shardweave.planner.cost import priced_ranks
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.layout_change import LayoutChange

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
