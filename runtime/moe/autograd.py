"""Dispatch and combine as autograd functions over the ranks that this process has: one, or all virtual ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import ops
from .ops import Engine, by_rank, routing_length
from .redispatch import RowsAgain


def _found(engine: Engine, function: Any, new: Any, operator: Any, *given: list[torch.Tensor]) -> list[torch.Tensor]:
    """What `function` returns; compiled, by way of its operator."""
    if not torch.compiler.is_compiling():
        return function(engine, *given)
    outs = new(engine, *given)
    operator(engine.state, outs, engine.handle, *given)
    return outs


def combine_into(engine: Engine, outs: list[torch.Tensor], *given: Any) -> None:
    """`ops.combine`; compiled, by way of its operator."""
    if not torch.compiler.is_compiling():
        ops.combine(engine, outs, *given)
    else:
        ops.combine_op(engine.state, outs, engine.handle, *given)


class Dispatch(torch.autograd.Function):
    """(engine, *xs, *weights, *ids) to what `ops.dispatch` returns: of each rank the rows, then its Sent.

    Rows and their weights have gradients. Backward keeps the routing, and nothing of [rows, H].
    """

    @staticmethod
    def forward(ctx: Any, engine: Engine, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        n = len(engine.parts)
        xs, weights, ids = given[:n], given[n : 2 * n], given[2 * n :]
        tokens = list(xs), list(ids), list(weights)
        if engine.layout.save == "copy" and not torch.compiler.is_compiling():
            found = ops.dispatch(engine, *tokens, ops.new_received(engine, tokens[0]))
        else:
            found = _found(engine, ops.dispatch, ops.new_dispatched, ops.dispatch_op, *tokens)
        ranks = list(by_rank(found, 2 + routing_length(engine)))
        routing = [tensor for rank in ranks for tensor in rank[2:]]
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # of a dozen integer tensors
        ctx.mark_non_differentiable(*routing)
        ctx.save_for_backward(*routing)
        ctx.engine = engine
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        engine: Engine = ctx.engine
        layout, n, routing = engine.layout, len(engine.parts), list(ctx.saved_tensors)
        rows, numbers = [], []
        for g, w, *_ in by_rank(gradients, 2 + routing_length(engine)):
            shape = layout.rows, layout.hidden
            device = routing[0].device
            rows.append(torch.zeros(shape, dtype=layout.dtype, device=device) if g is None else g)
            numbers.append(torch.zeros(shape[:1], dtype=torch.float32, device=device) if w is None else w)
        found = _found(
            engine, ops.dispatch_backward, ops.new_dispatched_backward, ops.dispatch_backward_op, rows, numbers, routing
        )
        return (None, *found, *[None] * n)


class Combine(torch.autograd.Function):
    """(engine, weighted, again, *values, *weights, *adds, *dispatched, *tokens, *routing) to each rank's sums.

    `dispatched` are the weights that Dispatch returned. Their gradient is nothing, but they tie the two: on a rank
    whose experts made nothing of what came, for want of experts, say, the backward of Dispatch runs all the same, as
    its peers need. Backward keeps the values, for the gradients of weights, the weights of rows and the routing; where
    it was not weighted, not the values. Adds may be None. `again` is empty, or has for each rank the rows that its
    experts' backward wants: then backward keeps `tokens`, which are dispatched once more.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: Engine, weighted: bool, again: Sequence[RowsAgain], *given: Any
    ) -> tuple[torch.Tensor, ...]:
        n = len(engine.parts)
        values, weights, adds, dispatched = [list(given[i * n : i * n + n]) for i in range(4)]
        tokens, routing = list(given[4 * n : 4 * n + len(again)]), list(given[4 * n + len(again) :])
        outs = ops.new_combined(engine, values, routing)
        combine_into(engine, outs, values, routing, weights if weighted else [], adds)
        ctx.save_for_backward(*tokens, *(values if weighted else []), *dispatched, *routing)
        ctx.engine, ctx.weighted, ctx.added = engine, weighted, [a is not None for a in adds]
        ctx.number, ctx.again = len(given), [weakref.ref(a) for a in again]
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        engine: Engine = ctx.engine
        n, saved = len(engine.parts), list(ctx.saved_tensors)
        tokens, saved = saved[: len(ctx.again)], saved[len(ctx.again) :]
        values, saved = (saved[:n], saved[n:]) if ctx.weighted else ([], saved)
        if tokens:
            # Unweighted, the backward of combine pushes rows as dispatch does.
            rows = ops.combine_backward(engine, tokens, [], saved[:n], saved[n:])
            for kept, x in zip(ctx.again, rows, strict=True):
                again = kept()
                if again is not None:  # else no saved tensor stands for rows; peers may have some all the same
                    again.rows = x
        found = _found(
            engine, ops.combine_backward, ops.new_combined_backward, ops.combine_backward_op,
            list(gradients), values, saved[:n], saved[n:],
        )  # fmt: skip
        of_weights = found[n:] if ctx.weighted else [None] * n
        added = [g if was else None for g, was in zip(gradients, ctx.added, strict=True)]
        return (None, None, None, *found[:n], *of_weights, *added, *[None] * (ctx.number - 3 * n))
