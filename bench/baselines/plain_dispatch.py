"""Token dispatch by torch.distributed alone, as a program without a library for it writes it: rows sorted by expert,
counts and then rows exchanged by `all_to_all_single`, rows put in order of expert; and all of it back.

Split sizes are read by the host, as that call wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; gradients go the same way back."""

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
    """[T, H]: each token's entries' rows, weighted and summed, from experts spread evenly over the default group.

    Args:
        ids, weights: [T, K], of an expert each; `experts` is a multiple of the ranks.
        scale: what the experts do, given rows in order of expert and their counts, int64; None: nothing.
    """
    ranks = dist.get_world_size()
    order = torch.argsort(ids.view(-1), stable=True)
    token = order // ids.shape[1]
    counts = ids.flatten().bincount(minlength=experts).view(ranks, -1)  # by owner and expert
    coming = torch.empty_like(counts)  # by source and expert
    dist.all_to_all_single(coming, counts)
    send, receive = counts.sum(1).tolist(), coming.sum(1).tolist()
    rows = _Exchange.apply(x[token], send, receive)
    expert = torch.arange(coming.shape[1]).repeat(ranks).repeat_interleave(coming.view(-1))
    by_expert = torch.argsort(expert, stable=True)
    grouped = rows[by_expert]
    if scale is not None:
        grouped = scale(grouped, coming.sum(0))
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert)))
    returned = _Exchange.apply(grouped[back], receive, send)
    weighted = returned * weights.view(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted)
