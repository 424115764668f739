"""Dispatch, combine and what their backward does, as functions and, for `torch.compile`, as operators.

The functions take and return lists: for each rank that this process has an item, or as many as `routing_length` says.
Eager code calls them; what they return may be memory of the transport. Compiled code calls the operators, which write
the same into `outs`: memory of the graph, which Inductor may use again. An operator finds its dispatcher by a number.
All
of them declare the state of their transport as mutated: what mutates nothing is dropped where its result is not used,
and merged with what looks alike, while a peer waits for it. They have no gradients of their own: see `token_autograd`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import torch

from ...errors import ArgumentError
from ..transports.base import Transport
from .config import DispatchLayout
from .routing import Sent, specs_of_sent
from .transfer import BACKWARD, COMBINE, DISPATCH, UNDISPATCH, TokenRank

Tensors = list[torch.Tensor]


class Engine(Protocol):
    """The ranks of a dispatcher that are in this process, and how their runs are carried out together."""

    layout: DispatchLayout
    parts: Sequence[TokenRank]
    handle: int
    """What operators know it by. Made by `register`."""
    state: torch.Tensor
    """What its operators mutate. Made by `state_of`."""

    def run(self, what: int, runs: Sequence[Generator[Any, Any, Any]]) -> list[Any]:
        """Carry out one run of each part, of one of `token_rank.RUNS`; what they return."""

    def before_dispatch(self) -> None:
        """Raise for what earlier dispatches lost."""

    def after_dispatch(self, lost: torch.Tensor) -> None:
        """Note what this one lost."""


_engines: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count()
_states: weakref.WeakKeyDictionary[Transport, torch.Tensor] = weakref.WeakKeyDictionary()


def register(engine: Any) -> int:
    """A number for `engine`, which lives as long as others hold it."""
    handle = next(_handles)
    _engines[handle] = engine
    return handle


def state_of(transport: Transport, device: torch.device) -> torch.Tensor:
    """int64 [1], one for all dispatchers of a transport: the order of what they do there. It is never written."""
    if transport not in _states:
        with torch.inference_mode(False):
            _states[transport] = torch.zeros(1, dtype=torch.int64, device=device)
    return _states[transport]


def _engine(handle: int) -> Engine:
    engine = _engines.get(handle)
    if engine is None:
        raise ArgumentError(f"token dispatcher {handle}: gone; allowed: one that is kept until backward has run")
    return engine


def routing_length(engine: Engine) -> int:
    """Tensors of a dispatch's routing on one rank."""
    return Sent.number(engine.parts[0].in_slabs) - 1


def by_rank(tensors: Sequence[Any], each: int) -> Iterator[Sequence[Any]]:
    """`tensors`, `each` of them at a time."""
    return (tensors[i : i + each] for i in range(0, len(tensors), each))


def _sents(
    engine: Engine, routing: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None
) -> list[Sent]:
    of = list(by_rank(routing, routing_length(engine)))
    # Without weights there stands a tensor that is not read.
    given = [r[0] for r in of] if weights is None else weights
    return [Sent.of([w, *r]) for w, r in zip(given, of, strict=True)]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, H] with the elements of a row adjacent."""
    return x if x.shape[1] == 1 or not x.numel() or x.stride(1) == 1 else x.contiguous()


def dispatch(
    engine: Engine, xs: Tensors, ids: Tensors, weights: Tensors, outs: Sequence[Sequence[torch.Tensor]] | None = None
) -> Tensors:
    """Of each rank the rows received, [rows, H], and the tensors of its Sent. With `outs`, of each rank memory for rows
    and for their weights, both are copies there."""
    engine.before_dispatch()
    copies: Sequence[Any] = outs or [None] * len(xs)
    runs = [
        p.dispatch(_rows(x), i, w, out) for p, x, i, w, out in zip(engine.parts, xs, ids, weights, copies, strict=True)
    ]
    done = engine.run(DISPATCH, runs)
    engine.after_dispatch(done[0][1].groups.lost)
    return [tensor for received, sent in done for tensor in (received, *sent.tensors())]


def new_received(engine: Engine, xs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each rank memory for the rows of a dispatch and for their weights."""
    rows, hidden = engine.layout.rows, engine.layout.hidden
    return [(x.new_empty(rows, hidden), x.new_empty(rows, dtype=torch.float32)) for x in xs]


def new_dispatched(engine: Engine, xs: Tensors, ids: Tensors, weights: Tensors) -> Tensors:
    """Memory for what `dispatch` returns."""
    found = []
    for part, x, received in zip(engine.parts, xs, new_received(engine, xs), strict=True):
        specs = specs_of_sent(part.layout, part.me, x.shape[0], x.device, part.in_slabs)
        routing = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in specs]
        found += [*received, *routing]
    return found


def combine(
    engine: Engine, outs: Tensors, values: Tensors, routing: Tensors, weights: Tensors, adds: Sequence[Any]
) -> None:
    """Of each rank its tokens' sums into `outs`, [T, H]; without weights, sums of the rows as they are."""
    given: Sequence[Any] = weights or [None] * len(values)
    sents = _sents(engine, routing)
    engine.run(
        COMBINE,
        [
            p.combine(s, v, out, w, a if a is None else _rows(a))
            for p, s, v, out, w, a in zip(engine.parts, sents, values, outs, given, adds, strict=True)
        ],
    )


