"""Programs on found topologies: nodes of any ranks. Values, and the bytes that enter a node, against brute force."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import product
from random import Random

import brute_force_oracle as oracle
import pytest
import torch
from node_bytes import into_nodes, least_into_busiest_node, through_busiest_node
from test_simulate import integers, poison  # noqa: F401

import shardweave
from shardweave.errors import ArgumentError
from shardweave.planner import (
    NVLINK_INFINIBAND,
    Exchange,
    Link,
    MachineFigures,
    Mesh,
    Program,
    Topology,
    found_topology,
    plan,
    redistribute_cost,
)

pytestmark = pytest.mark.plan

LONG_PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "10"))
SHAPE = 48, 36
Drawn = tuple[tuple[int, ...], list[int], str, str]


def without_latency(nodes: list[int]) -> Topology:
    """The found topology on which small tensors are planned as large ones are."""
    topology = found_topology(nodes, [MachineFigures("cpu")])
    assert topology is not None
    network = replace(topology.network, latency_us=0.0, message_us=0.0)
    return replace(topology, node=replace(topology.node, latency_us=0.0), network=network)


def numbered(nodes: list[int]) -> list[int]:
    """The nodes numbered by their first ranks."""
    number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    return [number[node] for node in nodes]


def drawn(seed: int, partial: str | None, uneven: bool) -> Drawn | None:
    """A random mesh of up to 3 dims, the node of each rank, and two layouts; None if all ranks share a node."""
    random = Random(f"{seed} {partial} {uneven}")
    mesh = tuple(random.choice([1, 2, 2, 3, 4]) for _ in range(random.randint(1, 3)))
    size = math.prod(mesh)
    if not 2 <= size <= 12:
        return None
    count = random.choice([k for k in range(2, size + 1) if uneven or size % k == 0])
    if uneven:
        nodes = [random.randrange(min(count, 4)) for _ in range(size)]
    else:
        nodes = [i * count // size for i in range(size)]
        if random.random() < 0.4:
            nodes = [i % count for i in range(size)]
    nodes = numbered(nodes)
    tokens = "R", "S0", "S1"
    source = [random.choice([*tokens, *([partial] * 2 if partial else [])]) for _ in mesh]
    target = [random.choice([*tokens, *([partial] if token == partial else [])]) for token in source]
    return (mesh, nodes, *(_ordered(random, x) for x in (source, target))) if len(set(nodes)) > 1 else None


def _ordered(random: Random, tokens: list[str]) -> str:
    orders = []
    for d in (0, 1):
        order = [m for m, token in enumerate(tokens) if token == f"S{d}"]
        shuffled = random.sample(order, len(order))
        if shuffled != order:
            orders.append(f"{d}:{','.join(map(str, shuffled))}")
    return " ".join(tokens) + (" @ " + " ".join(orders) if orders else "")


def check_least(mesh: tuple[int, ...], nodes: list[int], source: str, target: str, slack: float = 0.05) -> Program:
    """The bytes into the busiest node are within 5% of the tensor's of the least that there can be."""
    program = plan(mesh, SHAPE, "float32", source, target, topology=without_latency(nodes))
    least = least_into_busiest_node(mesh, SHAPE, source, target, nodes)
    entered = max(into_nodes(program, nodes))
    assert entered <= least + slack * math.prod(SHAPE), f"{nodes} {entered} {least}\n{program.explain()}"
    assert sum(program.bytes_over_network) == 4 * sum(into_nodes(program, nodes))
    return program


def test_cost_grows_with_ranks_per_nic() -> None:
    fast = replace(NVLINK_INFINIBAND, node_size=4, network=Link(0.0, 400.0, one_sided=True))
    costs = [redistribute_cost((2, 4), (1 << 12, 1 << 12), "float32", "S0 S0", "R R", replace(fast, nics_per_node=n))
             for n in (None, 4, 2, 1)]  # fmt: skip
    assert costs[0] == costs[1] < costs[2] < costs[3]


