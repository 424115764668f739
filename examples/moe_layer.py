"""A mixture-of-experts layer with expert parallelism by `TokenDispatcher`.

    torchrun --standalone --nproc-per-node 4 examples/moe_layer.py

Each rank has 3 of 12 experts and a different number of tokens. The result and the gradients are compared with the same
layer with all experts on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import shardweave

EXPERTS, TOP_K, HIDDEN, WIDTH, MOST_TOKENS = 12, 3, 32, 48, 40


def experts_on(x: torch.Tensor, offsets: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Apply each group's expert to its rows, [R, H]; `torch._grouped_mm` would process all groups at once."""
    rows = x.split([*offsets.diff(prepend=offsets.new_zeros(1)).tolist(), len(x) - int(offsets[-1])])
    done = [functional.silu(group @ u) @ d for group, u, d in zip(rows, up, down, strict=False)]
    # Rows past the last group are not initialised and must not affect the result.
    return torch.cat([*done, torch.zeros_like(rows[-1])])


class Mixture(nn.Module):
    """Draws all experts alike on every rank and keeps the rank's own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dispatcher = shardweave.TokenDispatcher(
            mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST_TOKENS, dtype=torch.float32
        )
        mine = slice(EXPERTS // 4 * mesh.get_local_rank(), EXPERTS // 4 * (mesh.get_local_rank() + 1))
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS))
        self.up = nn.Parameter((torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)[mine].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)[mine].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(TOP_K)  # [T, K]
        routed = self.dispatcher.dispatch(x, ids, weights)
        with routed.kept():
            output = experts_on(routed.x, routed.offsets, self.up, self.down)
        return self.dispatcher.combine(output, routed)


def dense(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, ids = (x @ router).softmax(-1).topk(TOP_K)
    each = torch.stack([functional.silu(x @ u) @ d for u, d in zip(up, down, strict=True)], 1)  # [T, E, H]
    return (each.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


def main() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = Mixture(mesh)
    torch.manual_seed(0)
    whole = [torch.randn(HIDDEN, EXPERTS), torch.randn(EXPERTS, HIDDEN, WIDTH), torch.randn(EXPERTS, WIDTH, HIDDEN)]
    router, up, down = whole[0], whole[1] / HIDDEN**0.5, whole[2] / WIDTH**0.5

    tokens = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (40, 0, 7, 23)]
    x = tokens[rank].clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()

    alike = tokens[rank].clone().requires_grad_()
    want = dense(alike, router, up, down)
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, alike.grad)
    layer.dispatcher.check()  # raises on overflow, which cannot happen with the default capacity
    if rank == 0:
        print(layer.dispatcher.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
