"""Which rank sends a box, and whether any does, against a look at every rank."""

from __future__ import annotations

import math
from random import Random

import pytest

from shardweave.planner import Layout, Mesh, held_box
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.exchange.senders import communicates, transfer_table
from shardweave.planner.layouts.nodes import RankNodes

pytestmark = pytest.mark.plan


def random_mesh(random: Random) -> Mesh:
    shape = [random.choice((2, 3, 4)) for _ in range(random.randint(1, 3))]
    size = math.prod(shape)
    return Mesh(shape, ranks=random.choice((None, random.sample(range(size + 3), size))))


def random_layout(random: Random, mesh: Mesh, tokens: list[str]) -> Layout:
    return Layout.parse(" ".join(random.choice(tokens) for _ in mesh.shape))


@pytest.mark.parametrize("seed", range(40))
def test_sender_is_receiver_or_on_its_node_if_possible(seed: int) -> None:
    random = Random(seed)
    mesh, shape = random_mesh(random), (random.choice((1, 5, 12)), 7)
    node = [random.randrange(4) for _ in range(mesh.size + 3)]
    source, target = (random_layout(random, mesh, ["R", "R", "S0", "S1"]) for _ in range(2))
    change = LayoutChange(mesh, "float32", source, target, RankNodes(node))
    assert change.closure is not None
    table = transfer_table(change, shape)

    def node_of(position: int) -> int:
        return node[mesh.rank_at(position)]

    for row in table.rows():
        (sender,) = row.senders
        held = held_box(shape, source, mesh.shape, mesh.coordinate(sender))
        holders = [
            p
            for p in mesh.subgroup(row.receiver, change.closure)
            if held_box(shape, source, mesh.shape, mesh.coordinate(p)) == held
        ]
        near = [p for p in holders if node_of(p) == node_of(row.receiver)]
        assert sender in ([row.receiver] if row.receiver in holders else near or holders)


@pytest.mark.parametrize("seed", range(60))
def test_communicates_matches_boxes_of_all_ranks(seed: int) -> None:
    random = Random(seed)
    mesh = random_mesh(random)
    target_mesh = random_mesh(random) if seed % 4 == 0 else mesh
    shape = random.choice((1, 2, 4, 12, 31)), random.choice((1, 2, 6))
    tokens = ["R", "S0", "S0/2", "S0/3", "S1"]
    layouts = random_layout(random, mesh, tokens), random_layout(random, target_mesh, tokens)
    change = LayoutChange(mesh, "float32", *layouts, target_mesh=target_mesh)
    assert communicates(change, shape) == transfer_table(change, shape).has_foreign_rows()
