"""Arguments whose memory is not what they stand for: results of asynchronous collectives, negated views, subclasses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from shardweave import ArgumentError, TokenDispatcher

T, H, K, E, RANKS = 12, 40, 2, 4, 2
TRANSPORTS = ("shared_memory", "process_group")


def pending(x: torch.Tensor) -> torch.Tensor:
    """x as the result of a collective that nobody has waited for."""
    return AsyncCollectiveTensor(x.detach())


def negated(x: torch.Tensor) -> torch.Tensor:
    """x as a view of -x."""
    if not x.is_floating_point():
        return x
    result = torch._neg_view(-x.detach())
    assert result.is_neg()
    return result


def result_of(d: TokenDispatcher, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The results of a dispatch and a combine, and gradients, where arguments are `of` plain tensors."""
    t = tokens_of(0, T, K, E, H, torch.float32, "holes")
    x, weights = (of(v).requires_grad_() for v in (t.x.clone(), t.weights.clone()))
    routed = d.dispatch(x, of(t.ids), weights)
    y = d.combine(routed.x, routed, add=of(t.x))
    # The gradient of a view of a sum is that of the sum.
    gradients = torch.autograd.grad(y, (x, weights), of(t.gradient))
    with torch.no_grad():
        again = d.combine(of(routed.x.detach()), routed)
        start = d.combine_start(of(routed.x.detach()), d.dispatch_start(of(t.x), of(t.ids), of(t.weights)).finish())
        return [y.detach(), *gradients, again, start.finish()]


def of_ranks(rank: int) -> None:
    for transport in TRANSPORTS:
        d = TokenDispatcher(
            num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=torch.float32, transport=transport, zero_rows=True
        )
        wanted = result_of(d, torch.Tensor.detach)
        for of in (pending, negated):
            for want, got in zip(wanted, result_of(d, of), strict=True):
                assert want.equal(got), (transport, of.__name__)
        t = tokens_of(0, T, K, E, H, torch.float32, "holes")
        x = funcol.all_reduce(t.x, "max", dist.group.WORLD)  # equal on all ranks
        assert isinstance(x, AsyncCollectiveTensor)
        with torch.no_grad():
            routed = d.dispatch(x, t.ids, t.weights)
            assert d.combine(routed.x, routed, add=t.x).equal(wanted[0])
        with pytest.raises(ArgumentError, match="x: a TwoTensor, without memory of its own; allowed: a torch.Tensor"):
            d.dispatch(TwoTensor(t.x, t.x), t.ids, t.weights)
        with torch.no_grad():
            routed = d.dispatch(t.x, t.ids, t.weights)
            for out, kind in ((negated(t.x), "with the negative bit"), (pending(t.x), "an AsyncCollectiveTensor")):
                with pytest.raises(
                    ArgumentError, match=f"out: {kind}; allowed: a tensor whose memory holds its values"
                ):
                    d.combine(routed.x, routed, out=out)


@pytest.mark.multi
def test_memory_of_arguments() -> None:
    run_ranks(of_ranks, RANKS)
