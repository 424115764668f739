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

from shardweave import TokenDispatcher
from shardweave.errors import ArgumentError
from shardweave.runtime.moe.options import DispatchOptions

T, H, K, E, RANKS = 12, 40, 2, 4, 2
TRANSPORTS = ("shared_memory", "process_group")


def pending(x: torch.Tensor) -> torch.Tensor:
    """x as the result of a collective that nobody has waited for."""
    return AsyncCollectiveTensor(x.detach())


def strided(x: torch.Tensor) -> torch.Tensor:
    """x with its columns before its rows; the rows of tokens apart."""
    if x.shape[1] == H:
        return torch.cat((x, x), 1).detach()[:, H:]
    return x.detach().T.contiguous().T


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
            num_experts=E,
            top_k=K,
            hidden=H,
            max_tokens=T,
            dtype=torch.float32,
            transport=transport,
            options=DispatchOptions(zero_rows=True),
        )
        wanted = result_of(d, torch.Tensor.detach)
        for of in (pending, negated):
            for want, got in zip(wanted, result_of(d, of), strict=True):
                assert want.equal(got), (transport, of.__name__)
        for want, got in zip(wanted, result_of(d, strided), strict=True):
            assert want.equal(got), transport
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
            rows = routed.x.clone()
            with pytest.raises(ArgumentError, match="out: overlaps the memory of expert_output"):
                d.combine(pending(rows), routed, out=rows[:T])


def without_memory(rank: int, transport: str) -> None:
    d = TokenDispatcher(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=torch.float32, transport=transport)
    t = tokens_of(rank, T, K, E, H, torch.float32, "holes")
    x = t.x.clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="a Tensor of shape .* without memory"):
        d.dispatch(x, t.ids, t.weights)


def written(rank: int) -> None:
    """autograd learns that the output of a combine has been written."""
    for transport in TRANSPORTS:
        d = TokenDispatcher(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=torch.float32, transport=transport)
        t = tokens_of(rank, T, K, E, H, torch.float32, "holes")
        for start in (False, True):
            y = t.x.clone().requires_grad_().exp()
            with torch.no_grad():
                routed = d.dispatch(t.x, t.ids, t.weights)
                if start:
                    d.combine_start(routed.x, routed, out=y).finish()
                else:
                    d.combine(routed.x, routed, out=y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        with torch.inference_mode():
            routed = d.dispatch(t.x, t.ids, t.weights)
            d.combine(routed.x, routed, out=torch.empty(T, H))


@pytest.mark.multi
def test_output_is_known_to_be_written() -> None:
    run_ranks(written, RANKS)


@pytest.mark.multi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensor_without_memory(transport: str) -> None:
    run_ranks(without_memory, RANKS, transport)


@pytest.mark.multi
def test_memory_of_arguments() -> None:
    run_ranks(of_ranks, RANKS)