@pytest.mark.parametrize("partial", [None, "P"])
def test_random_even_nodes_receive_least(partial: str | None) -> None:
    """For sums the bound is not always met: it allows any relay, and replicas of a term on several nodes."""
    for seed in range(16):
        if case := drawn(seed, partial, uneven=False):
            check_least(*case, slack=0.3 if partial else 0.05)


def test_random_uneven_nodes_receive_least() -> None:
    for seed in range(16):
        if case := drawn(seed, None, uneven=True):
            check_least(*case)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1), (2, 2, 1), (3, 1), (1, 1, 2), (3, 3, 2)], ids=str)
def test_uneven_nodes_receive_least(sizes: tuple[int, ...]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    for source, target in product(("R", "S0", "S1", "P"), ("R", "S0", "S1")):
        if source != target:
            check_least((len(nodes),), nodes, source, target)


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1), (1, 4), (2, 3), (4, 2)], ids=str)
def test_sums_cross_in_both_directions_at_once(sizes: tuple[int, ...]) -> None:
    """Not to one of two nodes and back, which brings as much into each, and takes twice as long."""
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    program = check_least((len(nodes),), nodes, "P", "R")
    assert through_busiest_node(program, nodes) <= 1.02 * math.prod(SHAPE), program.explain()


# The nodes of ranks; the tensors that have to enter each.
@pytest.mark.parametrize(
    ("mesh", "nodes", "source", "target", "least"),
    [
        ((3,), [0, 1, 1], "S0//2", "R", [2 / 3, 1 / 3]),
        ((4,), [0, 0, 1, 1], "S0//3", "R", [0.5, 0.5]),
        ((4,), [0, 1, 0, 1], "S0//2", "R", [0.5, 0.5]),
        ((2, 3), [0, 1, 1, 2, 2, 2], "S0//2 R", "R R", [0.5, 0.5, 0.5]),
        ((2, 2), [0, 1, 1, 0], "S0//3 R", "R R", [0, 0]),
        ((2, 2), [0, 0, 0, 1], "S0//2 R", "R R", [0, 0.5]),
        ((2, 2), [0, 0, 0, 1], "P R", "S0//2 R", [0, 0.5]),
        ((2, 2), [0, 0, 0, 1], "P S0//2", "R R", [0.5, 1]),
    ],
)
def test_strided_shards_receive_least(
    mesh: tuple[int, ...], nodes: list[int], source: str, target: str, least: list[float]
) -> None:
    program = plan(mesh, SHAPE, "float32", source, target, topology=without_latency(nodes))
    assert into_nodes(program, nodes) == [round(math.prod(SHAPE) * share) for share in least], program.explain()
    assert Program.from_json(program.to_json()).explain() == program.explain()
    for dtype in ("float32", "float64"):
        check_values((mesh, nodes, source, target), dtype)


def check_strided_values(seeds: range) -> set[str]:
    """Random shards, some of them strided, on random nodes."""
    kinds: set[str] = set()
    for seed in seeds:
        case = drawn(seed, ("P", None)[seed % 2], uneven=seed % 3 > 0)
        if case is None:
            continue
        random = Random(seed)
        source, target = (
            " ".join(f"{token}//{random.choice([2, 3])}" if token[0] == "S" and random.random() < 0.5 else token
                     for token in text.split(" @ ")[0].split())
            for text in case[2:]
        )  # fmt: skip
        program = check_values((*case[:2], source, target), "float64", **HOW[seed % 3])
        kinds |= {layout.kind for step in program.steps if (layout := step.target) and hasattr(layout, "kind")}
        assert Program.from_json(program.to_json()).digest == program.digest
    return kinds


def test_values_of_strided_shards_on_random_nodes(poison: None) -> None:  # noqa: F811
    assert check_strided_values(range(30)) >= {"node sums", "node shares"}


def over_least(seeds: range) -> list[float]:
    """For random sums on uneven nodes: what the busiest node receives above the least, as a share of the tensor."""
    over = []
    for seed in seeds:
        case = drawn(seed, "P", uneven=True)
        if case is not None and "P" in case[2]:
            program = plan(case[0], SHAPE, "float32", *case[2:], topology=without_latency(case[1]))
            least = least_into_busiest_node(case[0], SHAPE, *case[2:], case[1])
            over.append((max(into_nodes(program, case[1])) - least) / math.prod(SHAPE))
    return over


