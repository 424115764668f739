"""The operations of TokenEngine as operators, for `torch.compile`.

An operator takes tensors only, so records of dispatches are flattened here and nowhere else. It finds its engine by a
handle and writes its results into memory of the graph, which Inductor may reuse. All operators declare the state of
their transport as mutated: otherwise a call whose result is unused would be dropped, and similar calls merged, while
peers wait for them. They have no gradients of their own: see `autograd`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dispatch_record import DispatchRecord, Tokens, empty_record
from .engine import Received, TokenEngine, engine_of
from .operations import records_of, tensors_of

Tensors = list[torch.Tensor]


def dispatch(engine: TokenEngine, tokens: Sequence[Tokens]) -> list[Received]:
    """`engine._run_dispatch` as an operator."""
    received = []
    for transfer, item, (rows, weights) in zip(engine.transfers, tokens, engine._new_received(tokens), strict=True):
        kind = transfer.in_chunks, transfer.two_level, transfer.deduped
        record = empty_record(engine.config, transfer.me, item.x.shape[0], weights, *kind)
        received.append((rows, record))
    outs = [tensor for rows, record in received for tensor in (rows, *record.tensors())]
    _dispatch_op(engine.state.tensor, outs, engine.handle, *map(list, zip(*tokens, strict=True)))
    return received


def combine(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    values: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
) -> None:
    """`engine._run_combine` as an operator."""
    _combine_op(
        engine.state.tensor, list(outs), engine.handle, tensors_of(records), list(values), list(weights), list(adds)
    )  # fmt: skip


def dispatch_backward(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor],
    weight_gradients: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> Tensors:
    """`engine._run_dispatch_backward` as an operator."""
    of_weights = _new_weight_gradients(records)
    _dispatch_backward_op(
        engine.state.tensor,
        [*outs, *of_weights],
        engine.handle,
        tensors_of(records),
        list(gradients),
        list(weight_gradients),
    )
    return of_weights


def combine_backward(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> tuple[Tensors, Tensors]:
    """`engine._run_combine_backward` as an operator."""
    outs = [g.new_empty(engine.config.rows, engine.config.hidden) for g in gradients]
    of_weights = [torch.empty_like(r.weights) for r in records] if values else []
    _combine_backward_op(
        engine.state.tensor, [*outs, *of_weights], engine.handle, tensors_of(records), list(gradients), list(values)
    )  # fmt: skip
    return outs, of_weights


def new_sums(engine: TokenEngine, records: Sequence[DispatchRecord]) -> Tensors:
    """Return memory of the graph for each rank's tokens, [T, H]."""
    shapes = [(r.rows.key.shape[0], engine.config.hidden) for r in records]
    return [r.weights.new_empty(shape, dtype=engine.config.dtype) for r, shape in zip(records, shapes, strict=True)]


def _new_weight_gradients(records: Sequence[DispatchRecord]) -> Tensors:
    return [r.rows.key.new_empty(r.rows.key.shape, dtype=torch.float32) for r in records]


def _operator(name: str, arguments: str, body: Callable[..., None]) -> Any:
    """Return `body(engine, outs, *arguments)` as an operator (state, outs, handle, *arguments)."""

    def run(state: torch.Tensor, outs: Tensors, handle: int, *given: Any) -> None:
        engine = engine_of(handle)
        engine.state.renew()
        body(engine, outs, *given)

    operator = torch.library.custom_op(
        f"shardweave::{name}",
        run,
        mutates_args=("state", "outs"),
        # Ranks may synchronise on the host.
        tags=(torch.Tag.cudagraph_unsafe,),
        schema=f"(Tensor(a!) state, Tensor(b!)[] outs, int handle, {arguments}) -> ()",
    )
    operator.register_fake(lambda state, outs, handle, *given: None)
    return operator


def _dispatch_into(engine: TokenEngine, outs: Tensors, xs: Tensors, ids: Tensors, weights: Tensors) -> None:
    each = len(outs) // len(xs)
    of_rank = [outs[i : i + each] for i in range(0, len(outs), each)]
    tokens = [Tokens(*item) for item in zip(xs, ids, weights, strict=True)]
    received = engine._run_dispatch(tokens, [(rows, row_weights) for rows, row_weights, *_ in of_rank])
    for (_, _, *routing), (_, record) in zip(of_rank, received, strict=True):
        for out, tensor in zip(routing, record.tensors()[1:], strict=True):
            out[: len(tensor)].copy_(tensor)  # records on two levels have room for more


def _combine_into(
    engine: TokenEngine, outs: Tensors, records: Tensors, values: Tensors, weights: Sequence[Any], adds: Sequence[Any]
) -> None:
    engine._run_combine(records_of(records, len(engine.transfers)), values, outs, weights, adds)


def _dispatch_backward_into(
    engine: TokenEngine, outs: Tensors, records: Tensors, gradients: Tensors, weight_gradients: Tensors
) -> None:
    n = len(gradients)
    results = engine._run_dispatch_backward(
        records_of(records, len(engine.transfers)), gradients, weight_gradients, outs[:n]
    )
    for out, of_weights in zip(outs[n:], results, strict=True):
        out.copy_(of_weights)


def _combine_backward_into(
    engine: TokenEngine, outs: Tensors, records: Tensors, gradients: Tensors, values: Tensors
) -> None:
    n = len(gradients)
    engine._run_combine_backward(
        records_of(records, len(engine.transfers)), gradients, values, outs[:n], outs[n:] or None
    )


_dispatch_op = _operator("dispatch_tokens", "Tensor[] xs, Tensor[] ids, Tensor[] weights", _dispatch_into)
_combine_op = _operator(
    "combine_tokens", "Tensor[] records, Tensor[] values, Tensor?[] weights, Tensor?[] adds", _combine_into
)
_dispatch_backward_op = _operator(
    "dispatch_tokens_backward",
    "Tensor[] records, Tensor[] gradients, Tensor[] weight_gradients",
    _dispatch_backward_into,
)
_combine_backward_op = _operator(
    "combine_tokens_backward", "Tensor[] records, Tensor[] gradients, Tensor[] values", _combine_backward_into
)
