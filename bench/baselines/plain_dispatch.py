"""Token dispatch by torch.distributed alone, as one would write it by hand.

Rows are sorted by expert, counts and then rows are exchanged by `all_to_all_single`, and received rows are sorted by
expert; combine does the inverse. The host reads the split sizes, which that call needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Exchange(torch.autograd.Function):
    """Exchange rows between ranks; backward exchanges their gradients in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.send, ctx.receive = send, receive
        return _exchanged(x, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(gradient.contiguous(), ctx.receive, ctx.send), None, None


def _exchanged(x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x, receive, send)
    return out


def dispatch_and_combine(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int, scale: Scale | None = None
) -> torch.Tensor:
    """Dispatch, apply experts that are split evenly over the default group, and combine.

    Returns:
        [T, H]: the weighted sum of the rows of each token.

    Args:
        ids, weights: [T, K], expert ids and their weights.
        experts: the number of experts, a multiple of the number of ranks.
        scale: the experts, given rows in order of expert and int64 counts; None: the identity.
    """
    ranks = dist.get_world_size()
    order = torch.argsort(ids.view(-1), stable=True)
    token = order // ids.shape[1]
    counts = ids.flatten().bincount(minlength=experts).view(ranks, -1)  # by destination rank and expert
    received_counts = torch.empty_like(counts)  # by source rank and expert
    dist.all_to_all_single(received_counts, counts)
    send, receive = counts.sum(1).tolist(), received_counts.sum(1).tolist()
    rows = _Exchange.apply(x[token], send, receive)
    expert = torch.arange(received_counts.shape[1]).repeat(ranks).repeat_interleave(received_counts.view(-1))
    by_expert = torch.argsort(expert, stable=True)
    grouped = rows[by_expert]
    if scale is not None:
        grouped = scale(grouped, received_counts.sum(0))
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert)))
    returned = _Exchange.apply(grouped[back], receive, send)
    weighted = returned * weights.view(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted)
