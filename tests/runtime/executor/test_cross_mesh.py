"""Redistributions between two meshes that share all, some or no ranks, with real values."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from node_bytes import into_nodes
from test_node_topologies import without_latency
from test_simulate import integers, oracle, poison  # noqa: F401
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError
from shardweave.planner import NVLINK_INFINIBAND, Layout, Mesh, Program, Topology
from shardweave.planner.cost.byte_bound import bytes_bound

pytestmark = pytest.mark.plan

SLOW = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
NODES = {
    "bytes": None,
    "nodes of 2": replace(NVLINK_INFINIBAND, node_size=2),
    "slow nodes of 4": replace(NVLINK_INFINIBAND, node_size=4, network=SLOW),
    "uneven nodes": without_latency([0, 1, 1, 2, 2, 2, 3, 0, *[1] * 12, *[4] * 12]),
    "ranks in turn": without_latency([rank % 3 for rank in range(32)]),
}
MESHES = {
    "disjoint": (Mesh((2, 2)), Mesh((4,), ranks=(4, 5, 6, 7))),
    "some in common": (Mesh((2, 3)), Mesh((2, 2), ranks=(4, 5, 6, 7))),
    "one within the other": (Mesh((2, 2, 2)), Mesh((2,), ranks=(3, 6))),
    "the same, of another shape": (Mesh((4, 2)), Mesh((2, 4))),
    "the same, in another order": (Mesh((2, 2), ranks=(0, 1, 2, 3)), Mesh((2, 2), ranks=(3, 1, 0, 2))),
    "far apart": (Mesh((3,), ranks=(1, 9, 20)), Mesh((2, 1, 2), ranks=(9, 0, 31, 20))),
}
SHAPES = [(12, 8), (7, 5), (1, 3), (0, 4), (16,), ()]


def held_by_rank(mesh: Mesh, locals_: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    return dict(zip(mesh.rank_array.tolist(), locals_, strict=True))


def prove(
    source_mesh: Mesh, target_mesh: Mesh, shape: tuple[int, ...], source: str, target: str,
    topology: Topology | None = None, one_sided: bool = True, dtype: torch.dtype = torch.float32,
) -> Program:  # fmt: skip
    """Run a pair and compare every element with the sliced whole, and the bytes with what each rank lacks."""
    program = shardweave.plan(source_mesh, shape, dtype, source, target, target_mesh=target_mesh, topology=topology)
    contributed = integers(oracle.contribution_shape(source_mesh.shape, shape, source), source + target)
    given = held_by_rank(source_mesh, oracle.local_shards(source_mesh.shape, shape, source, contributed))
    all_ranks = program.mesh.rank_array.tolist()
    assert sorted(all_ranks) == sorted({*source_mesh.rank_array.tolist(), *target_mesh.rank_array.tolist()})
    nothing = torch.empty((0,) * max(len(shape), 1), dtype=dtype)
    outs = shardweave.simulate(
        program, [given[rank].to(dtype) if rank in given else nothing for rank in all_ranks], one_sided=one_sided
    )
    by_rank = dict(zip(all_ranks, outs, strict=True))
    whole = oracle.whole_of(source_mesh.shape, source, contributed).reshape(*(1 for _ in target_mesh.shape), *shape)
    wanted = oracle.local_shards(target_mesh.shape, shape, target, whole)
    mine = [by_rank[rank].to(contributed.dtype) for rank in target_mesh.rank_array.tolist()]
    for got, want in zip(oracle.assembled(target_mesh.shape, target, mine), wanted, strict=True):
        assert got.equal(want), program.explain()
    outside = set(all_ranks) - set(target_mesh.rank_array.tolist())
    assert all(by_rank[rank].numel() == 0 for rank in outside)
    return program


def bound(source_mesh: Mesh, target_mesh: Mesh, shape: tuple[int, ...], source: str, target: str) -> dict[int, int]:
    held = held_by_rank(source_mesh, list(oracle.held_indices(source_mesh.shape, shape, source)))
    wanted = held_by_rank(target_mesh, list(oracle.held_indices(target_mesh.shape, shape, target)))
    return {
        rank: len(set(x.reshape(-1).tolist()) - set(held[rank].reshape(-1).tolist() if rank in held else ()))
        for rank, x in wanted.items()
    }


def texts(mesh: Mesh, shape: tuple[int, ...], partial: bool, seed: str) -> list[str]:
    tokens = ["R", *(f"S{d}" for d in range(len(shape))), *(["S0/3"] if shape else []), *(["P"] if partial else [])]
    results = list(oracle.layout_texts(mesh.ndim, tokens))
    return Random(seed).sample(results, min(7, len(results)))


# Every two meshes with every second shape.
@crossed(
    "meshes, shape", list(MESHES), SHAPES, ids=str,
    gate=lambda meshes, shape: (list(MESHES).index(meshes) + SHAPES.index(shape)) % 2 == 0,
)  # fmt: skip
def test_cross_mesh_without_partial_meets_bound(meshes: str, shape: tuple[int, ...]) -> None:
    a, b = MESHES[meshes]
    for source in texts(a, shape, False, meshes):
        for target in texts(b, shape, False, meshes + "to"):
            program = prove(a, b, shape, source, target)
            least = bound(a, b, shape, source, target)
            all_ranks = program.mesh.rank_array.tolist()
            assert program.bytes_received == program.bytes_bound == [4 * least.get(rank, 0) for rank in all_ranks]
            assert program.exchanges == (1 if any(least.values()) else 0), program.explain()


WITH_PARTIAL: list[tuple[int, ...]] = [(7, 5), (16,), ()]


# Every two of meshes, shape and nodes with each other, if not all three.
@crossed(
    "meshes, shape, nodes", list(MESHES), WITH_PARTIAL, list(NODES), ids=str,
    gate=lambda meshes, shape, nodes: (
        (list(MESHES).index(meshes) + WITH_PARTIAL.index(shape) + list(NODES).index(nodes)) % 3 == 0
    ),
)  # fmt: skip
def test_cross_mesh_partial_and_nodes(meshes: str, shape: tuple[int, ...], nodes: str) -> None:
    (a, b), topology = MESHES[meshes], NODES[nodes]
    for one_sided, source in enumerate(texts(a, shape, True, meshes)):
        for target in texts(b, shape, True, meshes + "to")[:4]:
            program = prove(a, b, shape, source, target, topology, bool(one_sided % 2))
            again = Program.from_json(program.to_json())
            assert again.explain() == program.explain() and again.to_dict() == program.to_dict()
            assert again.digest == program.digest


@pytest.mark.parametrize("meshes", list(MESHES))
def test_rank_program_is_part_of_whole_program(meshes: str) -> None:
    a, b = MESHES[meshes]
    for source in texts(a, (7, 5), True, meshes)[:2]:
        for target in texts(b, (7, 5), True, meshes + "to")[:2]:
            for topology in NODES.values():
                request = {"target_mesh": b, "topology": topology}
                whole = shardweave.plan(a, (7, 5), "float32", source, target, **request)
                for rank in whole.ranks:
                    alone = shardweave.plan(a, (7, 5), "float32", source, target, rank=rank, **request)
                    assert alone.digest == whole.digest
                    assert alone.bytes_received == [whole.bytes_received[rank]]
                    assert alone.peak_bytes == [whole.peak_bytes[rank]]
                    assert alone.participants(rank) == whole.participants(rank)
                    for mine, step in zip(alone.steps, whole.steps, strict=True):
                        assert type(mine) is type(step)
                        assert alone.members(mine, rank) == whole.members(step, rank)
                        rows = (step.boxes.receiver == rank) | (step.boxes.sender == rank).any(axis=1)
                        assert (mine.boxes.sender == step.boxes.sender[rows]).all()
                        assert (mine.boxes.receiver == step.boxes.receiver[rows]).all()


def test_cross_mesh_bytes_enter_node_once() -> None:
    trainer, generator = Mesh((2, 8)), Mesh((2, 8), ranks=range(16, 32))
    program = shardweave.plan(
        trainer, (4096, 4096), "bfloat16", "S0 S0", "R R", target_mesh=generator, topology=NVLINK_INFINIBAND
    )
    entering = sum(program.bytes_over_network[16:24]), sum(program.bytes_over_network[24:])
    assert entering == (4096 * 4096 * 2,) * 2, program.explain()
    direct = shardweave.plan(trainer, (4096, 4096), "bfloat16", "S0 S0", "R R", target_mesh=generator)
    assert direct.exchanges == 1 and direct.bytes_received == direct.bytes_bound
    capped = {"target_mesh": generator, "topology": NVLINK_INFINIBAND}
    with pytest.raises(
        ArgumentError, match=r"max_bytes: 1000; allowed: at least \d+, needed by the smallest plan found, \(S0 S0\) → "
    ):
        shardweave.plan(trainer, (4096, 4096), "bfloat16", "S0 S0", "R R", max_bytes=1000, **capped)


def mesh_of(ranks: list) -> Mesh:
    table = torch.tensor(ranks)
    return Mesh(tuple(table.shape), ranks=table.flatten().tolist())


# The nodes of ranks 0, 1, …; the tensors that have to enter each node.
@pytest.mark.parametrize(
    ("nodes", "from_ranks", "source", "to_ranks", "target", "least"),
    [
        ([0, 0, 1, 1, 2, 2], [0, 1, 2, 3], "P", [4, 5], "R", [0.5, 0.5, 1]),
        ([0, 0, 1, 1, 2, 2], [0, 1, 2, 3], "P", [4, 5], "S0", [0.5, 0.5, 1]),
        ([0, 0, 1, 1, 2, 2], [0, 1, 2, 3], "P", [4], "R", [0.5, 0.5, 1]),
        ([0, 0, 1, 1, 2, 2], [0, 1, 2, 3], "P", [0, 1, 2, 3, 4, 5], "R", [1, 1, 1]),
        ([0, 1, 0, 1], [0, 1, 2, 3], "P", [[0, 1], [2, 3]], "R R", [1, 1]),
        ([0, 0, 0, 1], [[0, 1], [2, 3]], "P P", [0, 1, 2, 3], "R", [1, 1]),
        ([0, 1, 1], [0], "R", [0, 1, 2], "R", [0, 1]),
        ([0, 1, 1, 2, 2, 2], [0], "R", [1, 2, 3, 4, 5], "R", [0, 1, 1]),
        ([0, 1, 2, 3, 2, 2], [0, 1], "S0", [2, 3, 4, 5], "R", [0, 0, 1, 1]),
        ([0, 0, 1, 1], [0, 1, 2, 3], "S0", [1, 2, 3], "R", [0.5, 0.5]),
        ([0, 0, 1, 1], [0, 1], "S0", [0, 2, 3], "R", [0, 1]),
        ([0, 1, 0, 1], [0, 1], "S0", [0, 1, 2, 3], "R", [0.5, 0.5]),
        ([0, 0, 1, 1, 2, 2], [[0, 1], [4, 5]], "S0 R", [0, 1, 2, 3, 4], "R", [0.5, 1, 0.5]),
    ],
)
def test_bytes_that_enter_nodes(
    nodes: list[int], from_ranks: list, source: str, to_ranks: list, target: str, least: list[float]
) -> None:
    """Of sums on the ranks of a node one term leaves it, and what several of its ranks want enters it once. No rank
    receives what it has."""
    a, b = mesh_of(from_ranks), mesh_of(to_ranks)
    program = prove(a, b, (48, 36), source, target, without_latency(nodes))
    of_position = [nodes[rank] for rank in program.mesh.rank_array.tolist()]
    assert into_nodes(program, of_position) == [48 * 36 * share for share in least], program.explain()
    for step in program.steps:
        at = [(program.coordinate_in(step.source_mesh, p), program.coordinate_in(step.target_mesh, p))
              for p in program.ranks]  # fmt: skip
        lacking = bytes_bound((48, 36), "float32", step.source_mesh, step.source, step.target_mesh, step.target, at)
        assert lacking in (None, [4 * step.boxes.elements_received(p) for p in program.ranks])


@pytest.mark.parametrize("seed", range(40))
def test_random_meshes_on_nodes_receive_least(seed: int) -> None:
    random = Random(seed)
    size = random.randint(3, 10)
    nodes = [0, 1, *(random.randrange(random.choice([2, 3])) for _ in range(size - 2))]
    meshes = []
    for _ in range(2):
        shape = random.choice([(n,) for n in range(1, size + 1)] + [(2, n) for n in range(1, size // 2 + 1)])
        meshes.append(Mesh(shape, ranks=random.sample(range(size), math.prod(shape))))
    a, b = meshes
    source, target = (" ".join(random.choice(["R", "S0", "S1"]) for _ in mesh.shape) for mesh in meshes)
    shape = 60, 48
    program = shardweave.plan(a, shape, "float32", source, target, target_mesh=b, topology=without_latency(nodes))
    held, wanted = (
        dict(zip(mesh.rank_array.tolist(), oracle.held_mask(mesh.shape, shape, text), strict=True))
        for mesh, text in ((a, source), (b, target))
    )
    nothing = np.zeros((1, math.prod(shape)), dtype=bool)
    entering = []
    for node in range(3):
        of_node = [rank for rank in range(size) if nodes[rank] == node]
        has, wants = (
            np.concatenate([nothing, *(masks[rank][None] for rank in of_node if rank in masks)]).any(axis=0)
            for masks in (held, wanted)
        )
        entering.append(int((wants & ~has).sum()))
    of_position = [nodes[rank] for rank in program.mesh.rank_array.tolist()]
    assert max(into_nodes(program, of_position)) <= max(entering) + 0.05 * math.prod(shape), program.explain()


def test_meshes_with_different_names_are_equal() -> None:
    program = shardweave.plan(Mesh((2, 2), ("a", "b")), (8, 6), "float32", "S0 S1", "S1 S0", target_mesh=Mesh((2, 2)))
    assert not program.is_cross_mesh and program.exchanges == 1


@pytest.mark.parametrize(
    ("source", "target", "error", "text"),
    [
        ("S0 R", "S0 R", ArgumentError, "target: S0 R has 2 placements, the mesh"),
        ("S0", "S0", ArgumentError, "source: S0 has 1 placements, the mesh"),
        ("S0 R", "S2", ArgumentError, "target: mesh dim 0 shards tensor dim 2, out of range"),
        ("S0 R", "Pprod", UnsupportedError, "target: mesh dim 0 becomes a partial product"),
    ],
)
def test_layouts_that_do_not_fit_mesh_raise(source: str, target: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shardweave.plan((2, 2), (8, 6), "float32", source, target, target_mesh=Mesh((2,), ranks=(4, 5)))
    with pytest.raises(ArgumentError, match=r"rank: position 6 is outside the mesh \(6,\)"):
        shardweave.plan((2, 2), (8, 6), "float32", "S0 R", "S0", target_mesh=Mesh((2,), ranks=(4, 5)), rank=6)


def test_rank_program_size_grows_with_peers() -> None:
    trainer = Mesh((256, 64))
    generator = Mesh((512, 8), ranks=range(16384, 16384 + 4096))
    for position in (77, 16384 + 99):
        program = shardweave.plan(
            trainer, (65536, 8192), "bfloat16", "S0 S1", "R S0", target_mesh=generator, rank=position
        )
        assert sum(len(step.boxes) for step in program.steps) <= 16384
        assert program.bytes_received == program.bytes_bound
    assert math.prod(program.target_shape(16384 + 99)) == 65536 * 8192 // 8


def test_layout_text_uses_own_mesh() -> None:
    program = shardweave.plan((2, 2), (8,), "float32", "S0/2 S0", "S0/2", target_mesh=Mesh((2,), ranks=(0, 3)))
    assert program.source == Layout.parse("S0 S0 @ 0:1,0") and str(program.target) == "S0/2"
