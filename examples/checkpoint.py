"""A checkpoint saved from one mesh and shard order and loaded into others: `SavePlanner`, `LoadPlanner`.

    torchrun --standalone --nproc-per-node 4 examples/checkpoint.py

torch's own planners assume the default shard order, so a DTensor in another order is saved permuted. The files have
torch's format, so a program without shardweave can load them.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.checkpoint import LoadPlanner, SavePlanner

SHAPE = (11, 6)  # 11 rows on 4 ranks: 3, 3, 3 and 2


def filled_with_minus_one(x: DTensor) -> DTensor:
    """A DTensor of the same layout, to load into."""
    return DTensor.from_local(
        torch.full_like(x.to_local(), -1), x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
    )


def main() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    whole = torch.arange(66.0).reshape(SHAPE)
    x = distribute_tensor(whole, grid, [Shard(0), Shard(0)])
    reordered = shardweave.redistribute(x, shard_order={0: (1, 0)})

    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    dcp.save({"weight": reordered}, checkpoint_id=folder[0], planner=SavePlanner())

    columns = filled_with_minus_one(distribute_tensor(whole, line, [Shard(1)]))
    rows = filled_with_minus_one(distribute_tensor(whole, grid, [Shard(0), Replicate()]))
    for name, target, planner in (
        ("columns of 4 ranks", columns, LoadPlanner()),
        ("rows of 2, by torch's own planner", rows, dcp.DefaultLoadPlanner()),
    ):
        dcp.load({"weight": target}, checkpoint_id=folder[0], planner=planner)
        torch.testing.assert_close(target.full_tensor(), whole)
        if dist.get_rank() == 0:
            print(f"{reordered.placements}, tp first: read as {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
