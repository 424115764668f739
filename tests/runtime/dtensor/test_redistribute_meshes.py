"""Redistribution between meshes, strided shards, topologies and batches, on real ranks and both transports."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from variants import crossed

import shardweave
from shardweave.errors import ArgumentError, TransportError

pytestmark = pytest.mark.multi
TRANSPORTS = ["shared_memory", "process_group"]
SLOW = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
NODES = replace(shardweave.NVLINK_INFINIBAND, node_size=2, network=SLOW)


def cut(x: torch.Tensor, mesh: DeviceMesh, placements) -> torch.Tensor:
    """This rank's shard, by torch.chunk from left to right; empty outside the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return x.new_empty(0)
    for mesh_dim, p in enumerate(placements):
        if not isinstance(p, Shard | _StridedShard):
            continue
        taken = []
        for piece in x.chunk(getattr(p, "split_factor", 1), p.dim):
            chunks = piece.chunk(mesh.size(mesh_dim), p.dim)
            index = coordinate[mesh_dim]
            taken.append(chunks[index] if index < len(chunks) else piece.narrow(p.dim, 0, 0))
        x = torch.cat(taken, p.dim)
    return x.contiguous()


def made(x: torch.Tensor, mesh: DeviceMesh, placements) -> DTensor:
    local = cut(x, mesh, placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def meshes_of_all_kinds() -> dict[str, DeviceMesh]:
    """Collective, since meshes make process groups."""
    return {
        "2x2": init_device_mesh("cpu", (2, 2)),
        "4": init_device_mesh("cpu", (4,)),
        "1,3": DeviceMesh("cpu", [1, 3]),
        "0,2": DeviceMesh("cpu", [0, 2]),
        "0,1,3": DeviceMesh("cpu", [0, 1, 3]),
    }


def to_other_meshes(rank: int, transport: str, times: int = 1) -> int:
    meshes, random, done = meshes_of_all_kinds(), Random(5), 0
    for (_, a), (_, b) in product(meshes.items(), repeat=2):
        for shape in ((8, 6), (7, 5)):
            x = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) * 12
            options = [Replicate(), Shard(0), Shard(1), Partial()]
            for _ in range(times):
                source = [random.choice(options) for _ in range(a.ndim)]
                target = [random.choice(options[:3]) for _ in range(b.ndim)]
                for topology in (None, NODES):
                    given = made(x, a, source)
                    y = shardweave.redistribute(given, target, device_mesh=b, transport=transport, topology=topology)
                    expected = cut(x, b, target)
                    if a.get_coordinate() is not None or b.get_coordinate() is not None:
                        terms = [a.size(m) for m, p in enumerate(source) if p.is_partial()]
                        expected = expected * torch.tensor(terms).prod() if terms else expected
                        assert y.to_local().numel() == expected.numel()
                        assert y.to_local().reshape(expected.shape).equal(expected), (rank, source, target)
                    assert y.device_mesh is b and tuple(y.shape) == shape
                    done += 1
    return done


@crossed("times, transport", [1, 5], TRANSPORTS, gate=lambda *of: of == (1, "shared_memory"))
def test_redistribute_to_other_meshes(transport: str, times: int) -> None:
    assert min(run_ranks(to_other_meshes, 4, transport, times)) == 100 * times


def there_and_back(rank: int) -> None:
    a, b = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    x = torch.arange(48.0).reshape(8, 6)
    given = made(x, a, [Shard(0), Shard(1)]).requires_grad_()
    y = shardweave.redistribute(given, [Shard(1)], device_mesh=b)
    (y * y).sum().backward()
    assert given.grad.placements == given.placements and given.grad.device_mesh == a
    assert given.grad.to_local().equal(2 * cut(x, a, [Shard(0), Shard(1)]))
    for wrong in (b, "cpu"):
        with pytest.raises(ArgumentError, match="placements: 2 given for a mesh of 1 dims|device_mesh: 'cpu'; allowed"):
            shardweave.redistribute(given, [Shard(1), Shard(0)], device_mesh=wrong)


def test_gradients_return_to_the_source_mesh() -> None:
    run_ranks(there_and_back, 4)


def strided(rank: int, transport: str) -> int:
    mesh, random, done = init_device_mesh("cpu", (2, 2)), Random(1), 0
    options = [
        Replicate(),
        Shard(0),
        Shard(1),
        _StridedShard(0, split_factor=3),
        _StridedShard(1, split_factor=5),
        _StridedShard(0, split_factor=2),
    ]
    pairs = list(product(product(options, repeat=2), repeat=2))
    for shape in ((24, 12), (11, 7)):
        x = torch.arange(shape[0] * shape[1], dtype=torch.int64).reshape(shape)
        for source, target in random.sample(pairs, 60):
            meta = made(x, mesh, [Replicate(), Replicate()])._spec.tensor_meta
            # The strided shards of a view: an index set of its own, cut from left to right.
            before, after = (
                DTensorSpec(mesh, p, tensor_meta=meta, use_strided_shard_as_shard_order=False) for p in (source, target)
            )
            local = cut(x, mesh, source)
            with shardweave.installed():
                out = torch.distributed.tensor._redistribute.redistribute_local_tensor(local, before, after)
            assert out.equal(cut(x, mesh, target)), (rank, source, target)
            done += 1
    assert not shardweave.stats().delegations
    return done


