"""Dispatch and combine of a layer's tokens on ranks of this machine, with experts that do nothing: by shardweave, by
torch.distributed's all-to-alls, and by torchtitan where it is installed.

Results and gradients are checked first, with experts that each multiply by a number of their own. Inputs rotate past
the last-level cache. Bytes are those of rows that cross between ranks, in both directions, of the rank with most: all
contenders move one row for each (token, k) pair; the bound sends a token once to a rank that has several of its
experts, and gets one sum back. The bare copy is one of all rows of pairs, there and back, those that stay on their rank
included: on one machine no dispatcher that hands experts their rows writes fewer, or reads fewer back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardweave.bench.baselines.token_layers import (
    EXPERTS,
    TOP_K,
    Layer,
    expert_scale,
    faults_of,
    plain_layer,
    shardweave_layer,
    torchtitan_layer,
)
from shardweave.bench.harness.interleaved import Rotation, copies, rotating, time_sides
from shardweave.bench.harness.measure import Sink, why_absent
from shardweave.bench.harness.ranks import Send, run_ranks
from shardweave.bench.suites.rank_rows import put, result

RANKS = 4
SUITE = "dispatch"
CONTENDERS = ("ours", "ours, on gloo", "torch.distributed", "torchtitan", "copy")
ROUNDS = {"full": 15, "quick": 9, "dry": 1}
_TURN_SECONDS = {"full": 0.1, "quick": 0.03, "dry": 0.0}
_BYTES_ARE = (
    "rows of (token, k) pairs that cross between ranks, there and back, of the rank with most; of the copy: rows of "
    "all its pairs"
)


@dataclass(frozen=True)
class Tokens:
    tokens: int
    hidden: int
    backward: bool

    def __str__(self) -> str:
        passes = "forward and backward" if self.backward else "forward"
        return f"T {self.tokens}, H {self.hidden}, K {TOP_K}, E {EXPERTS}, float32, {passes}"


def shapes(scale: str) -> list[Tokens]:
    sizes = {"full": (16, 128, 512, 1024, 4096), "quick": (16, 512)}.get(scale, (5,))
    return [
        Tokens(tokens, 8 if scale == "dry" else 1024, backward)
        for tokens in sizes
        for backward in (False, True)
        if tokens != 16 or not backward  # a decoder has no gradients
    ]


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    return {str(shape): CONTENDERS for shape in shapes(scale)}


def test_dispatch(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    wanted = [shape for shape in shapes(scale) if str(shape) in names]
    run_ranks(rank_main, RANKS, {"shapes": wanted, "scale": scale}, lambda case, by_rank: put(sink, by_rank, case))


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]
    for shape in config["shapes"]:
        layers: dict[str, Layer] = {
            "ours": shardweave_layer(mesh, shape.hidden, shape.tokens),
            "ours, on gloo": shardweave_layer(mesh, shape.hidden, shape.tokens, "process_group"),
            "torch.distributed": plain_layer,
        }
        absent = {}
        try:
            layers["torchtitan"] = torchtitan_layer(mesh)
        except ImportError as error:
            absent["torchtitan"] = why_absent("torchtitan", error)
        send({"case": str(shape), **_measured(shape, layers, rank, size, config["scale"]), "absent": absent})


def _measured(shape: Tokens, layers: dict[str, Layer], rank: int, size: int, scale: str) -> dict[str, Any]:
    rotation = Rotation.of(shape.tokens * shape.hidden * 4, size, 1 if scale == "dry" else None)
    inputs = [inputs_of(shape, rank * rotation.sets + i) for i in range(rotation.sets)]
    checked = {name: faults_of(layer, expert_scale(rank, size), *inputs[0]) for name, layer in layers.items()}
    (moved, bound), every = bytes_of(shape, inputs[0][1], rank, size), bytes_of_pairs(shape)
    sides = {name: rotating(partial(run_layer, shape, layer), inputs) for name, layer in layers.items()}
    sides["copy"] = copies(every, Rotation.of(every, size, 1 if scale == "dry" else None))
    return result(
        time_sides(sides, ROUNDS[scale], _TURN_SECONDS[scale]),
        faults={name: "; ".join(faults) for name, faults in checked.items() if faults},
        bytes=dict.fromkeys(layers, moved) | {"copy": every},
        bound=bound,
        detail={"bytes are": _BYTES_ARE, "cold": rotation.cold},
    )


def run_layer(shape: Tokens, layer: Layer, given: tuple[torch.Tensor, ...]) -> Any:
    """Dispatch and combine `inputs_of` a rank, with experts that do nothing."""
    x, ids, weights, gradient = given
    if shape.backward:
        return torch.autograd.grad(layer(x, ids, weights, None), (x, weights), gradient)
    with torch.no_grad():
        return layer(x, ids, weights, None)


def bytes_of(shape: Tokens, ids: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """What crosses for a rank's tokens, and the least that has to."""
    owner = ids // (EXPERTS // size)
    away = int((owner != rank).sum())
    # Of each token, the other ranks that have an expert of it.
    once = sum(int(((owner == other).any(1)).sum()) for other in range(size) if other != rank)
    row = shape.hidden * 4 * _passes(shape)
    return away * row, once * row


def bytes_of_pairs(shape: Tokens) -> int:
    """The bytes of a row for each of a rank's pairs, there and back."""
    return shape.tokens * TOP_K * shape.hidden * 4 * _passes(shape)


def _passes(shape: Tokens) -> int:
    """How often rows travel: there and back, and so do their gradients."""
    return 4 if shape.backward else 2


def inputs_of(shape: Tokens, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, weights, and the gradient of the result."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape.tokens, shape.hidden, generator=g).requires_grad_()
    ids = torch.rand(shape.tokens, EXPERTS, generator=g).topk(TOP_K).indices
    weights = torch.rand(shape.tokens, TOP_K, generator=g).requires_grad_()
    return x, ids, weights, torch.randn(shape.tokens, shape.hidden, generator=g)
