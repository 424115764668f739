"""The transformer of `transformer.py` with mixtures of experts for feed-forwards, and their placement on a mesh.

On one process a mixture is plain torch, the reference for a sharded one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...runtime.dtensor.fsdp import adapt_fsdp
from ...runtime.moe.parallel_style import ExpertParallel
from .transformer import Sizes, Transformer


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
    """Each token by the `top_k` experts that its router scores highest, weighted by softmax over those scores."""

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
