"""A shard to a partial sum, which torch carries out from 2.14 on: each rank has its shard, and zeros elsewhere."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from rank_processes import run_ranks
from test_redistribute import SHARD_TO_SUM, held_by, whole_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import shardweave

pytestmark = pytest.mark.multi

SHAPES = ((7, 5), (8, 6), (1, 3), (0, 4), (5, 2, 3))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def zeros_elsewhere(
    x: torch.Tensor, mesh: torch.distributed.DeviceMesh, source: list[Placement], target: list[Placement]
) -> torch.Tensor:
    """The oracle: the elements of the target shard that this rank's source shard has, and zeros."""
    mine = held_by(torch.arange(x.numel()).view(x.shape), source, mesh, {})
    kept = torch.zeros(x.numel(), dtype=torch.bool)
    kept[mine.reshape(-1)] = True
    masked = torch.where(kept.view(x.shape), x, torch.zeros((), dtype=x.dtype))
    return held_by(masked, [p if p.is_shard() else Replicate() for p in target], mesh, {})


def sums_of_shards(rank: int, transport: str) -> int:
    mesh = init_device_mesh("cpu", (2, 2))
    carried = 0
    for shape, dtype in product(SHAPES, DTYPES):
        x = whole_tensor(shape, dtype)
        for source in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(1)]):
            target: list[Placement] = [Partial() if p.is_shard() and p.dim == 0 else p for p in source]
            if target == source:
                target = [Partial() if p.is_shard() else p for p in source]
            d = DTensor.from_local(
                held_by(x, source, mesh, {}).clone(), mesh, source, run_check=False, shape=x.shape, stride=x.stride()
            )
            expected = zeros_elsewhere(x, mesh, source, target)
            y = shardweave.redistribute(d, target, transport=transport)
            assert y.to_local().equal(expected), (shape, dtype, source, target, y.to_local(), expected)
            if SHARD_TO_SUM:
                assert d.redistribute(placements=target).to_local().equal(expected)
                before = sum(shardweave.stats().delegations.values())
                with shardweave.installed():
                    assert d.redistribute(placements=target).to_local().equal(expected)
                assert sum(shardweave.stats().delegations.values()) == before
                carried += 1
    return carried


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_shard_to_sum_has_zeros_elsewhere(transport: str) -> None:
    counts = run_ranks(sums_of_shards, 4, transport)
    assert counts == [len(SHAPES) * len(DTYPES) * 4 if SHARD_TO_SUM else 0] * 4


def gradients(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for install in (False, True):
        leaf = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        if install:
            shardweave.install()
        y = leaf.redistribute(placements=[Partial(), Shard(1)])
        weight = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Replicate(), Replicate()])
        (y.redistribute(placements=[Replicate(), Replicate()]) * weight).sum().backward()
        if install:
            shardweave.uninstall()
        assert leaf.grad is not None and leaf.grad.placements == (Shard(0), Shard(1))
        results.append(leaf.grad.to_local())
    assert results[0].equal(results[1])


@pytest.mark.skipif(not SHARD_TO_SUM, reason="torch refuses a shard to a partial before 2.14")
def test_shard_to_sum_gradient_equals_torch() -> None:
    run_ranks(gradients, 4)
