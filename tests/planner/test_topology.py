"""Links and topologies: costs, validation, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from shardweave.errors import ArgumentError
from shardweave.planner import (
    NVLINK_INFINIBAND,
    NVLINK_NODE,
    Link,
    MachineFigures,
    Mesh,
    Topology,
    found_topology,
    plan,
    redistribute_cost,
)

pytestmark = pytest.mark.plan


def test_link_us() -> None:
    link = Link(latency_us=20, gigabytes_per_s=50, one_sided=False, message_us=2)
    assert link.us(0, 0) == 0
    assert link.us(100_000, 3) == 20 + 3 * 2 + 2
    assert replace(link, one_sided=True, message_us=0).us(100_000, 3) == 22
    assert replace(link, one_sided=True, message_us=0.5).us(100_000, 3) == 23.5


def test_call_us_added_once_per_call() -> None:
    """The plans between nodes have several steps, which are one call."""
    slow = replace(NVLINK_INFINIBAND, node_size=2, call_us=1000.0)
    free = replace(slow, call_us=0.0)
    for request in (("P S0", "S0 S0"), ("S0 S0", "R S0"), ("P P", "R R"), ("R R", "S0 S1")):
        request_on_mesh = (4, 2), (1 << 14, 64), "float32", *request
        program, without = plan(*request_on_mesh, topology=slow), plan(*request_on_mesh, topology=free)
        assert [step.target for step in program.steps] == [step.target for step in without.steps]
        assert program.cost_us == pytest.approx((without.cost_us or 0) + 1000)
        assert redistribute_cost(*request_on_mesh, slow) == pytest.approx(program.cost_us)
        assert [other.us for other in program.others] == pytest.approx([other.us + 1000 for other in without.others])
    assert plan((4, 2), (8, 8), "float32", "R R", "R R", topology=slow).cost_us == 0
    other = Mesh((2, 4), ranks=range(8, 16))
    between = [plan((4, 2), (64, 64), "float32", "S0 R", "S1 R", target_mesh=other, topology=x) for x in (slow, free)]
    assert [x.us for x in between[0].others] == pytest.approx([x.us + 1000 for x in between[1].others])


@pytest.mark.parametrize("topology", [NVLINK_NODE, NVLINK_INFINIBAND], ids=lambda t: t.name)
def test_topology_json_round_trip(topology: Topology) -> None:
    assert Topology.from_json(topology.to_json()) == topology
    older = {name: value for name, value in topology.to_dict().items() if name != "call_us"}
    assert Topology.from_dict(older) == topology


def test_node_of() -> None:
    assert [NVLINK_INFINIBAND.node_of(rank) for rank in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert NVLINK_NODE.node_of(10**6) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"node_size": 0}, "node_size 0; allowed: a whole number from 1 to 2**62, or None for one node"),
        ({"memory_gigabytes_per_s": 0}, "memory_gigabytes_per_s 0; allowed: a number from 1e-09 to 1e+30"),
        ({"call_us": float("nan")}, "topology: call_us nan; allowed: a number from 0 to 1e+12"),
        ({"network": {"latency_us": 1, "gigabytes_per_s": 1e-308, "one_sided": True}}, "gigabytes_per_s 1e-308; allo"),
        ({"network": {"latency_us": True, "gigabytes_per_s": 1, "one_sided": True}}, "link: latency_us True; allowed"),
        (
            {"speed": 1},
            "topology: unknown key 'speed'; allowed: name, node_size, node, network, memory_gigabytes_per_s",
        ),
        (
            {"network": {"speed": 1, "lanes": 2}},
            "topology: network: unknown keys 'speed', 'lanes'; allowed: latency_us",
        ),
        (
            {"node": {"latency_us": -1, "gigabytes_per_s": 1, "one_sided": True}},
            "latency_us -1; allowed: a number from 0 to 1e+12",
        ),
        ({"node": {"latency_us": 1, "one_sided": True}}, "topology: node: gigabytes_per_s missing"),
        ({"network": {"latency_us": 1, "gigabytes_per_s": "fast", "one_sided": True}}, "gigabytes_per_s 'fast'"),
        ({"network": 5}, "topology: network: 5; allowed"),
        ({"name": 5}, "topology: name 5; allowed: text"),
        ({"call_us": 10**400}, "call_us about 2**1328; allowed: a number from 0 to 1e+12"),
        ({"node": {"latency_us": 1, "gigabytes_per_s": 1, "one_sided": "no"}}, "one_sided 'no'; allowed: True, False"),
    ],
)
def test_topology_invalid_fields(change: dict, text: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Topology.from_json(json.dumps({**NVLINK_INFINIBAND.to_dict(), **change}))
    assert text in str(raised.value)


def test_topology_from_invalid_json() -> None:
    for text in ("{", "[" * 100_000, '{"name": ' + "9" * 5000 + "}"):
        with pytest.raises(ArgumentError, match="not valid JSON"):
            Topology.from_json(text)


@pytest.mark.parametrize("figure", [1e-9, 1e30])
def test_cost_finite_at_extreme_bandwidths(figure: float) -> None:
    link = Link(latency_us=1e12, gigabytes_per_s=figure, one_sided=False, message_us=1e12)
    slow = Topology("slow", 2, link, link, figure, 1e12)
    for source, target in (("S0", "R"), ("P", "R"), ("R", "S0")):
        program = plan((4,), (1 << 29, 1 << 29), "complex128", source, target, topology=slow)
        assert program.cost_us is not None and 0 < program.cost_us < float("inf")


@pytest.mark.parametrize("seed", range(50))
def test_found_nodes(seed: int) -> None:
    """Ranks share a node as they were said to, whether a node size or the node of each rank says so, and whichever
    ranks take part."""
    random = Random(seed)
    size = random.randint(2, 40)
    consecutive, on_node = random.random() < 0.6, random.randint(1, 5)
    nodes = [r // on_node if consecutive else random.randrange(4) for r in range(size)]
    if random.random() < 0.6:
        nodes = [node if random.random() < 0.7 else -1 for node in nodes]
    machines = [MachineFigures("cpu")]
    topology = found_topology(nodes, machines)
    assert found_topology(np.array(nodes, dtype=random.choice([np.int32, np.int64])), machines) == topology
    taking_part = [r for r in range(size) if nodes[r] >= 0]
    if len({nodes[r] for r in taking_part}) < 2:
        assert topology is None
        return
    assert topology is not None
    found = {r: topology.node_of(r) for r in taking_part}
    for a in taking_part:
        assert [found[a] == found[b] for b in taking_part] == [nodes[a] == nodes[b] for b in taking_part]
    if consecutive and len(taking_part) == size:
        assert topology.node_size == on_node
