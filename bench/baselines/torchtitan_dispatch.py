"""Dispatch and combine of a layer's tokens by TokenDispatcher and by torchtitan's AllToAllTokenDispatcher, and what is
wrong with a layer: results and gradients against float64, with experts that each multiply by a number of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...runtime import TokenDispatcher

TOP_K, EXPERTS = 4, 32
# Of the largest, in float32: sums of TOP_K products, and of a row's length for weights.
TOLERANCE = 1e-5

Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scale | None], torch.Tensor]


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

    def by_torchtitan(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None = None
    ) -> torch.Tensor:
        rows, counts, metadata = theirs.dispatch(x, weights, ids, ids.flatten().bincount(minlength=EXPERTS))
        return theirs.combine(rows if scale is None else scale(rows, counts), metadata, x)

    return by_torchtitan


def shardweave_layer(mesh: DeviceMesh, hidden: int, tokens: int, transport: str | None = None) -> Layer:
    ours = TokenDispatcher(
        mesh,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=hidden,
        max_tokens=tokens,
        dtype=torch.float32,
        transport=transport,
    )

    def by_shardweave(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None = None
    ) -> torch.Tensor:
        routed = ours.dispatch(x, ids, weights)
        return ours.combine(routed.x if scale is None else scale(routed.x, routed.counts), routed)

    return by_shardweave


def expert_scale(rank: int, size: int) -> Scale:
    """What a rank's experts do to their rows in a check."""
    first = rank * EXPERTS // size

    def scale(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        factors = _factor(torch.arange(first, first + len(counts))).float().repeat_interleave(counts)
        return torch.cat((rows[: len(factors)] * factors[:, None], rows[len(factors) :]))

    return scale


def _factor(ids: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies by: another number each."""
    return (ids.double() + 1) / EXPERTS


def faults_of(
    layer: Layer,
    scale: Scale,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gradient: torch.Tensor,
) -> list[str]:
    """What is wrong with a layer's result and gradients, by float64, where an expert multiplies by its own factor."""
    y = layer(x, ids, weights, scale)
    found = dict(zip(("dx", "dweights"), torch.autograd.grad(y, (x, weights), gradient), strict=True))
    found["y"] = y.detach()
    factors, wide = _factor(ids), gradient.double()
    share = (weights.detach().double() * factors).sum(1, keepdim=True)
    wanted = {
        "y": x.detach().double() * share,
        "dx": wide * share,
        "dweights": (x.detach().double() * wide).sum(1, keepdim=True) * factors,
    }
    faults = []
    for name, want in wanted.items():
        off, scale_of = (found[name].double() - want).abs().max().item(), want.abs().max().item()
        if not off <= TOLERANCE * scale_of:  # nan too
            faults.append(f"{name} is off by {off:.3g} where the largest is {scale_of:.3g}")
    return faults