def new_combined(engine: Engine, values: Tensors, routing: Tensors) -> Tensors:
    """Memory for what `combine` writes; eager, of the transport, which recycles it."""
    shapes = [(s.rows.key.shape[0], engine.layout.hidden) for s in _sents(engine, routing)]
    if torch.compiler.is_compiling():
        return [v.new_empty(shape) for v, shape in zip(values, shapes, strict=True)]
    return [
        p.transport.empty(shape, v.dtype, v.device) for p, v, shape in zip(engine.parts, values, shapes, strict=True)
    ]


def dispatch_backward(engine: Engine, gradients: Tensors, weight_gradients: Tensors, routing: Tensors) -> Tensors:
    """The gradients of all ranks' x, [T, H], then those of their weights, float32 [T, K]."""
    outs = new_combined(engine, gradients, routing)
    sents = _sents(engine, routing)
    runs = [
        p.combine(s, g.contiguous(), out, None, None, numbers.contiguous())
        for p, s, g, numbers, out in zip(engine.parts, sents, gradients, weight_gradients, outs, strict=True)
    ]
    return [*outs, *engine.run(UNDISPATCH, runs)]


def new_dispatched_backward(engine: Engine, gradients: Tensors, weight_gradients: Tensors, routing: Tensors) -> Tensors:
    """Memory for what `dispatch_backward` returns."""
    keys = [s.rows.key for s in _sents(engine, routing)]
    return [*new_combined(engine, gradients, routing), *[k.new_empty(k.shape, dtype=torch.float32) for k in keys]]


def combine_backward(
    engine: Engine,
    gradients: Tensors,
    values: Tensors,
    weights: Tensors,
    routing: Tensors,
    outs: Tensors | None = None,
) -> Tensors:
    """The gradients of all ranks' values, [rows, H], then those of their weights, float32 [T, K]. With `outs`, memory
    for the former, they are copies there.

    Args:
        values: what was combined; none where it was not weighted, and so without gradients of weights.
        weights: float32 [rows], of the rows that each rank received.
    """
    given: Sequence[Any] = [v.contiguous() for v in values] or [None] * len(gradients)
    copies: Sequence[Any] = outs or [None] * len(gradients)
    sents = _sents(engine, routing, weights)
    runs = [
        p.combine_backward(s, _rows(g), v, out)
        for p, s, g, v, out in zip(engine.parts, sents, gradients, given, copies, strict=True)
    ]
    found = engine.run(BACKWARD, runs)
    return [*[d for d, _ in found], *([w for _, w in found] if values else [])]


def new_combined_backward(
    engine: Engine, gradients: Tensors, values: Tensors, weights: Tensors, routing: Tensors
) -> Tensors:
    """Memory for what `combine_backward` returns."""
    layout = engine.layout
    keys = [s.rows.key for s in _sents(engine, routing)] if values else []
    return [
        *[g.new_empty(layout.rows, layout.hidden) for g in gradients],
        *[k.new_empty(k.shape, dtype=torch.float32) for k in keys],
    ]


def _operator(name: str, given: str, body: Callable[..., None]) -> Any:
    """`body(engine, outs, *given)` as an operator (state, outs, handle, *given)."""

    def run(state: torch.Tensor, outs: Tensors, handle: int, *given: Any) -> None:
        body(_engine(handle), outs, *given)

    operator = torch.library.custom_op(
        f"shardweave::{name}",
        run,
        mutates_args=("state", "outs"),
        # Ranks may meet on the host.
        tags=(torch.Tag.cudagraph_unsafe,),
        schema=f"(Tensor(a!) state, Tensor(b!)[] outs, int handle, {given}) -> ()",
    )
    operator.register_fake(lambda state, outs, handle, *given: None)
    return operator


def _dispatch_into(engine: Engine, outs: Tensors, xs: Tensors, ids: Tensors, weights: Tensors) -> None:
    each = 2 + routing_length(engine)
    of = list(by_rank(outs, each))
    done = dispatch(engine, xs, ids, weights, [into[:2] for into in of])
    for into, found in zip(of, by_rank(done, each), strict=True):
        for out, routing in zip(into[2:], found[2:], strict=True):
            out.copy_(routing)


def _dispatch_backward_into(engine: Engine, outs: Tensors, *given: Any) -> None:
    for out, found in zip(outs, dispatch_backward(engine, *given), strict=True):
        out.copy_(found)


def _combine_backward_into(
    engine: Engine, outs: Tensors, gradients: Tensors, values: Tensors, weights: Tensors, routing: Tensors
) -> None:
    n = len(gradients)
    found = combine_backward(engine, gradients, values, weights, routing, outs[:n])
    for out, numbers in zip(outs[n:], found[n:], strict=True):
        out.copy_(numbers)


dispatch_op = _operator("dispatch_tokens", "Tensor[] xs, Tensor[] ids, Tensor[] weights", _dispatch_into)
combine_op = _operator("combine_tokens", "Tensor[] values, Tensor[] routing, Tensor[] weights, Tensor?[] adds", combine)
dispatch_backward_op = _operator(
    "dispatch_tokens_backward",
    "Tensor[] gradients, Tensor[] weight_gradients, Tensor[] routing",
    _dispatch_backward_into,
)
combine_backward_op = _operator(
    "combine_tokens_backward",
    "Tensor[] gradients, Tensor[] values, Tensor[] weights, Tensor[] routing",
    _combine_backward_into,
)
