"""Dispatch and combine of a layer's tokens by TokenDispatcher, by torchtitan's AllToAllTokenDispatcher and by
torch.distributed alone, and an oracle: results and gradients against float64, with experts that each multiply by a
number of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...moe import TokenDispatcher
from ...runtime.transports.choose_transport import TransportName

TOP_K, EXPERTS = 4, 32
# Of the largest, in float32: sums of TOP_K products, and of a row's length for weights.
TOLERANCE = 1e-5

Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The experts of a rank: of rows in order of expert, and int64 counts."""
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scale | None], torch.Tensor]
"""[T, H] of tokens [T, H], ids and weights [T, K], and experts (None: the identity)."""


def shardweave_layer(mesh: DeviceMesh, hidden: int, tokens: int, transport: TransportName | None = None) -> Layer:
    ours = TokenDispatcher(
        mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=tokens, dtype=torch.float32,
        transport=transport,
    )  # fmt: skip

    def by_shardweave(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None) -> torch.Tensor:
        routed = ours.dispatch(x, ids, weights)
        return ours.combine(routed.x if scale is None else scale(routed.x, routed.counts), routed)

    return by_shardweave


def torchtitan_layer(mesh: DeviceMesh) -> Layer:
    """Its dispatcher on a mesh of one dim, for `EXPERTS` and `TOP_K`.

    Raises:
        ImportError: it is not installed.
    """
    from torchtitan.distributed.utils import set_spmd_backend  # type: ignore[import-not-found]
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # type: ignore[import-not-found]

    set_spmd_backend("full_dtensor")
    theirs = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K))
    theirs.wire_meshes(ep_mesh=mesh)

    def by_torchtitan(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None) -> torch.Tensor:
        rows, counts, metadata = theirs.dispatch(x, weights, ids, ids.flatten().bincount(minlength=EXPERTS))
        return theirs.combine(rows if scale is None else scale(rows, counts), metadata, x)

    return by_torchtitan


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


def plain_layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None) -> torch.Tensor:
    """By torch.distributed alone, as one would write it by hand, with experts split evenly over the default group.

    Rows are sorted by expert, counts and then rows are exchanged by `all_to_all_single`, and received rows are sorted
    by expert; combine does the inverse. The host reads the split sizes, which that call needs.
    """
    order = torch.argsort(ids.view(-1), stable=True)
    token, ranks = order // ids.shape[1], dist.get_world_size()
    counts = ids.flatten().bincount(minlength=EXPERTS).view(ranks, -1)  # by destination rank and expert
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


def expert_scale(rank: int, size: int) -> Scale:
    """What a rank's experts do to their rows in a check."""
    first = rank * EXPERTS // size

    def scale(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        factors = factor(torch.arange(first, first + len(counts))).float().repeat_interleave(counts)
        return torch.cat((rows[: len(factors)] * factors[:, None], rows[len(factors) :]))

    return scale


def factor(ids: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies by: another number each."""
    return (ids.double() + 1) / EXPERTS


def faults_of(
    layer: Layer, scale: Scale, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor
) -> list[str]:
    """What is wrong with a layer's result and gradients, by float64, where an expert multiplies by its own factor."""
    y = layer(x, ids, weights, scale)
    outputs = dict(zip(("dx", "dweights"), torch.autograd.grad(y, (x, weights), gradient), strict=True))
    outputs["y"] = y.detach()
    factors, wide = factor(ids), gradient.double()
    share = (weights.detach().double() * factors).sum(1, keepdim=True)
    wanted = {
        "y": x.detach().double() * share,
        "dx": wide * share,
        "dweights": (x.detach().double() * wide).sum(1, keepdim=True) * factors,
    }
    faults = []
    for name, want in wanted.items():
        off, largest = (outputs[name].double() - want).abs().max().item(), want.abs().max().item()
        if not off <= TOLERANCE * largest:  # nan too
            faults.append(f"{name} is off by {off:.3g} where the largest is {largest:.3g}")
    return faults
