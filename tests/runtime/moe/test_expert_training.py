"""A small mixture-of-experts transformer on four ranks, its experts sharded over them: losses as on one process.

Both compute the same products in float32 and sum them in other orders: a token's experts, the tokens of a weight's
gradient, the ranks of an averaged one. In a few steps losses differ by float32 roundings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import shardweave
from shardweave.bench.suites.training import LENGTH, SEQUENCES, Trainer, batch, text
from shardweave.bench.workloads.transformer import Sizes, Transformer
from shardweave.runtime.dtensor.fsdp import adapt_fsdp
from shardweave.runtime.moe.parallel_style import ExpertParallel

RANKS, STEPS, LEARNING_RATE = 4, 3, 1e-3


@dataclass(frozen=True)
class ExpertSizes:
    """Of each mixture."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 96


class Experts(nn.Module):
    """A SwiGLU for each expert."""

    def __init__(self, width: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, width))
        self.w2 = nn.Parameter(torch.empty(sizes.experts, width, sizes.hidden))
        self.w3 = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[R, width] of x [R, width], whose group e ends at row offsets[e]; rows past the last group are undefined."""
        # In float32, for the comparison with one process; on a GPU: three calls of torch._grouped_mm in bfloat16.
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        done = [
            F.linear(F.silu(F.linear(group, w1)) * F.linear(group, w3), w2)
            for group, w1, w2, w3 in zip(groups, *weights, strict=True)
        ]
        return torch.cat([*done, torch.empty_like(rest)])


class MixtureOfExperts(nn.Module):
    """Each token by the `top_k` experts that its router scores highest, weighted by softmax over those scores. On
    one process it is plain torch, the reference for a sharded one."""

    def __init__(self, width: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(width, sizes.experts, bias=False)
        self.experts = Experts(width, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)  # [T, width]
        scores, ids = self.router(tokens).topk(self.top_k, dim=-1)
        weights = scores.softmax(-1)  # [T, K]
        done = self.experts if isinstance(self.experts.w1, DTensor) else self._alone
        return done(tokens, ids, weights).view_as(x)

    def _alone(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        offsets = ids.flatten().bincount(minlength=len(self.experts.w1)).cumsum(0)
        rows = self.experts(tokens[order // self.top_k], offsets)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, rows * weights.flatten()[order, None])


def build_moe(sizes: Sizes, expert_sizes: ExpertSizes, seed: int) -> Transformer:
    """The model of a seed, all experts on this process."""
    torch.manual_seed(seed)
    model = Transformer(sizes)
    for block in model.blocks:
        block.feed_forward = MixtureOfExperts(sizes.width, expert_sizes)
    return model


def share_experts(model: Transformer, mesh: DeviceMesh, sizes: ExpertSizes, max_tokens: int) -> None:
    """Shard the experts of every block over a 1-D mesh; a collective."""
    style = ExpertParallel(top_k=sizes.top_k, hidden=model.sizes.width, max_tokens=max_tokens, dtype=torch.float32)
    parallelize_module(model, mesh, {"blocks.*.feed_forward.experts": style})


def shard_fully(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over a 1-D mesh for experts that are shared out beside it, over all ranks for the rest; a collective.

    Gradients are those of the mean of all ranks' losses. FSDP's own collectives become shardweave's.
    """
    size = dist.get_world_size()
    whole = init_device_mesh(mesh.device_type, (size,))
    for block in model.blocks:
        mixture: Any = block.feed_forward
        experts = fully_shard(mixture.experts, mesh=mesh)
        experts.set_gradient_divide_factor(size)
        fully_shard(block, mesh=whole)
    fully_shard(model, mesh=whole)
    adapt_fsdp(model)


SIZES, EXPERT_SIZES = Sizes(blocks=2), ExpertSizes()


def average_gradients(model: Transformer) -> None:
    """The loss is the mean of the ranks' losses. An expert's gradient contains the tokens of all ranks already."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank: int, fsdp: int) -> tuple[list[float], list[float], str, dict[str, int], dict[str, int]]:
    """The losses of this rank, on rank 0 those of one process too, where experts are placed, and what was counted."""
    mesh = init_device_mesh("cpu", (fsdp, RANKS // fsdp), mesh_dim_names=("fsdp", "ep"))
    model = build_moe(SIZES, EXPERT_SIZES, seed=0)
    share_experts(model, mesh["ep"], EXPERT_SIZES, SEQUENCES * LENGTH)
    if fsdp > 1:
        shard_fully(model, mesh["fsdp"])  # which averages gradients itself
    ours = Trainer(model, average_gradients if fsdp == 1 else lambda model: None, lr=LEARNING_RATE)
    alone = Trainer(build_moe(SIZES, EXPERT_SIZES, 0), lambda model: None, lr=LEARNING_RATE)
    data, losses, of_one = text(), list[float](), list[float]()
    for step in range(STEPS):
        parts = [batch(data, step, replica, RANKS) for replica in range(RANKS)]
        losses.append(ours.step(*parts[rank]))
        if rank == 0:
            of_one.append(alone.step(*(torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True))))
    experts: list[Any] = [module for module in model.modules() if isinstance(module, Experts)]
    for module in experts:
        module.token_dispatcher.check()
    stats = shardweave.stats()
    return losses, of_one, str(experts[0].w1.placements), dict(stats.calls), dict(stats.delegations)


@pytest.mark.multi
@pytest.mark.parametrize("fsdp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_experts_train_as_on_one_process(fsdp: int) -> None:
    by_rank = run_ranks(train, RANKS, fsdp, timeout=300)
    alone = by_rank[0][1]
    losses = [sum(step) / RANKS for step in zip(*(of_rank[0] for of_rank in by_rank), strict=True)]
    assert losses == pytest.approx(alone, rel=2e-6)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1) and losses[-1] < 0.95 * losses[0]
    for _, _, placements, calls, delegations in by_rank:
        assert set(calls) == {"shared_memory"} and not delegations
        if fsdp == 2:
            assert placements.startswith("(_StridedShard(dim=0, sf=2), Shard(dim=0))")


@pytest.mark.plan
def test_one_process_is_the_mixture_in_float64() -> None:
    """The reference of the comparison, against every expert applied to every token."""
    torch.manual_seed(3)
    mixture = MixtureOfExperts(16, ExpertSizes(experts=5, top_k=3, hidden=12))
    x = torch.randn(2, 7, 16)
    got = mixture(x)
    wide, w = x.double().flatten(0, 1), {n: p.detach().double() for n, p in mixture.experts.named_parameters()}
    scores, ids = mixture.router(x).flatten(0, 1).double().topk(3, dim=-1)
    weights = scores.softmax(-1)
    want = torch.zeros_like(wide)
    for e in range(5):
        done = (torch.nn.functional.silu(wide @ w["w1"][e].T) * (wide @ w["w3"][e].T)) @ w["w2"][e].T
        want += (weights * (ids == e)).sum(1, keepdim=True) * done
    assert torch.allclose(got.flatten(0, 1).double(), want, rtol=0, atol=1e-5 * want.abs().max().item())