def check_over_least(over: list[float]) -> None:
    """What `least_into_busiest_node` returns can be reached if any share of the elements may take each way. In programs
    the nodes that add terms add equal shares, and the cheapest program may be one by which a node receives more: of 446
    programs 89 in 100 are within 5% of the tensor of it."""
    assert sum(x <= 0.05 for x in over) >= 0.85 * len(over), over  # of some 50 cases


def test_random_sums_on_uneven_nodes_receive_least() -> None:
    check_over_least(over_least(range(40)))


def check_values(case: Drawn, dtype: str, **how: object) -> Program:
    mesh, nodes, source, target = case
    random = Random(str(case))
    shape = random.choice([(11, 6), (7, 9), (1, 5), (0, 3), (24, 12)])
    program = plan(mesh, shape, dtype, source, target, topology=without_latency(nodes))
    given = integers(oracle.contribution_shape(mesh, shape, source), str(case), low=0 if "max" in source else -8)
    locals_ = [x.to(getattr(torch, dtype)) for x in oracle.local_shards(mesh, shape, source, given)]
    outs = shardweave.simulate(program, locals_, **how)  # type: ignore[arg-type]
    got = oracle.assembled(mesh, target, [x.double() for x in outs])
    reduced = " ".join("R" if token.startswith("P") else token for token in target.split(" @ ")[0].split())
    text = reduced + target[len(target.split(" @ ")[0]) :]
    whole = oracle.whole_of(mesh, source, given)
    lead = whole.reshape((1,) * len(mesh) + whole.shape)
    wanted = oracle.local_shards(mesh, shape, text, lead)
    for rank, (a, b) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m: f"{case} {shape} rank {rank}\n{program.explain()}\n{m}")  # noqa: B023
    return program


