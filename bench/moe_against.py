"""Dispatch and combine of a layer's tokens, by torchtitan's AllToAllTokenDispatcher on gloo and by TokenDispatcher.

In the same ranks and in turns. First checked, results and gradients, against float64 with experts that each multiply by
a number of their own; then timed with experts that do nothing, so that what is timed is the way there and back. The
figure of a round is the slowest rank's.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..runtime import TokenDispatcher
from .against_stock import ROUNDS, time_in_turns
from .ranks import Send

TOKENS, HIDDEN, TOP_K, EXPERTS = 1024, 1024, 4, 32
SIDES = ("torchtitan", "shardweave")
# Of the largest, in float32: sums of TOP_K products, and of HIDDEN for weights.
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


def shardweave_layer(mesh: DeviceMesh, hidden: int, tokens: int, world: str | None = None) -> Layer:
    ours = TokenDispatcher(
        mesh, num_experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=tokens, dtype=torch.float32, world=world
    )

    def by_shardweave(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: Scale | None = None
    ) -> torch.Tensor:
        routed = ours.dispatch(x, ids, weights)
        return ours.combine(routed.x if scale is None else scale(routed.x, routed.counts), routed)

    return by_shardweave


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank: sends what was wrong, or seconds."""
    del config
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    layers: dict[str, Layer] = {
        "torchtitan": torchtitan_layer(mesh["ep"]),
        "shardweave": shardweave_layer(mesh["ep"], HIDDEN, TOKENS),
    }
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g).requires_grad_()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=g).requires_grad_()
    gradient = torch.randn(TOKENS, HIDDEN, generator=g)
    scale = expert_scale(rank, size)
    faults = [
        f"{side}: {fault}"
        for side, layer in layers.items()
        for fault in faults_of(layer, scale, x, ids, weights, gradient)
    ]
    send({"faults": faults})

    def forward(side: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with torch.no_grad():
                return layers[side](x, ids, weights, None)

        return call

    def both(side: str) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: torch.autograd.grad(layers[side](x, ids, weights, None), (x, weights), gradient)

    received = TOKENS * TOP_K * HIDDEN * 4
    for name, made in (("forward", forward), ("forward and backward", both)):
        seconds = time_in_turns(made("torchtitan"), made("shardweave"), received, ROUNDS)  # type: ignore[arg-type]
        send({"what": name, "torchtitan": seconds["stock"], "shardweave": seconds["ours"]})


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


def outcome_of(by_rank: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of all ranks' messages; each round's seconds are the slowest rank's."""
    checked, *timed = zip(*by_rank, strict=True)
    return {
        "ranks": len(by_rank),
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "experts": EXPERTS,
        "faults": [f"rank {rank}: {fault}" for rank, found in enumerate(checked) for fault in found["faults"]],
        "seconds": {
            of_ranks[0]["what"]: {
                side: [max(rounds) for rounds in zip(*(found[side] for found in of_ranks), strict=True)]
                for side in SIDES
            }
            for of_ranks in timed
        },
    }


def show(outcome: dict[str, Any]) -> None:
    """Times, where results are right."""
    print(
        f"{outcome['ranks']} ranks on {os.cpu_count()} cores, torch {torch.__version__}, one thread each: dispatch and "
        f"combine, T {TOKENS}, H {HIDDEN}, K {TOP_K}, E {EXPERTS}, float32, uniform.\n"
    )
    if outcome["faults"]:
        print("Results are not as they have to be, so no times are shown:")
        for fault in outcome["faults"]:
            print(f"  {fault}")
        return
    print(f"Results and gradients of both are right: off by {TOLERANCE:g} of the largest at most, by float64.")
    print(f"Median of {ROUNDS} rounds of the slowest rank (quartiles), in turns:\n")
    for what, seconds in outcome["seconds"].items():
        middle = {}
        for side in SIDES:
            low, middle[side], high = statistics.quantiles(seconds[side], n=4, method="inclusive")
            print(f"  {what:<21} {side:<11} {middle[side] * 1e3:8.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
        print(f"  {what:<21} ratio       {middle[SIDES[0]] / middle[SIDES[1]]:8.2f}")
