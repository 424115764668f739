"""Programs planned for a topology: prices against boxes, cost against other searches, and `max_bytes`."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import brute_force_oracle as oracle
import networkx as nx
import numpy as np
import pytest

from shardweave.errors import ArgumentError
from shardweave.planner import (
    FILL,
    NVLINK_INFINIBAND,
    NVLINK_NODE,
    Layout,
    Link,
    Mesh,
    Program,
    Topology,
    plan,
    redistribute_cost,
)
from shardweave.planner.cost.step_cost import step_price
from shardweave.planner.exchange.build_steps import build_step
from shardweave.planner.exchange.layout_change import LayoutChange
from shardweave.planner.search import Search

pytestmark = pytest.mark.plan

SLOW = Link(latency_us=50, gigabytes_per_s=1, one_sided=False, message_us=10)
TOPOLOGIES = [
    NVLINK_NODE,
    replace(NVLINK_INFINIBAND, node_size=2),
    replace(NVLINK_INFINIBAND, node_size=4),
    replace(NVLINK_INFINIBAND, name="slow network", node_size=4, network=SLOW),
]
SHARED_CORES = replace(TOPOLOGIES[-1], name="shared cores", node=Link(5.0, 2.0, one_sided=True, message_us=20.0))
CASES = [
    oracle.Case((2, 2, 2), (9, 16), ("R", "P", "S0", "S1"), 200),
    oracle.Case((2, 4), (7, 5), ("R", "P", "S0", "S1"), 200),
    oracle.Case((3, 2), (13, 4), ("R", "P", "S0", "S1"), 150),
    oracle.Case((2, 2, 2), (24, 9), ("R", "P", "S0", "S0/3", "S1//2"), 120),
    oracle.Case((8,), (30,), ("R", "P", "S0")),
]


def by_link(program: Program, topology: Topology) -> np.ndarray:
    """[6, ranks] (in near, in far, out near, out far) in bytes, then (peers near, peers far), counted box by box."""
    step = program.steps[0]
    counts = np.zeros((6, program.mesh.size))
    peers: set[tuple[int, int]] = set()
    for receiver, senders, elements in zip(step.boxes.receiver, step.boxes.sender, step.boxes.elements, strict=True):
        for sender in senders:
            if sender not in (FILL, receiver) and elements:
                far = int(topology.node_of(int(sender)) != topology.node_of(int(receiver)))
                counts[far, receiver] += elements * 4
                counts[2 + far, sender] += elements * 4
                peers.add((int(receiver), int(sender)))
    for receiver, sender in peers:
        counts[4 + int(topology.node_of(sender) != topology.node_of(receiver)), receiver] += 1
    return counts


@pytest.mark.parametrize("topology", [*TOPOLOGIES, SHARED_CORES], ids=lambda t: f"{t.name}, {t.node_size}")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_price_matches_boxes(case: oracle.Case, topology: Topology) -> None:
    # Infinite memory bandwidth, as boxes do not include copies.
    topology = replace(topology, memory_gigabytes_per_s=1e30)
    mesh, checked = Mesh(case.mesh_shape), 0
    for source, target in case.pairs():
        a, b = Layout.parse(source), Layout.parse(target)
        if a == b or (a.has_partial and "R" in target):
            continue
        change = LayoutChange(mesh, "float32", a, b, topology.node_size)
        program = Program(mesh, case.shape, "float32", a, b, (build_step(change, case.shape, None),), None, topology)
        in_near, in_far, out_near, out_far, near, far = by_link(program, topology)
        priced = step_price(change, case.shape, topology).us
        received = np.maximum(topology.node.us(in_near, near), topology.network.us(in_far, far)).max()
        both = np.maximum(
            topology.node.us(np.maximum(in_near, out_near), near), topology.network.us(np.maximum(in_far, out_far), far)
        ).max()
        if change.replicas:
            # The price charges equal holders equal shares; in the boxes one of them sends.
            assert priced <= both * (1 + 1e-9) + (topology.network.message_us + topology.node.message_us) * mesh.size
            assert priced >= topology.network.us(in_far, 0).max() * (1 - 1e-9)
        else:
            assert priced == pytest.approx(both, rel=1e-9), program.explain()
            assert priced >= received * (1 - 1e-9)
        checked += 1
    assert checked > 20 or case.mesh_shape == (8,)


@pytest.mark.parametrize("case", [oracle.Case((2, 2), (8, 6), ("R", "S0", "S1")), *CASES[:3]], ids=str)
def test_plan_on_one_node_is_direct_exchange(case: oracle.Case) -> None:
    for source, target in case.pairs(partial=False):
        program = plan(case.mesh_shape, case.shape, "float32", source, target, topology=NVLINK_NODE)
        assert program.bytes_received == program.bytes_bound and len(program.steps) <= 1, program.explain()
        assert program.bytes_over_network == [0] * program.mesh.size


@pytest.mark.parametrize("topology", TOPOLOGIES[1:], ids=lambda t: f"{t.name}, {t.node_size}")
@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((2, 2), (64, 64)), ((2, 4), (640, 128)), ((2, 2, 2), (512, 512)), ((4, 2), (9, 33))]
)
def test_search_near_shortest_path_over_all_layouts(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], topology: Topology
) -> None:
    """Compare with the shortest path over all layouts without partial, with an edge between every pair."""
    layouts = [Layout.parse(text) for text in oracle.layout_texts(len(mesh_shape), ("R", "S0", "S1"))]
    pricing = Search(Mesh(mesh_shape), shape, "bfloat16", layouts[0], layouts[-1], topology)
    graph = nx.DiGraph()
    for a, b in product(layouts, layouts):
        if a != b:
            graph.add_edge(a, b, us=pricing.price(a, b).us)
    pairs = Random(7).sample([(a, b) for a, b in product(layouts, layouts) if a != b], 60)
    for a, b in pairs:
        path = Search(Mesh(mesh_shape), shape, "bfloat16", a, b, topology).cheapest()
        best = nx.shortest_path_length(graph, a, b, weight="us")
        assert best <= path.us + 1e-6 <= 1.25 * best + 1e-5, (str(a), str(b), str(path))
        assert pricing.price(a, b).lower_bound_us <= best + 1e-6, (str(a), str(b))
        assert path.us == pytest.approx(sum(pricing.price(x, y).us for x, y in pairwise(path.layouts)))


def test_plan_all_gather_enters_each_node_once() -> None:
    program = plan((4, 8), (8192, 8192), "bfloat16", "S0 S0", "R R", topology=NVLINK_INFINIBAND)
    whole = 8192 * 8192 * 2
    by_node = np.array(program.bytes_over_network).reshape(4, 8).sum(axis=1)
    assert by_node.tolist() == [whole * 3 // 4] * 4, program.explain()
    direct = plan((4, 8), (8192, 8192), "bfloat16", "S0 S0", "R R")
    assert len(direct.steps) == 1
    # Every rank of a node receives an equal share.
    assert set(program.bytes_over_network) == {whole * 3 // 32}
    assert program.cost_us is not None
    assert program.others[-1].layouts == (Layout.parse("S0 S0"), Layout.parse("R R"))
    assert program.others[-1].us > 3 * program.cost_us


def test_plan_all_reduce_scatters_inside_nodes_first() -> None:
    program = plan((4, 8), (8192, 8192), "bfloat16", "P P", "R R", topology=NVLINK_INFINIBAND)
    # After the reduce-scatter inside a node a rank has 1/8, of which it exchanges 3/4 with other nodes twice.
    assert max(program.bytes_over_network) == 8192 * 8192 * 2 // 8 * 3 // 4 * 2, program.explain()


def test_plan_prefers_senders_on_own_node() -> None:
    topology = replace(NVLINK_INFINIBAND, node_size=4)
    program = plan((2, 4), (64, 64), "float32", "R S0", "R S1", topology=topology)
    assert program.bytes_over_network == [0] * 8 and program.bytes_received == program.bytes_bound
    elsewhere = plan(
        Mesh((2, 4), ranks=(0, 4, 1, 5, 2, 6, 3, 7)), (64, 64), "float32", "R S0", "R S1", topology=topology
    )
    # Its nodes are no product of mesh dims: what one needs of another enters it once, and its ranks share it.
    assert 0 < sum(elsewhere.bytes_over_network) < sum(elsewhere.bytes_received)


def test_plan_all_gather_along_one_mesh_dim_over_nodes() -> None:
    program = plan((32,), (65536, 4096), "bfloat16", "S0", "R", topology=NVLINK_INFINIBAND)
    whole = 65536 * 4096 * 2
    assert sum(program.bytes_over_network) == 4 * whole * 3 // 4, program.explain()
    uneven = plan((32,), (65537, 4096), "bfloat16", "S0", "R", topology=NVLINK_INFINIBAND)
    assert uneven.mesh.shape == (32,) and sum(uneven.bytes_over_network) == 4 * (whole + 4096 * 2) * 3 // 4
    request = ((32,), (65536, 4096), "bfloat16", "S0", "R", NVLINK_INFINIBAND)
    assert redistribute_cost(*request) == pytest.approx(program.cost_us, abs=0.01)


@pytest.mark.parametrize(("source", "target"), [("P P", "R R"), ("S0 S0", "R R"), ("P S0", "S0 S0")])
def test_plan_max_bytes_caps_peak(source: str, target: str) -> None:
    request = ((4, 8), (1024, 512), "float32", source, target)
    free = plan(*request, topology=NVLINK_INFINIBAND)
    peaks = [max(free.peak_bytes), *(path.peak_bytes for path in free.others)]
    for cap in (max(peaks), min(peaks)):
        capped = plan(*request, topology=NVLINK_INFINIBAND, max_bytes=cap)
        assert max(capped.peak_bytes) <= cap, capped.explain()
    least = math.prod((1024, 512)) * 4 // 8
    with pytest.raises(ArgumentError, match=rf"max_bytes: {least}; allowed: at least \d+, needed by the smallest"):
        plan(*request, topology=NVLINK_INFINIBAND, max_bytes=least)


# Each case on one topology.
@pytest.mark.parametrize(("case", "topology"), list(zip(CASES[:3], TOPOLOGIES[1:], strict=True)), ids=str)
def test_plan_max_bytes_exact_from_boxes(case: oracle.Case, topology: Topology) -> None:
    planned = refused = 0
    for source, target in case.pairs()[::20]:
        request = (case.mesh_shape, case.shape, "int16", source, target)
        free = max(plan(*request, topology=topology).peak_bytes)
        for cap in (free - 1, free * 9 // 10):
            try:
                program = plan(*request, topology=topology, max_bytes=cap)
            except ArgumentError:
                refused += 1
            else:
                assert max(program.peak_bytes) <= cap, program.explain()
                planned += 1
    assert refused and (planned or case.mesh_shape == (3, 2))


def test_plan_max_bytes_without_topology() -> None:
    """No time is stated, since no links were given; paths over the limit are."""
    program = plan((2, 2), (64, 64), "float32", "S0 S1", "R R", max_bytes=10**6)
    assert len(program.steps) == 1 and program.digest == plan((2, 2), (64, 64), "float32", "S0 S1", "R R").digest
    capped = plan((4, 8), (1024, 512), "float32", "R P", "R S0", max_bytes=3 << 20)
    assert capped.explain().endswith("peak 2.5 MiB\n    not (R P) → (R S0): over max_bytes")
    between = plan(
        (2, 2), (64, 64), "float32", "P S0", "S0", target_mesh=Mesh((4,), ranks=range(8, 12)), max_bytes=10**6
    )
    for unpriced in (program, capped, between):
        assert unpriced.topology is None and unpriced.cost_us is None and "µs" not in unpriced.explain()
        assert Program.from_json(unpriced.to_json()).explain() == unpriced.explain()
    with pytest.raises(ArgumentError, match=r"max_bytes: 100; allowed: at least \d+, needed by the smallest"):
        plan((2, 2), (64, 64), "float32", "S0 S1", "R R", max_bytes=100)
    for wrong in ("much", -1):
        with pytest.raises(ArgumentError, match=f"max_bytes: .*{wrong}.*; allowed"):
            plan((2, 2), (64, 64), "float32", "S0 S1", "R R", max_bytes=wrong)


def test_redistribute_cost_equals_program_cost() -> None:
    request = ((4, 8), (4096, 512), "bfloat16", "P S0", "R R")
    for topology in TOPOLOGIES:
        program = plan(*request, topology=topology)
        assert redistribute_cost(*request, topology) == pytest.approx(program.cost_us, abs=0.01)
    assert redistribute_cost((2, 2), (8, 8), "float32", "R S0", "R S0") == 0
    assert redistribute_cost([2, 2], [8, 8], "float32", "R S0", "R S0") == 0
    assert plan((2, 2), (8, 8), "float32", "R S0", "R S0").cost_us is None