@crossed("transport", TRANSPORTS, gate=lambda transport: transport == "shared_memory")
def test_strided_shards_of_views(transport: str) -> None:
    assert run_ranks(strided, 4, transport, environment={"SHARDWEAVE_TRANSPORT": transport}) == [120] * 4


def on_nodes(rank: int, transport: str, every: int = 2) -> int:
    mesh, done = init_device_mesh("cpu", (2, 2)), 0
    x = torch.arange(96, dtype=torch.float32).reshape(12, 8)
    placements = (Replicate(), Shard(0), Shard(1), Partial())
    # Every second pair has all targets, of which there are nine, and with each source half of them.
    for source, target in list(product(product(placements, repeat=2), product(placements[:3], repeat=2)))[::every]:
        given = made(x, mesh, source)
        expected = cut(x, mesh, target) * 2 ** sum(p.is_partial() for p in source)
        assert shardweave.redistribute(given, target, transport=transport, topology=NODES).to_local().equal(expected)
        with shardweave.installed(topology=NODES):
            assert given.redistribute(placements=target).to_local().equal(expected)
        done += 1
    return done


@crossed("every, transport", [2, 1], TRANSPORTS, gate=lambda *of: of == (2, "process_group"))
def test_topology_argument_on_real_ranks(transport: str, every: int) -> None:
    assert run_ranks(on_nodes, 4, transport, every) == [144 // every] * 4


def batches(rank: int, transport: str) -> int:
    meshes, random = meshes_of_all_kinds(), Random(3)
    main, done = meshes["2x2"], 0
    for topology in (None, NODES):
        for target_name in ("2x2", "4", "1,3"):
            b = meshes[target_name]
            given, targets, expected = [], [], []
            for shape in ((8, 6), (7, 5), (13,), (0, 3), (4, 3, 2)) * 3:
                dtype = random.choice([torch.float32, torch.int64, torch.bfloat16, torch.uint8])
                x = (torch.arange(torch.Size(shape).numel()) % 17).reshape(shape).to(dtype)
                shards = [Shard(d) for d in range(len(shape))]
                source = [random.choice([Replicate(), Partial(), *shards]) for _ in range(2)]
                target = [random.choice([Replicate(), *shards]) for _ in range(b.ndim)]
                given.append(made(x, main, source))
                targets.append(target)
                expected.append(cut(x, b, target) * 2 ** sum(p.is_partial() for p in source))
            for _ in range(3):
                outs = shardweave.redistribute_batch(
                    given, targets, device_mesh=None if b is main else b, transport=transport, topology=topology
                )
                for y, want, target in zip(outs, expected, targets, strict=True):
                    assert y.to_local().numel() == want.numel()
                    assert y.to_local().reshape(want.shape).equal(want), (rank, target)
                    assert list(y.placements) == list(target) and y.device_mesh == b
                    done += 1
    assert shardweave.redistribute_batch([], []) == []
    with pytest.raises(ArgumentError, match="placements: 0 given for 1 DTensors"):
        shardweave.redistribute_batch(given[:1], [])
    with pytest.raises(ArgumentError, match=r"dtensors\[0\]: it requires gradients; allowed: under torch.no_grad"):
        shardweave.redistribute_batch([given[0].detach().float().requires_grad_()], targets[:1])
    return done


@crossed("transport", TRANSPORTS, gate=lambda transport: transport == "process_group")
def test_batches_on_real_ranks(transport: str) -> None:
    assert run_ranks(batches, 4, transport) == [270] * 4


def outputs_live_alone(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    xs = [distribute_tensor(torch.full((8, 4), float(i)), mesh, [Shard(0)], src_data_rank=None) for i in range(5)]
    outs = shardweave.redistribute_batch(xs, [[Replicate()]] * 5)
    kept = outs[3].to_local()
    addresses = {y.to_local().untyped_storage().data_ptr() for y in outs}
    assert len(addresses) == 5
    del outs
    for i in range(20):
        shardweave.redistribute_batch(xs, [[Replicate()]] * 5)
        assert kept.eq(3).all(), i
    dist.barrier()


def test_batch_outputs_share_no_memory() -> None:
    run_ranks(outputs_live_alone, 4)


def one_disagrees(rank: int, transport: str) -> str:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    number = 2 if rank == 1 else 3
    try:
        shardweave.redistribute_batch([x] * number, [[Replicate()]] * number, transport=transport)
    except TransportError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_batches_raise_disagreement(transport: str) -> None:
    found = run_ranks(one_disagrees, 4, transport)
    assert "nothing" not in found and "DisagreementError" in found
