"""The transformer of `transformer.py` with mixtures of experts for feed-forwards, and its experts shared out to ranks.

Without a dispatcher a mixture is plain torch, all experts on this process: what a sharded one has to equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..runtime import TokenDispatcher
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

    def keep(self, first: int, last: int) -> None:
        """Let go of all experts but first to below last."""
        for name, weight in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(weight.detach()[first:last].clone()))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[R, width] of x [R, width], whose group e ends at row offsets[e]; rows past the last group are anything."""
        # In float32, to be held against one process; on a GPU this is three calls of torch._grouped_mm in bfloat16.
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
        done = [
            F.linear(F.silu(F.linear(group, w1)) * F.linear(group, w3), w2)
            for group, w1, w2, w3 in zip(groups, self.w1, self.w2, self.w3, strict=True)
        ]
        return torch.cat([*done, torch.empty_like(rest)])


class MixtureOfExperts(nn.Module):
    """Each token by the `top_k` experts that its router scores highest, weighted by softmax over those scores."""

    def __init__(self, width: int, sizes: ExpertSizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.router = nn.Linear(width, sizes.experts, bias=False)
        self.experts = Experts(width, sizes)
        self.dispatcher: TokenDispatcher | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)  # [T, width]
        scores, ids = self.router(tokens).topk(self.top_k, dim=-1)
        weights = scores.softmax(-1)  # [T, K]
        if self.dispatcher is None:
            return self._alone(tokens, ids, weights).view_as(x)
        routed = self.dispatcher.dispatch(tokens, ids, weights)
        return self.dispatcher.combine(self.experts(routed.x, routed.offsets), routed).view_as(x)

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


def share_experts(model: Transformer, dispatcher: TokenDispatcher, rank: int) -> list[nn.Parameter]:
    """Leave rank `rank` of the dispatcher its experts; their parameters, whose gradients are of all ranks' tokens."""
    kept = []
    for block in model.blocks:
        mixture = block.feed_forward
        assert isinstance(mixture, MixtureOfExperts)
        mixture.experts.keep(*dispatcher.layout.bounds[rank : rank + 2])
        mixture.dispatcher = dispatcher
        kept += list(mixture.experts.parameters())
    return kept
