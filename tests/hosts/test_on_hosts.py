"""Redistribution, FSDP2, token dispatch and checkpoints between hosts, against references; bytes at the links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from moe_reference import assert_near, dense, matrices_of, run_experts, tokens_of
from node_bytes import into_nodes, most_counted
from test_checkpoint import dtensor_of, is_right, plain
from test_checkpoint import poisoned as poisoned_dtensor
from test_fsdp import train_all_ways
from test_fuzz import many_on_ranks
from test_processes import poisoned, rounds_of, virtual_rounds
from test_redistribute_meshes import batches, cut, made, strided
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardweave
from shardweave.bench.baselines.stock_dtensor import Case
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.link_bytes import bytes_received, least_bytes
from shardweave.bench.harness.namespaces import SHARED
from shardweave.bench.workloads import Workload
from shardweave.checkpoint import LoadPlanner, SavePlanner
from shardweave.runtime.transports.select import current_transports

pytestmark = pytest.mark.multi

TWO, THREE = [[0, 1], [2, 3]], [[0], [1, 2], [3, 4]]
UNORDERED = [[0, 3], [4, 1], [2]]
SIDE = 512
# Sources and targets; bytes are counted for float32 [SIDE, SIDE].
COUNTED = [
    ("S0 S0", "R R"), ("S0 S1", "S1 S0"), ("P P", "R R"), ("P P", "S0 S0"), ("R S0", "S0 S0"), ("S0 R", "R S1"),
    ("P S0", "R S0"), ("S0 S0", "S1 R"),
]  # fmt: skip
SETTINGS = {"num_experts": 10, "top_k": 4, "hidden": 24, "max_tokens": 16, "dtype": torch.float32}


def poison() -> None:
    """Fill new memory, shared or not, with values that are no result."""
    torch.use_deterministic_algorithms(True)
    poisoned()


def between_hosts(rank: int, ranks: list[list[int]]) -> int:
    """From a mesh of each host's ranks to one of each other host's, and to the mesh of all."""
    size = dist.get_world_size()
    meshes = [DeviceMesh("cpu", sorted(of_host)) for of_host in ranks] + [init_device_mesh("cpu", (size,))]
    done = 0
    for a in meshes:
        for b in meshes:
            for shape in ((8, 6), (7, 5), (1, 3), (0, 4)):
                x = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) * 12
                for source, target in ((Shard(0), Shard(1)), (Partial(), Shard(0)), (Replicate(), Replicate())):
                    y = shardweave.redistribute(made(x, a, [source]), [target], device_mesh=b)
                    if b.get_coordinate() is not None:
                        expected = cut(x, b, [target]) * (a.size() if source.is_partial() else 1)
                        assert y.to_local().equal(expected), (rank, a, b, source, target)
                    done += 1
    return done


def dispatch_against_dense(rank: int, routing: str) -> None:
    """Forward and backward, with the weights of experts, against a dense mixture in float64."""
    size, experts, hidden = dist.get_world_size(), SETTINGS["num_experts"], SETTINGS["hidden"]
    dispatcher = shardweave.TokenDispatcher(init_device_mesh("cpu", (size,)), **SETTINGS)
    low, high = dispatcher.config.bounds[rank : rank + 2]
    matrices = matrices_of(experts, hidden, torch.float32)
    t = tokens_of(rank, (5 * rank + 7) % 17, SETTINGS["top_k"], experts, hidden, torch.float32, routing)
    x, weights, own = (v.clone().requires_grad_() for v in (t.x, t.weights, matrices[low:high]))
    routed = dispatcher.dispatch(x, t.ids, weights)
    y = dispatcher.combine(run_experts(routed, list(own), True), routed)
    y.backward(t.gradient)
    want = dense(t, matrices)
    of_all = want["matrices"].clone()
    dist.all_reduce(of_all)
    gradient = torch.zeros_like(own) if own.grad is None else own.grad
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": gradient}
    want["matrices"] = of_all[low:high]
    for name, got in found.items():
        assert_near(got, want[name], torch.float32, f"{name}, {routing}, rank {rank}")


def checkpoints(rank: int, mesh_shape: tuple[int, ...]) -> None:
    """What one mesh has saved is loaded on others, uneven and empty shards among them."""
    one, other = init_device_mesh("cpu", (dist.get_world_size(),)), init_device_mesh("cpu", mesh_shape)
    tensors = {str(shape): torch.arange(float(shape[0] * 3)).view(shape) + 1 for shape in ((16, 3), (7, 3), (1, 3))}
    turns = [(one, plain(Shard(0))), (other, plain(Replicate(), Shard(1))), (other, plain(Shard(0), Shard(0)))]
    for number, ((a, saved), (b, loaded)) in enumerate(zip(turns, turns[1:] + turns[:1], strict=True)):
        path = SHARED / f"checkpoint-{number}"
        state = {name: dtensor_of(x, a, saved) for name, x in tensors.items()}
        dcp.save(state, checkpoint_id=path, planner=SavePlanner())
        into = {name: poisoned_dtensor(x, b, loaded) for name, x in tensors.items()}
        dcp.load(into, checkpoint_id=path, planner=LoadPlanner())
        assert all(is_right(into[name], x, b, loaded) for name, x in tensors.items()), (rank, saved, loaded)


def everything(rank: int, ranks: list[list[int]], mesh_shape: tuple[int, ...], thorough: bool) -> dict[str, Any]:
    """Every kind of case; asserts that results are right."""
    poison()
    size = dist.get_world_size()
    found: dict[str, Any] = {"training": train_all_ways(rank, mesh_shape, False)}
    many_on_ranks(rank, size, None, 0, 80 if thorough else 15)  # strided shards among them
    between_hosts(rank, ranks)
    if size == 4:
        batches(rank, None)
    if size == 4 and thorough:
        with shardweave.installed():
            strided(rank, None)
    found["bits"] = rounds_of(rank, None)
    for routing in ("uniform", "holes", "hot rank", "none"):
        dispatch_against_dense(rank, routing)
    checkpoints(rank, mesh_shape if len(mesh_shape) > 1 else (1, size))
    found["transports"] = shardweave.stats().transports
    return found


def check_everything(
    start_hosts: Callable[..., Hosts], ranks: list[list[int]], mesh: tuple[int, ...], thorough: bool = False
) -> None:
    with start_hosts(ranks) as hosts:
        found = hosts.run(everything, ranks, mesh, thorough, timeout=300)
        size = hosts.size
    host_of = [next(h for h, own in enumerate(ranks) if rank in own) for rank in range(size)]
    assert [of_rank["bits"] for of_rank in found] == virtual_rounds(size, nodes=host_of)
    for of_rank in found:
        calls, from_expected, from_stock, from_exact = of_rank["training"]
        assert sum(calls.values()) and max(from_stock, from_exact) < 1e-5, of_rank["training"]
        # Expected are sums in order of rank; on a 1-D mesh the ranks of a host add first.
        assert from_expected == 0 or len(mesh) == 1, of_rank["training"]
        of_all = of_rank["transports"][tuple(range(size))]
        if size == len(ranks):
            assert of_all == "process_group: each rank is on another machine"
        else:
            assert of_all == f"hierarchical: {size} ranks are on {len(ranks)} machines"


def test_everything_on_two_hosts(start_hosts: Callable[..., Hosts]) -> None:
    check_everything(start_hosts, TWO, (2, 2))


def test_everything_on_uneven_hosts(start_hosts: Callable[..., Hosts]) -> None:
    check_everything(start_hosts, THREE, (5,))


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, mesh",
    [([[0], [1], [2], [3]], (2, 2)), ([[0, 3, 2], [1]], (2, 2)), (UNORDERED, (5,))],
    ids=str,
)  # fmt: skip
def test_everything_however_ranks_lie(
    ranks: list[list[int]], mesh: tuple[int, ...], start_hosts: Callable[..., Hosts]
) -> None:
    check_everything(start_hosts, ranks, mesh, thorough=True)


def link_bytes(rank: int, mesh_shape: tuple[int, ...], host_of: list[int]) -> dict[str, tuple[int, int, int]]:
    """Bytes into this rank's host for each case: counted, planned, least."""
    mesh, shape, found = init_device_mesh("cpu", mesh_shape), (SIDE, SIDE), {}
    for source, target in COUNTED:
        if len(mesh_shape) == 1:
            source, target = source.split()[0], target.split()[0]
        name = f"{source} → {target}"
        work = Workload(name, "", mesh_shape, ("a", "b")[: len(mesh_shape)], source, target, "float32", shape, shape)
        case = Case(work, mesh)
        outputs: list[DTensor] = []

        def call() -> None:
            outputs[:] = [shardweave.redistribute(case.source, case.placements)]  # noqa: B023

        counted = bytes_received(call)
        assert case.fault(outputs[0].to_local(), pairwise=False) is None, (rank, name)
        topology = current_transports().machines.find_topology(tuple(range(dist.get_world_size())), torch.device("cpu"))
        program = shardweave.plan(mesh, shape, "float32", source, target, topology=topology)
        planned = 4 * into_nodes(program, host_of)[host_of[rank]]
        least = least_bytes(mesh_shape, host_of, shape, source, target, 4)[host_of[rank]]
        found[name] = counted, planned, least
    return found


@pytest.mark.parametrize("ranks, mesh", [(TWO, (2, 2)), pytest.param(THREE, (5,), marks=pytest.mark.long)], ids=str)
def test_bytes_at_links_are_the_planned_ones(
    ranks: list[list[int]], mesh: tuple[int, ...], start_hosts: Callable[..., Hosts]
) -> None:
    host_of = [next(h for h, own in enumerate(ranks) if rank in own) for rank in range(sum(map(len, ranks)))]
    with start_hosts(ranks, gigabits=10.0) as hosts:
        before = hosts.bytes()
        found = hosts.run(link_bytes, mesh, host_of)
        after = hosts.bytes()
    for host, own in enumerate(ranks):
        for case, (counted, planned, least) in found[own[0]].items():
            # Barriers, whose bytes are subtracted, take some acknowledgements more or less each time.
            assert planned - 4096 <= counted <= most_counted(planned), (host, case, counted, planned)
            assert least <= planned, (host, case)
        # The switch has counted them too.
        assert after[host][0] - before[host][0] > sum(counted for counted, _, _ in found[own[0]].values())
