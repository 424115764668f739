"""ProcessGroupTransport on GPUs with NCCL, one GPU per rank, and on CPUs with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import OWN_GPUS, run_ranks
from test_redistribute import held_by
from test_symmetric import MESHES, OPS, made, random_requests
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardweave


def on_each(function: Any, size: int, *args: Any) -> None:
    run_ranks(function, size, "cpu", *args)


def on_gpus(function: Any, size: int, *args: Any) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs; {size} are needed")
    run_ranks(function, size, "cuda", *args, environment=OWN_GPUS, timeout=300)


MEANS = [
    pytest.param(on_each, marks=pytest.mark.multi, id="gloo"),
    pytest.param(on_gpus, marks=pytest.mark.multigpu, id="nccl"),
]


def pairs(rank: int, device: str, size: int, number: int, reduction: str) -> None:
    """Random requests with exact sums, synchronous and asynchronous."""
    mesh = init_device_mesh(device, MESHES[size])
    kept = []
    for later in (False, True):
        for shape, source, source_order, target, target_order, dtype in random_requests(size, MESHES[size], number):
            dims = [m for m, p in enumerate(source) if p.is_partial()]
            coordinate, mine, count = mesh.get_coordinate(), 0, 1
            for m in dims:
                mine, count = mine * mesh.size(m) + coordinate[m], count * mesh.size(m)
            terms = [torch.arange(int(torch.Size(shape).numel())).view(shape).to(dtype) + 2 * i for i in range(count)]
            x = made(terms[mine], mesh, source, source_order, device)
            y = shardweave.redistribute(
                x,
                target,
                shard_order=target_order or None,
                transport="process_group",
                async_op=later,
                reduction=reduction,
            )  # type: ignore[arg-type]
            op = source[dims[0]].reduce_op if dims else "sum"
            kept.append(
                (
                    y,
                    held_by(OPS[op](torch.stack(terms).double()).to(dtype), target, mesh, target_order),
                    (source, target),
                )
            )
    for y, want, what in reversed(kept):
        assert y.to_local().cpu().equal(want), (what, y.to_local(), want)
    assert not shardweave.stats().delegations


@pytest.mark.parametrize("run", MEANS)
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@pytest.mark.parametrize("size", [2, 4])
def test_random_requests_sync_and_async(run: Any, size: int, reduction: str) -> None:
    run(pairs, size, size, 30, reduction)


def parts_of_everyone(rank: int, device: str) -> None:
    """Two of four ranks exchange first; then the other two; then all; then a batch of all ranks."""
    meshes = [DeviceMesh(device, ranks) for ranks in ([0, 1], [2, 3], [0, 1, 2, 3], [1, 3])]
    whole = torch.arange(35.0).view(5, 7)
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            x = made(whole, mesh, [Shard(0)], {}, device)
            for target in ([Shard(1)], [Replicate()]):
                y = shardweave.redistribute(x, target, transport="process_group")
                assert y.to_local().cpu().equal(held_by(whole, target, mesh, {}))
    xs = [made(whole + i, meshes[2], [Shard(i % 2)], {}, device) for i in range(5)]
    for y, i in zip(
        shardweave.redistribute_batch(xs, [[Replicate()]] * 5, transport="process_group"), range(5), strict=True
    ):
        assert y.to_local().cpu().equal(whole + i)


@pytest.mark.parametrize("run", MEANS)
def test_subset_of_ranks_exchanges(run: Any) -> None:
    run(parts_of_everyone, 4)


def captured(rank: int, device: str) -> None:
    """The first call after `prepare` and `prepare_redistribute`, on a GPU in a graph."""
    mesh = init_device_mesh(device, (2,))
    whole = torch.arange(63.0).view(7, 9)
    x = made(whole, mesh, [Shard(0)], {}, device)
    p = DTensor.from_local(torch.ones(7, 9, device=device), mesh, [Partial()], run_check=False)
    shardweave.prepare(mesh, 1 << 16, transport="process_group")
    for given, target in ((x, [Shard(1)]), (p, [Shard(0)])):
        shardweave.prepare_redistribute(given, target, transport="process_group")

    def calls() -> list[torch.Tensor]:
        turned = shardweave.redistribute(x, [Shard(1)], transport="process_group").to_local()
        return [turned, shardweave.redistribute(p, [Shard(0)], transport="process_group").to_local()]

    if device == "cpu":
        outs = calls()
    else:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = calls()
        x.to_local().copy_(held_by(whole + 5, [Shard(0)], mesh, {}))
        graph.replay()
        whole = whole + 5
    assert outs[0].cpu().equal(held_by(whole, [Shard(1)], mesh, {}))
    assert outs[1].cpu().equal(2 * torch.ones_like(outs[1].cpu()))


@pytest.mark.parametrize("run", MEANS)
def test_first_call_after_prepare_can_be_captured(run: Any) -> None:
    run(captured, 2)
