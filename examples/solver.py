"""A sharding solver: compute the cost of every layout, choose the cheapest, and redistribute local tensors to it.

    torchrun --standalone --nproc-per-node 4 examples/solver.py

An op accepts its input in several layouts, and a parameter is in a shard order that placements do not express.
`redistribute_cost` computes the cost of each layout without making a plan, and `ordered_redistribute_local_tensor`
moves this rank's shard into the chosen one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardweave
from shardweave.integrations.autoparallel import ordered_redistribute_local_tensor

SHAPE = (24, 20)
NODES = replace(shardweave.NVLINK_INFINIBAND, name="nodes of 2", node_size=2)
CURRENT = "S0 S0 @ 0:1,0"  # rows cut by tp first, then by dp: the order of FSDP2 on tensor-parallel parameters
ACCEPTED = {
    "S0 S0": (Shard(0), Shard(0)),
    "R S0": (Replicate(), Shard(0)),
    "S1 S0": (Shard(1), Shard(0)),
    "S0 R": (Shard(0), Replicate()),
}


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    costs = {text: shardweave.redistribute_cost(mesh, SHAPE, torch.float32, CURRENT, text, NODES) for text in ACCEPTED}
    chosen = min(costs, key=lambda text: costs[text])
    if rank == 0:
        for text, cost in costs.items():
            print(f"{CURRENT} → {text:<5} {cost:5.1f} µs{' (chosen)' if text == chosen else ''}")

    whole = torch.arange(480.0).reshape(SHAPE)
    dp, tp = rank // 2, rank % 2
    mine = whole.chunk(2)[tp].chunk(2)[dp].clone().requires_grad_()

    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    source, target = (DTensorSpec(mesh, placements, meta) for placements in (ACCEPTED["S0 S0"], ACCEPTED[chosen]))
    # In the source, mesh dim 1 cuts first. The target has the order of its spec, the default one.
    moved = ordered_redistribute_local_tensor(mine, source, target, source_order=(1, 0), topology=NODES)

    expected = whole
    for at, placement in zip((dp, tp), ACCEPTED[chosen], strict=True):
        if isinstance(placement, Shard):
            expected = expected.chunk(2, placement.dim)[at]
    torch.testing.assert_close(moved, expected)
    moved.sum().backward()
    torch.testing.assert_close(mine.grad, torch.ones_like(mine))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
