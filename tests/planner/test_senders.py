"""Which rank sends a box, and whether any does, against a look at every rank."""

from __future__ import annotations

import math
from dataclasses import fields
from random import Random

import numpy as np
import pytest

from shardweave.planner import Layout, Mesh, held_box
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.exchange.senders import communicates, transfer_table
from shardweave.planner.exchange.transfer_table import TransferTable
from shardweave.planner.layouts.nodes import Nodes, RankNodes, nodes_of

pytestmark = pytest.mark.plan


def random_mesh(random: Random) -> Mesh:
    shape = [random.choice((1, 2, 3, 4)) for _ in range(random.randint(1, 3))]
    size = math.prod(shape)
    return Mesh(shape, ranks=random.choice((None, random.sample(range(size + 3), size))))


def random_layout(random: Random, mesh: Mesh, tokens: list[str]) -> Layout:
    return Layout.parse(" ".join(random.choice(tokens) for _ in mesh.shape))


@pytest.mark.parametrize("seed", range(40))
def test_sender_is_receiver_or_on_its_node_if_possible(seed: int) -> None:
    random = Random(seed)
    mesh, shape = random_mesh(random), (random.choice((0, 1, 5, 12)), 7)
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
    shape = random.choice((0, 1, 2, 4, 12, 31)), random.choice((1, 2, 6))
    tokens = ["R", "S0", "S0/2", "S0/3", "S1"]
    layouts = random_layout(random, mesh, tokens), random_layout(random, target_mesh, tokens)
    change = LayoutChange(mesh, "float32", *layouts, target_mesh=target_mesh)
    assert communicates(change, shape) == transfer_table(change, shape).has_foreign_rows()


def test_communicates_if_one_rank_lacks_anything() -> None:
    """Whichever rank it is: the others have the whole tensor already."""
    mesh = Mesh((11,))
    replicated = Layout.parse("R")
    for position in range(mesh.size):
        ranks = list(range(mesh.size))
        ranks[position] = 99
        change = LayoutChange(mesh, "float32", replicated, replicated, None, Mesh((11,), ranks=ranks))
        assert communicates(change, (4, 3))
    assert not communicates(LayoutChange(mesh, "float32", replicated, replicated, None, Mesh((11,))), (4, 3))


@pytest.mark.parametrize("seed", range(40))
def test_terms_come_from_the_node_of_the_receiver_if_possible(seed: int) -> None:
    random = Random(seed)
    mesh, shape = random_mesh(random), (random.choice((1, 5, 12)), 7)
    nodes: Nodes = random.choice((2, 3, RankNodes([random.randrange(4) for _ in range(mesh.size + 3)])))
    source, target = random_layout(random, mesh, ["R", "P", "S0"]), random_layout(random, mesh, ["R", "S0", "S1"])
    change = LayoutChange(mesh, "float32", source, target, nodes)
    assert change.closure is not None

    def node_of(position: int) -> int:
        return int(nodes_of(np.array([mesh.rank_at(position)]), nodes)[0])

    def term_of(position: int) -> tuple[int, ...]:
        return tuple(mesh.coordinate(position)[m] for m in change.reduced)

    held = [held_box(shape, source, mesh.shape, mesh.coordinate(p)) for p in range(mesh.size)]
    for row in transfer_table(change, shape).rows():
        assert [term_of(p) for p in row.senders] == sorted({term_of(p) for p in range(mesh.size)})
        for sender in row.senders:
            group = mesh.subgroup(row.receiver, change.closure)
            alike = [p for p in group if term_of(p) == term_of(sender) and held[p] == held[sender]]
            if row.receiver in alike:
                assert sender == row.receiver
            elif any(node_of(p) == node_of(row.receiver) for p in alike):
                assert node_of(sender) == node_of(row.receiver)


def test_holders_of_a_node_share_its_receivers() -> None:
    mesh = Mesh((4, 4))  # each shard has two holders on each of the two nodes, and six receivers there without it
    table = transfer_table(LayoutChange(mesh, "float32", Layout.parse("R S0"), Layout.parse("S1 R"), 8), (16, 8))
    sender = table.sender[:, 0]
    assert (sender // 8 == table.receiver // 8).all()
    assert np.bincount(sender[sender != table.receiver]).tolist() == [3] * 16


@pytest.mark.parametrize("source, target", [("S0", "S1"), ("S0/2", "S1"), ("R", "S0"), ("S1", "R")])
def test_rows_of_a_rank_are_those_of_all_ranks(source: str, target: str) -> None:
    mesh, shape = Mesh((1500,)), (1503, 1500)
    change = LayoutChange(mesh, "float32", Layout.parse(source), Layout.parse(target), 8)
    every = transfer_table(change, shape)
    for rank in (0, 700, 1499):
        rows = transfer_table(change, shape, rank)
        want = every.select((every.receiver == rank) | (every.sender == rank).any(axis=1))
        for f in fields(TransferTable):
            assert np.array_equal(getattr(rows, f.name), getattr(want, f.name)), f.name
