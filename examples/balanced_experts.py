"""Skewed routing balanced during training: replicas and places of experts change once, between two steps.

    torchrun --standalone --nproc-per-node 4 examples/balanced_experts.py

A frozen router prefers a few experts. After some steps with experts in order, `balance_experts` reads the counts of the
last dispatch and chooses another map, and `move_experts` moves weights and the optimizer's state. Every loss is
compared with that of the same mixture on one process. Prints the imbalance and the time of a step before and after.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import shardweave

EXPERTS, EACH, TOP_K, HIDDEN, WIDTH, TOKENS, STEPS = 8, 3, 2, 64, 256, 384, 6
IN_ORDER = [[(rank * EACH + i) % EXPERTS for i in range(EACH)] for rank in range(4)]


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids, [T, K]; expert e is preferred the less the larger e is."""
    preferred = -1.5 * torch.arange(1.0, EXPERTS + 1).log()
    weights, ids = (x @ router + preferred).softmax(-1).topk(TOP_K)
    return weights, ids


def expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return functional.silu(x @ up) @ down


class Mixture(nn.Module):
    """Has the weights of this rank's physical experts: all experts are drawn alike on every rank."""

    def __init__(self, mesh: DeviceMesh, up: torch.Tensor, down: torch.Tensor, router: torch.Tensor) -> None:
        super().__init__()
        self.dispatcher = shardweave.TokenDispatcher(
            mesh,
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=TOKENS,
            dtype=torch.float32,
            options=shardweave.DispatchOptions(expert_map=IN_ORDER),
        )
        mine = IN_ORDER[mesh.get_local_rank()]
        self.up, self.down = nn.Parameter(up[mine]), nn.Parameter(down[mine])
        self.router = router

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, shardweave.moe.TokenLoad]:
        weights, ids = route(x, self.router)
        routed = self.dispatcher.dispatch(x, ids, weights)
        ends = [0, *routed.offsets.tolist()]
        done = [
            expert(routed.x[a:b], up, down) for a, b, up, down in zip(ends, ends[1:], self.up, self.down, strict=False)
        ]
        rest = torch.zeros_like(routed.x[ends[-1] :])
        return self.dispatcher.combine(torch.cat([*done, rest]), routed), routed.load()


def dense(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    weights, ids = route(x, router)
    each = torch.stack([expert(x, u, d) for u, d in zip(up, down, strict=True)], 1)  # [T, E, H]
    return (each.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5, torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5
    router = torch.randn(HIDDEN, EXPERTS) / HIDDEN**0.5
    tokens = torch.randn(4, TOKENS, HIDDEN)
    target = torch.randn(4, TOKENS, HIDDEN)

    layer = Mixture(mesh, up, down, router)
    parameters = [layer.up, layer.down]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    alone = [nn.Parameter(up.clone()), nn.Parameter(down.clone())]
    of_alone = torch.optim.Adam(alone, lr=1e-3)

    def step() -> tuple[float, float, shardweave.moe.TokenLoad]:
        """Return the loss of this rank's tokens, the seconds, and the load."""
        optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        y, load = layer(tokens[dist.get_rank()])
        loss = functional.mse_loss(y, target[dist.get_rank()])
        loss.backward()
        shardweave.moe.sum_replicas(layer.dispatcher, [p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        dist.barrier()
        return loss.item(), time.perf_counter() - start, load

    def step_alone() -> torch.Tensor:
        """Return the loss of each rank's tokens."""
        of_alone.zero_grad()
        losses = torch.stack(
            [functional.mse_loss(dense(x, alone[0], alone[1], router), t) for x, t in zip(tokens, target, strict=True)]
        )
        losses.sum().backward()
        of_alone.step()
        return losses.detach()

    for name in ("experts in order", "balanced"):
        seconds = []
        for _ in range(STEPS):
            loss, elapsed, load = step()
            torch.testing.assert_close(loss, step_alone()[dist.get_rank()].item(), rtol=1e-4, atol=0)
            seconds.append(elapsed)
        if dist.get_rank() == 0:
            text = ", ".join(map(str, load.per_rank.tolist()))
            print(f"{name}: pairs of ranks {text}; imbalance {load.imbalance.item():.2f}; "
                  f"{statistics.median(seconds) * 1e3:.1f} ms a step")  # fmt: skip
        if name == "experts in order":
            plan = shardweave.moe.balance_experts(load.per_source, EACH)
            state = [of[key] for of in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            shardweave.moe.move_experts(layer.dispatcher, plan.expert_map, [*parameters, *state])
            if dist.get_rank() == 0:
                print(f"new map: {plan.expert_map}, imbalance {plan.imbalance:.2f} expected")
    layer.dispatcher.check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