@pytest.mark.parametrize(
    ("mesh", "nodes", "source", "target"),
    [
        ((2, 3), [0, 0, 1, 1, 2, 2], "P R", "S0 R"),
        ((2, 2), [0, 0, 0, 1], "P R", "S0 R"),
        ((2, 2, 3), [i // 4 for i in range(12)], "S1 P R", "R S0 R"),
        ((2, 3, 2), [0] * 10 + [1, 1], "R S1 P", "R S0 R"),
    ],
)
def test_sums_beside_replicas(mesh: tuple[int, ...], nodes: list[int], source: str, target: str) -> None:
    """Ranks receive from their group only, also where a rank of another group on their node holds the same."""
    program = check_values((mesh, nodes, source, target), "float64")
    for step in program.steps:
        if isinstance(step, Exchange):
            for row in step.boxes.rows():
                assert {sender for sender in row.senders if sender >= 0} <= {*program.members(step, row.receiver)}


def check_equal_replicas(seeds: range) -> set[str]:
    """Replicas of sums of random floats have the same bits, whichever nodes added the terms."""
    kinds: set[str] = set()
    for seed in seeds:
        case = drawn(seed, "P", uneven=True)
        if case is None or "P" not in case[2]:
            continue
        mesh, nodes, source, target = case
        program = plan(mesh, SHAPE, "float32", source, target, topology=without_latency(nodes))
        generator = torch.Generator().manual_seed(seed)
        given = torch.randn(oracle.contribution_shape(mesh, SHAPE, source), generator=generator)
        outs = shardweave.simulate(program, oracle.local_shards(mesh, SHAPE, source, given))
        replicated = [m for m, token in enumerate(target.split(" @ ")[0].split()) if token == "R"]
        first: dict[tuple[int, ...], torch.Tensor] = {}
        for place, out in zip(oracle.coordinates(mesh), outs, strict=True):
            shard = tuple(at for m, at in enumerate(place) if m not in replicated)
            assert torch.equal(first.setdefault(shard, out), out), f"{case} {place}\n{program.explain()}"
        kinds |= {str(layout).partition(" | ")[2] for step in program.steps for layout in [step.target]}
    return kinds


def test_equal_replicas_on_random_nodes() -> None:
    check_equal_replicas(range(40))


@pytest.mark.parametrize(
    ("nodes", "target", "least"),
    [([0, 1, 1, 0, 0, 0, 1, 2], "S0 S0 S0 @ 0:2,1,0", 0.5), ([0, 1, 1, 2, 3, 1, 1, 1], "R S0 S1", 1.0)],
)
def test_nodes_add_replicas_of_a_term_once(nodes: list[int], target: str, least: float) -> None:
    """A node adds the terms of all replicas that its ranks hold, but for those that another one adds."""
    case = (2, 2, 2), nodes, "R P P", target
    program = plan((2, 2, 2), SHAPE, "float32", "R P P", target, topology=without_latency(nodes))
    assert max(into_nodes(program, nodes)) <= least * math.prod(SHAPE), program.explain()
    check_values(case, "float64")
    assert Program.from_json(program.to_json()).explain() == program.explain()


HOW = [{}, {"one_sided": False, "backend": "gloo"}, {"one_sided": False, "backend": "gloo", "node_size": 2}]


def check_many_values(seeds: range) -> set[str]:
    kinds: set[str] = set()
    for seed in seeds:
        partial = ("P", "Pavg", "Pmax", None)[seed % 4]
        case = drawn(seed, partial, uneven=seed % 3 > 0)
        if case is None:
            continue
        program = check_values(case, ("float32", "float64")[seed % 2], **HOW[seed % 3])
        kinds |= {layout.kind for step in program.steps if (layout := step.target) and hasattr(layout, "kind")}
        assert Program.from_json(program.to_json()).digest == program.digest
        for rank in {0, program.mesh.size - 1}:
            one = plan(case[0], program.shape, program.dtype, *case[2:], topology=without_latency(case[1]), rank=rank)
            assert one.digest == program.digest and one.bytes_received == [program.bytes_received[rank]]
    return kinds


def test_values_on_random_nodes(poison: None) -> None:  # noqa: F811
    assert check_many_values(range(39)) == {"node sums", "node shares", "shares"}


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS * 3 // 10))
def test_many_random_nodes(part: int, poison: None) -> None:  # noqa: F811
    check_many_values(range(100 + 60 * part, 160 + 60 * part))
    check_strided_values(range(100 + 60 * part, 160 + 60 * part))
    check_equal_replicas(range(5000 + 100 * part, 5100 + 100 * part))
    check_over_least(over_least(range(1000 + 150 * part, 1150 + 150 * part)))
    for seed in range(100 + 40 * part, 140 + 40 * part):
        for partial, uneven in ((None, False), (None, True), ("P", False)):
            if case := drawn(seed, partial, uneven):
                check_least(*case, slack=0.3 if partial else 0.05)


def test_topology_without_a_rank_of_the_mesh() -> None:
    with pytest.raises(ArgumentError, match="topology: nodes has 3 ranks; allowed: more than rank 3 of the mesh"):
        plan((4,), SHAPE, "float32", "S0", "R", topology=without_latency([0, 1, 0]))


def test_same_nodes_as_node_size() -> None:
    """Nodes of equally many consecutive ranks are planned alike, however they are given."""
    assert without_latency([0, 0, 1, 1]).node_size == 2 and without_latency([0, 0, 1, 1]).nodes is None
    for nodes in ([0, 1, 0, 1], [0, 1, 1], [0, 0, 1, 0]):
        assert without_latency(nodes).nodes == tuple(nodes)
    given = replace(without_latency([0, 0, 1, 1]), node_size=None, nodes=(7, 7, 3, 3))
    assert Topology.from_json(given.to_json()) == given
    for source, target in (("S0 S0", "R R"), ("P P", "S1 R")):
        programs = [plan(Mesh((2, 2)), SHAPE, "float32", source, target, topology=t)
                    for t in (given, without_latency([0, 0, 1, 1]))]  # fmt: skip
        assert programs[0].bytes_over_network == programs[1].bytes_over_network
        assert programs[0].digest != programs[1].digest
