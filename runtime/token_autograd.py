"""Dispatch and combine as autograd functions over the ranks that this process has: one, or all virtual ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch

from .token_ranks import DispatchRank, Sent
from .token_slabs import SlabRank


class Engine(Protocol):
    """The ranks of a dispatcher that are in this process, and how their runs are carried out together."""

    parts: Sequence[DispatchRank | SlabRank]

    def run(self, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        """Carry out one run of each part; what they return."""


class Dispatch(torch.autograd.Function):
    """(engine, ids, sent, *xs, *weights) to (*received, *their weights); `sent` gets what combine needs."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: Engine, ids: Sequence[torch.Tensor], sent: list[Sent], *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = len(engine.parts)
        xs, weights = given[:n], given[n:]
        runs = [p.dispatch(x, i, w) for p, x, i, w in zip(engine.parts, xs, ids, weights, strict=True)]
        done = engine.run(runs)
        sent += [s for _, s in done]
        ctx.engine = engine
        # Without what is returned, which the caller may let go: backward does not read it.
        ctx.sent = [s._replace(weights=s.weights.new_empty(0)) for s in sent]
        ctx.shapes = [x.shape for x in xs]
        return (*[x for x, _ in done], *[s.weights for s in sent])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        engine: Engine = ctx.engine
        n = len(engine.parts)
        outs = [
            torch.empty(shape, dtype=g.dtype, device=g.device)
            for shape, g in zip(ctx.shapes, gradients[:n], strict=True)
        ]
        runs = [
            p.combine(s, g.contiguous(), out, None, None, numbers.contiguous())
            for p, s, g, numbers, out in zip(engine.parts, ctx.sent, gradients[:n], gradients[n:], outs, strict=True)
        ]
        return (None, None, None, *outs, *engine.run(runs))


class Combine(torch.autograd.Function):
    """(engine, sent, outs, *values, *weights, *add, *dispatched) to *outs; weights and add may be absent (None).

    `dispatched` are outputs of Dispatch. Their gradient is nothing, but they tie the two: on a rank whose experts made
    nothing of what came, for want of experts, say, the backward of Dispatch runs all the same, as its peers need.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: Engine, sent: Sequence[Sent], outs: Sequence[torch.Tensor], *given: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        n = len(engine.parts)
        values, weights, add = given[:n], given[n : 2 * n], given[2 * n : 3 * n]
        runs = [
            p.combine(s, v, out, w, a)  # type: ignore[arg-type]
            for p, s, v, out, w, a in zip(engine.parts, sent, values, outs, weights, add, strict=True)
        ]
        engine.run(runs)
        ctx.engine = engine
        ctx.sent = [s._replace(weights=s.weights.detach()) for s in sent]
        ctx.weighted, ctx.added = weights[0] is not None, [a is not None for a in add]
        if ctx.weighted:
            ctx.save_for_backward(*values)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        engine: Engine = ctx.engine
        values = ctx.saved_tensors if ctx.weighted else [None] * len(engine.parts)
        given = [g if g.shape[1] == 1 or g.stride(1) == 1 else g.contiguous() for g in gradients]
        runs = [
            p.combine_backward(s, g, v if v is None else v.contiguous())
            for p, s, g, v in zip(engine.parts, ctx.sent, given, values, strict=True)
        ]
        found = engine.run(runs)
        added = [g if was else None for g, was in zip(gradients, ctx.added, strict=True)]
        return (None, None, None, *[d for d, _ in found], *[w for _, w in found], *added, *[None] * len(found))
