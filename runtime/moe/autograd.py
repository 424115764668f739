"""Dispatch and combine with gradients, over the ranks that this process has: one, or all virtual ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError, UnsupportedError
from ..executor import dispatch_modes
from ..executor.dispatch_modes import below_modes, under_modes
from . import operations, ops
from .config import DispatchConfig
from .dispatch_record import DispatchRecord, Tokens
from .engine import TokenEngine
from .operations import Arrived, by_group, flat_rows, padded_gradients, records_of, tensors_of, unpacked
from .redispatch import RowsAgain
from .routed import RoutedTokens
from .transfer.base import TokenTransfer


def dispatch_tokens(engine: TokenEngine, tokens: Sequence[Tokens]) -> list[RoutedTokens]:
    """TokenDispatcher.dispatch of all ranks in this process."""
    compiling = torch.compiler.is_compiling()
    if engine.config.save == "redispatch" and compiling:
        raise UnsupportedError('save="redispatch" under torch.compile; allowed: "buffer", "copy"')
    if compiling or not dispatch_modes.count_dispatch_modes():
        copies = [copied_weights(item.weights) for item in tokens]
        return routed_tokens(engine, engine.config, tokens, copies, compiling=compiling)
    with below_modes():
        copies = [copied_weights(item.weights) for item in tokens]
    done = operations.dispatch(engine, with_weights(tokens, copies))
    with below_modes():
        return routed_tokens(engine, engine.config, tokens, copies, done)


def copied_weights(weights: torch.Tensor) -> torch.Tensor:
    """Return float32 weights in memory of their own: combine reads them when the caller may have written others. They
    require gradients where `weights` do, also without gradients enabled, so that a combine with gradients is refused.
    """
    if weights.requires_grad and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        with torch.enable_grad():
            return copied_weights(weights)
    return weights.clone() if weights.dtype is torch.float32 else weights.float()


def with_weights(tokens: Sequence[Tokens], weights: Sequence[torch.Tensor]) -> list[Tokens]:
    """Return the tokens with other weights."""
    return [Tokens(x, ids, given) for (x, ids, _), given in zip(tokens, weights, strict=True)]


def routed_tokens(
    engine: TokenEngine,
    config: DispatchConfig,
    tokens: Sequence[Tokens],
    copies: Sequence[torch.Tensor],
    done: Sequence[Arrived] | None = None,
    compiling: bool = False,
) -> list[RoutedTokens]:
    """Dispatch tokens.

    Args:
        copies: of `copied_weights`, which are sent.
        done: what the ranks received, if that has been done, with `config`.
        compiling: torch.compile is tracing.
    """
    n, again = len(tokens), config.save == "redispatch"
    if done is not None:
        _check_active_ranks(engine, config.active_ranks, "finish of a dispatch")
    differentiable: Sequence[torch.Tensor] = ()
    if torch.is_grad_enabled() or compiling:
        xs, ids, weights = zip(*tokens, strict=True)
        *differentiable, received = Dispatch.apply(engine, config, done, *xs, *weights, *ids, *copies)
    elif done is not None:
        received = done
    else:  # without the host time of autograd
        sent = [(x, ids, weights) for (x, ids, _), weights in zip(tokens, copies, strict=True)]
        received = engine._run_dispatch(sent)
    routed = []
    for i, (transfer, item, (rows, record)) in enumerate(zip(engine.transfers, tokens, received, strict=True)):
        grad_rows = None
        if differentiable:
            payloads, row_weights = rows, differentiable[n + i]
            if config.packed is None:
                payloads = [differentiable[i]]
            else:
                grad_rows = differentiable[i]
        else:
            payloads, row_weights = _of_rank(config, transfer, rows, record)
        x, *others = payloads
        kept, rows_again = (item.x.detach(), RowsAgain(x, item.x)) if again else (None, None)
        source = engine.handle, transfer.me
        routed.append(
            RoutedTokens(x, row_weights, copies[i], record, config, source, kept, rows_again, tuple(others), grad_rows)
        )
    return routed


def _of_rank(
    config: DispatchConfig, transfer: TokenTransfer, rows: torch.Tensor | list[torch.Tensor], record: DispatchRecord
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the payloads that a rank received, and the weights of its rows, in the shapes of RoutedTokens.

    Args:
        rows: of `TokenEngine._run_dispatch`, or the payloads of them.
    """
    if isinstance(rows, torch.Tensor):
        rows = [rows] if config.packed is None else unpacked(config, transfer, rows, record)
    if not config.batched:
        return rows, record.weights
    groups = config.bounds[transfer.me + 1] - config.bounds[transfer.me]
    # Detached: what autograd records must be no views, since callers may write it in place.
    payloads = [
        by_group(payload, groups, config).detach()
        if n != 1 or config.scale_layout is None
        else payload.view(groups, payload.numel() // max(groups, 1))
        for n, payload in enumerate(rows)
    ]
    return payloads, by_group(record.weights, groups, config).detach()


def combine_tokens(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    outs: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    weighted: bool,
) -> list[torch.Tensor]:
    """TokenDispatcher.combine of all ranks in this process."""
    compiling = torch.compiler.is_compiling()
    if not compiling and dispatch_modes.count_dispatch_modes():
        return start_combine(engine, values, routed, outs, adds, weighted, in_phases=False)()
    weights = [r.topk_weights if weighted else None for r in routed]
    records = tuple(r._record for r in routed)
    given = given_outs(outs)
    if not given and (torch.is_grad_enabled() or compiling):
        return _differentiable(engine, values, routed, weights, adds, None)
    if engine.config.batched:
        values = [flat_rows(v, engine.config) for v in values]
    if not given:
        sums = engine._new_sums(records)
        engine._run_combine(records, values, sums, weights, adds)
        return sums
    with torch.no_grad():
        (ops.combine if compiling else TokenEngine._run_combine)(engine, records, values, given, weights, adds)
    if not compiling:
        note_written(given)
    return given


def start_combine(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    outs: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    weighted: bool,
    in_phases: bool = True,
) -> Callable[[], list[torch.Tensor]]:
    """TokenDispatcher.combine_start of all ranks in this process; return a function that waits for the sums, below
    dispatch modes. Under them the combine is one operator, and complete when this returns.

    Args:
        in_phases: False: peers combine in one phase; only under modes.
    """
    weights = [r.topk_weights if weighted else None for r in routed]
    records = tuple(r._record for r in routed)
    given = given_outs(outs)
    wait: Callable[[], object] | None = None
    if under_modes():
        sums = operations.combine(engine, records, values, weights, adds, in_phases)
        with below_modes(), torch.no_grad():
            for out, total in zip(given, sums, strict=bool(given)):
                out.copy_(total)
    else:
        note_written(given)
        with torch.no_grad():
            sums = given or engine._new_sums(records)
            rows = [flat_rows(v, engine.config) for v in values]
            wait = engine._start_combine(records, rows, sums, weights, adds)
    active_ranks = engine.config.active_ranks

    def finish() -> list[torch.Tensor]:
        with below_modes():
            if wait is not None:
                wait()
            if given or not torch.is_grad_enabled():
                return given or sums
            _check_active_ranks(engine, active_ranks, "finish of a combine with gradients")
            return _differentiable(engine, values, routed, weights, adds, sums)

    return finish


def _differentiable(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    weights: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    done: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Return the sums with gradients. `done`: the sums, if they have been written."""
    records = tuple(r._record for r in routed)
    tokens = [r._tokens for r in routed if r._tokens is not None]
    again = [r._again for r in routed if r._again is not None]
    row_weights = [r.weights for r in routed]
    weighted = weights[0] is not None
    of_tokens = [w.detach() for w in weights if w is not None] if weighted else None
    return list(Combine.apply(engine, of_tokens, again, records, done, *values, *row_weights, *adds, *tokens))


def given_outs(outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the outputs that callers gave: one for each rank, or none.

    Raises:
        ArgumentError: only some ranks have one.
    """
    given = [out for out in outs if out is not None]
    if given and len(given) < len(outs):
        raise ArgumentError(f"out: {len(given)} of {len(outs)} given; allowed: one for each rank, or None")
    return given


def note_written(outs: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors are written in place, which kernels do not."""
    for out in outs:
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)


def _new_sums(engine: TokenEngine, records: Sequence[DispatchRecord]) -> list[torch.Tensor]:
    return ops.new_sums(engine, records) if torch.compiler.is_compiling() else engine._new_sums(records)


def _engine_of(ctx: Any) -> TokenEngine:
    """
    Raises:
        UnsupportedError: the active ranks have changed since forward, so that peers of the exchange would be others.
    """
    _check_active_ranks(ctx.engine, ctx.active_ranks, "backward")
    return ctx.engine


def _check_active_ranks(engine: TokenEngine, before: Sequence[int] | None, what: str) -> None:
    """
    Raises:
        UnsupportedError: they are others now.
    """
    if engine.config.active_ranks != before:
        raise UnsupportedError(f"{what} after set_active_ranks; allowed: before it, or of a dispatch since")


def _stand_in(config: DispatchConfig, weights: torch.Tensor) -> torch.Tensor:
    """Return [*weights.shape, H] without memory of its own for each element; its values are undefined."""
    return weights.new_empty(1, dtype=config.dtype).expand(*weights.shape, config.hidden)


class Dispatch(torch.autograd.Function):
    """(engine, config, done, *xs, *weights, *ids, *copies) to (*rows, *row_weights, received), in the shapes of
    RoutedTokens: `received` are the payloads and the record of each rank.

    `copies` are the weights that are sent. `done` is what the ranks have received already, or None. Rows and their
    weights are differentiable. Packed rows are not: `rows` stand for them in autograd, without memory. Backward keeps
    the records without weights, and nothing of [rows, H].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: TokenEngine, config: DispatchConfig, done: Sequence[Arrived] | None, *given: torch.Tensor
    ) -> tuple[Any, ...]:
        n = len(engine.transfers)
        xs, weights, ids, copies = (given[i : i + n] for i in range(0, 4 * n, n))
        received: Sequence[tuple[Any, DispatchRecord]] | None = done
        compiling = torch.compiler.is_compiling()
        if received is None:
            tokens = [Tokens(*item) for item in zip(xs, ids, copies, strict=True)]
            received = ops.dispatch(engine, tokens) if compiling else engine._run_dispatch(tokens)
        if not compiling:
            ctx.set_materialize_grads(False)
        records = [record for _, record in received]
        of_ranks = [
            _of_rank(config, transfer, rows, record)
            for transfer, (rows, record) in zip(engine.transfers, received, strict=True)
        ]
        rows, row_weights = [payloads[0] for payloads, _ in of_ranks], [weights for _, weights in of_ranks]
        ctx.save_for_backward(*[tensor for record in records for tensor in record.tensors()[1:]])
        ctx.engine, ctx.active_ranks = engine, engine.config.active_ranks
        ctx.dtypes = [w.dtype for w in weights]
        if config.packed is not None:
            rows = [_stand_in(config, w) for w in row_weights]
        data = tuple((payloads, record) for (payloads, _), record in zip(of_ranks, records, strict=True))
        return (*rows, *row_weights, data)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        engine = _engine_of(ctx)
        n = len(engine.transfers)
        saved = ctx.saved_tensors
        each = len(saved) // n
        parts = [saved[i : i + each] for i in range(0, n * each, each)]
        # Without the weights of rows, which are not read: another tensor takes their place.
        records = [DispatchRecord.of([part[0], *part]) for part in parts]
        given = gradients[:n], gradients[n : 2 * n]
        if torch.compiler.is_compiling():
            sums = ops.new_sums(engine, records)
            rows, row_weights = padded_gradients(engine.config, records, *given)
            weights = ops.dispatch_backward(engine, records, rows, row_weights, sums)
            weights = [w.to(dtype) for w, dtype in zip(weights, ctx.dtypes, strict=True)]
        else:
            sums, weights = operations.dispatch_backward(engine, records, *given, ctx.dtypes)
        return (None, None, None, *sums, *weights, *[None] * (2 * n))


class Combine(torch.autograd.Function):
    """(engine, weights, again, records, done, *values, *row_weights, *adds, *tokens) to each rank's sums.

    `weights` are those of the tokens, float32 [T, K] each, or None: not weighted. `row_weights` are the same weights on
    the ranks of the rows, as Dispatch returned them. Those get the gradient, and the backward of Dispatch
    returns it to the tokens with that of the rows, in one exchange. They also tie the two functions: on a rank whose
    experts return nothing that depends on the received rows, since it has none, say, the backward of Dispatch runs
    nevertheless, as its peers need. `done` are the sums, if they have been written, or None. Backward keeps the values
    if weighted, and the records. Adds may be None. `again` is empty, or has for each rank the rows that
    its experts' backward needs: then backward keeps `tokens` and dispatches them again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        engine: TokenEngine,
        weights: Sequence[torch.Tensor] | None,
        again: Sequence[RowsAgain],
        records: Sequence[DispatchRecord],
        done: Sequence[torch.Tensor] | None,
        *given: Any,
    ) -> tuple[torch.Tensor, ...]:
        n = len(engine.transfers)
        values, adds = given[:n], given[2 * n : 3 * n]
        sums, weighted = _new_sums(engine, records) if done is None else done, weights is not None
        compiling = torch.compiler.is_compiling()
        if done is None:
            rows = [flat_rows(v, engine.config) for v in values] if engine.config.batched else values
            run = ops.combine if compiling else TokenEngine._run_combine
            run(engine, records, rows, sums, weights or [None] * n, adds)
        if not compiling:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[3 * n :], *(values if weighted else []), *tensors_of(records))
        ctx.engine, ctx.weighted, ctx.added = engine, weighted, [a is not None for a in adds]
        ctx.active_ranks = engine.config.active_ranks
        ctx.number, ctx.again = len(given), [weakref.ref(a) for a in again]
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        engine = _engine_of(ctx)
        n, saved = len(engine.transfers), list(ctx.saved_tensors)
        tokens, saved = saved[: len(ctx.again)], saved[len(ctx.again) :]
        values, saved = (saved[:n], saved[n:]) if ctx.weighted else ([], saved)
        records = records_of(saved, n)
        if torch.compiler.is_compiling():
            of_values, of_weights = _combine_backward_compiled(engine, records, gradients, values)
        else:
            of_values, of_weights, rows = operations.combine_backward(engine, records, gradients, values, tokens)
            for kept, x in zip(ctx.again, rows, strict=True):
                again = kept()
                if again is not None:  # else no saved tensor needs the rows here; peers' may nevertheless
                    again.rows = x
        added = [g if was else None for g, was in zip(gradients, ctx.added, strict=True)]
        weights = of_weights if ctx.weighted else [None] * n
        return (None, None, None, None, None, *of_values, *weights, *added, *[None] * (ctx.number - 3 * n))


def _combine_backward_compiled(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    config = engine.config
    results = ops.combine_backward(engine, records, gradients, [flat_rows(v, config) for v in values])
    groups = [config.bounds[t.me + 1] - config.bounds[t.me] for t in engine.transfers]
    of_values, of_weights = (
        [by_group(x, number, config) for x, number in zip(part, groups, strict=bool(part))] for part in results
    )
    return of_values, of_weights
