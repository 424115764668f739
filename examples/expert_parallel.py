"""Experts over all ranks beside tensor parallelism: `parallelize_module` with `ExpertParallel`.

    torchrun --standalone --nproc-per-node 4 examples/expert_parallel.py

On a mesh of 2 dp × 2 tp ranks the projection is sharded over tp, so both ranks of a tp pair hold the same tokens. The
experts are sharded over all four ranks: each rank dispatches half of a pair's tokens (`replicated_over`), and both get
all results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardweave

EXPERTS, TOP_K, HIDDEN, TOKENS = 7, 2, 16, 10


class Experts(nn.Module):
    """One matrix per expert along dim 0, as `ExpertParallel` requires: 7 on 4 ranks are 2, 2, 2 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        matrices = self.matrices.to_local() if isinstance(self.matrices, DTensor) else self.matrices
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
        done = [group @ matrix for group, matrix in zip(groups, matrices, strict=True)]
        return torch.cat([*done, torch.zeros_like(rest)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, ids, weights)


def alone(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the block, computed in one process."""
    x = x + block.down(block.up(x).relu())
    weights, ids = block.router(x).softmax(-1).topk(TOP_K)
    chosen = torch.einsum("th,tkhg->tkg", x, block.experts.matrices[ids])
    return x + (chosen * weights[..., None]).sum(1)


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    block = Block()
    whole = Block()
    whole.load_state_dict(block.state_dict())
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    style = shardweave.moe.ExpertParallel(
        top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, dtype=torch.float32, replicated_over=mesh["tp"]
    )
    parallelize_module(block, everyone, {"experts": style})

    replica = mesh.get_local_rank("dp")
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(replica))
    with shardweave.installed():
        y = block(x)
        y.square().sum().backward()
    wanted = [alone(whole, torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(r))) for r in range(2)]
    torch.cat(wanted).square().sum().backward()
    torch.testing.assert_close(y, wanted[replica])

    # Gradients of experts are over the tokens of all ranks and need no all-reduce.
    gradient, theirs = block.experts.matrices.grad, whole.experts.matrices.grad
    assert isinstance(gradient, DTensor) and theirs is not None
    torch.testing.assert_close(gradient.full_tensor(), theirs)
    if dist.get_rank() == 0:
        print(f"{EXPERTS} experts, gradients {gradient.placements} of {tuple(gradient.shape)}: as in one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
