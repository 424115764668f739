"""FSDP2 on shardweave: call `adapt_fsdp` after `fully_shard`; nothing else changes.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py

Two copies of a model are trained alike: one on torch's all-gathers and reduce-scatters, one on shardweave's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardweave

WIDTH, LAYERS, STEPS = 63, 3, 3  # odd: shards are uneven


def model_of(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, rank: int) -> list[float]:
    """Train for a few steps and return the losses of this rank's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    stock, ours = model_of(mesh), model_of(mesh)
    shardweave.fsdp.adapt_fsdp(ours)
    losses = train(stock, rank), train(ours, rank)
    for name, parameter in ours.named_parameters():
        theirs = stock.get_parameter(name)
        assert isinstance(parameter, DTensor) and isinstance(theirs, DTensor)
        # gloo adds terms in another order.
        torch.testing.assert_close(parameter.to_local(), theirs.to_local(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    if rank == 0:
        print("losses, torch     ", *(f"{loss:.5f}" for loss in losses[0]))
        print("losses, shardweave", *(f"{loss:.5f}" for loss in losses[1]))
        print("carried out", dict(shardweave.stats().calls))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
