"""Parameters whose placements, as FSDP2 gives them, do not describe their data: refused by `adapt_fsdp`; others not."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardweave
from shardweave.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.multi
NAMES = ("dp", "tp")


def values(rows: int) -> torch.Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4)


def part(x: torch.Tensor, number: int, index: int, pieces: int = 1) -> torch.Tensor:
    """One of `number` chunks of each of several pieces of the rows."""
    empty = [x[:0]] * number
    return torch.cat([[*piece.chunk(number), *empty][index] for piece in x.chunk(pieces)])


class Layer(nn.Module):
    """With a weight of which each rank of a mesh dim holds a chunk of every piece, as of the fused q, k and v."""

    def __init__(self, rows: int, mesh: DeviceMesh, pieces: int, device: str = "cpu") -> None:
        super().__init__()
        whole = values(rows)
        mine = part(whole, mesh.size(), mesh.get_local_rank(), pieces).to(device)
        placement = _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)
        shape = {"shape": whole.shape, "stride": whole.stride()}
        self.w = nn.Parameter(DTensor.from_local(mine, mesh, [placement], run_check=False, **shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w.to_local() * x).sum()


def refusal(model: nn.Module, name: str = "w") -> str:
    """The error of `adapt_fsdp` about the parameter of a name; empty if it accepts the model."""
    try:
        shardweave.fsdp.adapt_fsdp(model)
    except UnsupportedError as error:
        text = str(error)
        assert text.startswith(f"module: parameter {name!r}: it was (") and "; allowed: " in text
        return text
    return ""


def follows_its_label(parameter: DTensor, whole: torch.Tensor) -> bool:
    """Whether all ranks get the whole parameter if their shards are gathered by its placements."""
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, parameter.to_local().detach())
    mesh = parameter.device_mesh
    shards = [shards[r] for r in mesh.mesh.flatten().tolist()]
    program = shardweave.plan(mesh, parameter.shape, torch.float32, parameter.placements, [Replicate()] * mesh.ndim)
    try:
        return all(result.equal(whole) for result in shardweave.simulate(program, shards))
    except ArgumentError:  # shards of other shapes
        return False


def by_brute_force(rank: int, shape: tuple[int, int]) -> list[str]:
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=NAMES), []
    for rows, pieces in product((1, 5, 10, 16, 24), (1, 2, 3)):
        layer = Layer(rows, mesh["tp"], pieces)
        fully_shard(layer, mesh=mesh["dp"])
        text = refusal(layer)
        assert bool(text) != follows_its_label(layer.w, values(rows)), (rows, pieces, layer.w.placements)
        found.append(text)
    return found


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_refused_where_data_do_not_follow_their_placements(shape: tuple[int, int]) -> None:
    first, *others = run_ranks(by_brute_force, 4, shape)
    assert all(texts == first for texts in others)
    assert sum(map(bool, first)) == (8 if shape == (2, 2) else 0)  # strided ones of more than one row


def refused_ones(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    hybrid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", *NAMES))

    def nested() -> nn.Module:
        model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=Layer(16, mesh["tp"], 2)))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh["dp"])
        return model

    def frozen() -> nn.Module:
        layer = Layer(16, mesh["tp"], 2).requires_grad_(False)
        return fully_shard(layer, mesh=mesh["dp"])

    def without_memory() -> nn.Module:
        return fully_shard(Layer(16, mesh["tp"], 2, device="meta"), mesh=mesh["dp"])

    def replicated() -> nn.Module:
        return fully_shard(Layer(16, hybrid["tp"], 2), mesh=hybrid["replicate", "dp"])

    def two_dims_in_another_order() -> nn.Module:
        grid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ep", "tp"))
        layer = Layer(16, grid["tp"], 2)
        local = layer.w.to_local().detach()
        placements = [Replicate(), _StridedShard(0, split_factor=2)]
        layer.w = nn.Parameter(DTensor.from_local(local, grid["ep", "tp"], placements, run_check=False))
        return fully_shard(layer, mesh=grid["dp"])

    for make in (nested, frozen, without_memory, replicated, two_dims_in_another_order):
        assert refusal(make(), "second.w" if make is nested else "w"), make
    if hasattr(torch_fsdp, "DataParallelMeshDims"):  # parameters on the whole mesh
        layer = Layer(16, mesh["tp"], 2)
        placements = [Replicate(), _StridedShard(0, split_factor=2)]
        layer.w = nn.Parameter(DTensor.from_local(layer.w.to_local().detach(), mesh, placements, run_check=False))
        assert refusal(fully_shard(layer, mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(shard="dp")))
    # Nothing of a refused model is adapted.
    model = nested()
    assert refusal(model, "second.w")
    before = shardweave.stats().calls.total()
    model.first(torch.ones(2, 4)).sum().backward()
    assert shardweave.stats().calls.total() == before


def test_refused_parameters_are_named() -> None:
    run_ranks(refused_ones, 4)
