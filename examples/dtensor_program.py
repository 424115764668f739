"""A program that uses DTensor and knows nothing of shardweave: what does it redistribute, and what would it save?

    torchrun --standalone --nproc-per-node 4 examples/dtensor_program.py            # as it is
    torchrun --standalone --nproc-per-node 4 -m shardweave record -o trace.json examples/dtensor_program.py
    python -m shardweave replay trace.rank*.json

It trains one layer for two steps on a mesh of two data-parallel and two tensor-parallel ranks. Activations change their
layout between sequence and tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

BATCH, SEQUENCE, WIDTH, HIDDEN = 4, 256, 512, 1024
STEPS = 2
Sharded = Any  # a DTensor; torch annotates the results of its operators as Tensor


def attention(x: Sharded) -> Sharded:
    """x: [B, L, W], sharded by dp along B and by tp along L. Heads need whole sequences, so tp moves to W meanwhile."""
    heads = x.redistribute(placements=[Shard(0), Shard(2)])
    summed: Sharded = torch.cumsum(heads, dim=1)
    return summed.redistribute(placements=[Shard(0), Shard(1)])


def feed_forward(x: Sharded, up: Sharded, down: Sharded) -> Sharded:
    """tp shards the columns of `up` and the rows of `down`: every rank needs all of x, and the result is partial."""
    whole = x.redistribute(placements=[Shard(0), Replicate()])
    return (torch.relu(whole @ up) @ down).redistribute(placements=[Shard(0), Shard(1)])


def gathered(weight: Sharded) -> Sharded:
    """Gather a weight along dp, by which it is sharded while it is not used."""
    return weight.redistribute(placements=[Replicate(), weight.placements[1]])


def weight_of(mesh: DeviceMesh, *shape: int, dim: int) -> Sharded:
    return distribute_tensor(torch.randn(shape) / shape[0] ** 0.5, mesh, [Shard(0), Shard(dim)]).requires_grad_()


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    up, down = weight_of(mesh, WIDTH, HIDDEN, dim=1), weight_of(mesh, HIDDEN, WIDTH, dim=0)
    x = distribute_tensor(torch.randn(BATCH, SEQUENCE, WIDTH), mesh, [Shard(0), Shard(1)])
    optimizer = torch.optim.SGD([up, down], lr=1e-3)
    for step in range(STEPS):
        y = feed_forward(attention(x), gathered(up), gathered(down))
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor().item()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
