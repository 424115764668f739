"""Dispatch and combine with gradients, over the ranks that this process has: one, or all virtual ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError, UnsupportedError
from . import ops
from .config import DispatchConfig, fill_value
from .dispatch_record import DispatchRecord, Tokens
from .engine import Received, TokenEngine
from .packed_rows import ScaleBlocks
from .redispatch import RowsAgain
from .routed import RoutedTokens


def dispatch_tokens(engine: TokenEngine, tokens: Sequence[Tokens]) -> list[RoutedTokens]:
    """TokenDispatcher.dispatch of all ranks in this process."""
    if engine.config.save == "redispatch" and torch.compiler.is_compiling():
        raise UnsupportedError('save="redispatch" under torch.compile; allowed: "buffer", "copy"')
    return routed_tokens(engine, engine.config, [t._replace(weights=copied_weights(t.weights)) for t in tokens])


def copied_weights(weights: torch.Tensor) -> torch.Tensor:
    """Return float32 weights in memory of their own: combine reads them when the caller may have written others. They
    require gradients where `weights` do, also without gradients enabled, so that a combine with gradients is refused.
    """
    if weights.requires_grad and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        with torch.enable_grad():
            return copied_weights(weights)
    return weights.clone() if weights.dtype is torch.float32 else weights.float()


def routed_tokens(
    engine: TokenEngine, config: DispatchConfig, tokens: Sequence[Tokens], done: Sequence[Received] | None = None
) -> list[RoutedTokens]:
    """Dispatch tokens with float32 weights. `done`: what the ranks received, if that has been done, with `config`."""
    n, again = len(tokens), config.save == "redispatch"
    if done is not None:
        _check_active_ranks(engine, config.active_ranks, "finish of a dispatch")
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        xs, ids, weights = zip(*tokens, strict=True)
        *received, records, data = Dispatch.apply(engine, done, *xs, *weights, *ids)
        differentiable = zip(received[:n], received[n:], records, strict=True)
        pairs: Sequence[Received] = [(x, record._replace(weights=numbers)) for x, numbers, record in differentiable]
    else:  # without the host time of autograd
        pairs = engine._run_dispatch(tokens) if done is None else done
        data = None
    routed = []
    for i, (transfer, item, (x, record)) in enumerate(zip(engine.transfers, tokens, pairs, strict=True)):
        row_weights = record.weights
        payloads, grad_rows = [x], None
        if config.packed is not None:
            # Unused rows are copied where they have been filled.
            fill = fill_value(config.zero_rows)
            num_rows = None if torch.compiler.is_compiling() or fill is not None else record.groups.num_rows
            shape = config.blocked_scales(transfer.me)
            blocks = None if shape is None else ScaleBlocks(record.groups.offsets, shape, -1 if fill else 0)
            payloads = config.packed.unpack(x if data is None else data[i], num_rows, blocks, record.scale)
            grad_rows = None if data is None else x
        if config.batched:
            groups = config.bounds[transfer.me + 1] - config.bounds[transfer.me]
            payloads = [
                _by_group(payload, groups, config)
                if n != 1 or config.scale_layout is None
                else payload.view(groups, payload.numel() // max(groups, 1))
                for n, payload in enumerate(payloads)
            ]
            row_weights = _by_group(row_weights, groups, config)
            grad_rows = None if grad_rows is None else _by_group(grad_rows, groups, config)
        x, *others = payloads
        kept, rows_again = (item.x.detach(), RowsAgain(x, item.x)) if again else (None, None)
        source = engine.handle, transfer.me
        routed.append(
            RoutedTokens(
                x, row_weights, item.weights, record, config, source, kept, rows_again, tuple(others), grad_rows
            )
        )
    return routed


def combine_tokens(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    outs: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    weighted: bool,
) -> list[torch.Tensor]:
    """TokenDispatcher.combine of all ranks in this process."""
    if engine.config.batched:
        values = [_padded(v.reshape(-1, engine.config.hidden), engine.config.rows) for v in values]
    weights = [r.topk_weights if weighted else None for r in routed]
    records = tuple(r._record for r in routed)
    given = given_outs(outs)
    if given:
        with torch.no_grad():
            _combine(engine, records, values, given, weights, adds)
        if not torch.compiler.is_compiling():
            note_written(given)
        return given
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        sums = engine._new_sums(records)
        engine._run_combine(records, values, sums, weights, adds)
        return sums
    return _differentiable(engine, values, routed, weights, adds, None)


def start_combine(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    outs: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    weighted: bool,
) -> Callable[[], list[torch.Tensor]]:
    """TokenDispatcher.combine_start of all ranks in this process; return a function that waits for the sums."""
    if engine.config.batched:
        values = [_padded(v.reshape(-1, engine.config.hidden), engine.config.rows) for v in values]
    weights = [r.topk_weights if weighted else None for r in routed]
    records = tuple(r._record for r in routed)
    given = given_outs(outs)
    note_written(given)
    with torch.no_grad():
        sums = given or engine._new_sums(records)
        wait = engine._start_combine(records, values, sums, weights, adds)
    active_ranks = engine.config.active_ranks

    def finish() -> list[torch.Tensor]:
        wait()
        if given or not torch.is_grad_enabled():
            return sums
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
    row_weights = [record.weights for record in records]
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


def _by_group(rows: torch.Tensor, groups: int, config: DispatchConfig) -> torch.Tensor:
    """Return batched rows, [rows, ...], as [S_local, C, ...]."""
    assert config.expert_capacity is not None
    return rows[: groups * config.expert_capacity].view(groups, config.expert_capacity, *rows.shape[1:])


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `values` with at least `rows` rows; a rank may have fewer physical experts than others."""
    return values if len(values) >= rows else torch.nn.functional.pad(values, (0, 0, 0, rows - len(values)))


def _combine(engine: TokenEngine, *given: Any) -> None:
    if torch.compiler.is_compiling():
        ops.combine(engine, *given)
    else:
        engine._run_combine(*given)


def _new_sums(engine: TokenEngine, records: Sequence[DispatchRecord]) -> list[torch.Tensor]:
    return ops.new_sums(engine, records) if torch.compiler.is_compiling() else engine._new_sums(records)


def _saved(ctx: Any, records: Sequence[DispatchRecord]) -> list[torch.Tensor]:
    """Return the tensors of the records but for the weights, for `save_for_backward`, which frees them after
    backward."""
    ctx.num_records = len(records)
    return [tensor for record in records for tensor in record.tensors()[1:]]


def _restored(
    ctx: Any, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None
) -> list[DispatchRecord]:
    """Return the records of `_saved`; without weights, `DispatchRecord.weights` must not be read."""
    each = len(tensors) // ctx.num_records
    parts = [tensors[i : i + each] for i in range(0, len(tensors), each)]
    given = [part[0] for part in parts] if weights is None else weights
    return [DispatchRecord.of([w, *part]) for w, part in zip(given, parts, strict=True)]


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


def _stand_in(config: DispatchConfig, rows: torch.Tensor) -> torch.Tensor:
    """Return [rows, H] without memory of its own for each element; its values are undefined."""
    return rows.new_empty(1, dtype=config.dtype).expand(config.rows, config.hidden)


class Dispatch(torch.autograd.Function):
    """(engine, done, *xs, *weights, *ids) to (*rows, *row_weights, records, data).

    `done` is what the ranks have received already, or None. Rows and their weights are differentiable. Packed rows are
    not: they are `data`, and `rows` stand for them in autograd, without memory. Backward keeps the records without
    weights, and nothing of [rows, H].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: TokenEngine, done: Sequence[Received] | None, *given: torch.Tensor
    ) -> tuple[Any, ...]:
        n = len(engine.transfers)
        tokens = [Tokens(x, i, w) for x, w, i in zip(given[:n], given[n : 2 * n], given[2 * n :], strict=True)]
        if torch.compiler.is_compiling():
            received: Sequence[Received] = ops.dispatch(engine, tokens)
        else:
            received = engine._run_dispatch(tokens) if done is None else done
            ctx.set_materialize_grads(False)
        records = tuple(record for _, record in received)
        ctx.save_for_backward(*_saved(ctx, records))
        ctx.engine, ctx.active_ranks = engine, engine.config.active_ranks
        rows: list[torch.Tensor] = [rows for rows, _ in received]
        data: tuple[torch.Tensor, ...] = ()
        if engine.config.packed is not None:
            rows, data = [_stand_in(engine.config, of_rank) for of_rank in rows], tuple(rows)
        return (*rows, *[record.weights for record in records], records, data)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        engine = _engine_of(ctx)
        config, n, records = engine.config, len(engine.transfers), _restored(ctx, ctx.saved_tensors)
        shape, device = (config.rows, config.hidden), records[0].matrix.device
        rows, row_weights = (
            [torch.zeros(size, dtype=dtype, device=device) if g is None else g for g in part]
            for part, size, dtype in (
                (gradients[:n], shape, config.dtype),
                (gradients[n : 2 * n], shape[:1], torch.float32),
            )
        )
        sums = _new_sums(engine, records)
        if torch.compiler.is_compiling():
            weights = ops.dispatch_backward(engine, records, rows, row_weights, sums)
        else:
            weights = engine._run_dispatch_backward(records, rows, row_weights, sums)
        return (None, None, *sums, *weights, *[None] * n)


class Combine(torch.autograd.Function):
    """(engine, weights, again, records, done, *values, *row_weights, *adds, *tokens) to each rank's sums.

    `weights` are those of the tokens, float32 [T, K] each, or None: not weighted. `row_weights` are the same weights on
    the ranks of the rows, as Dispatch returned them. Those get the gradient, [rows], and the backward of Dispatch
    returns it to the tokens with that of the rows, in one exchange. They also tie the two functions: on a rank whose
    experts return nothing that depends on the received rows, since it has none, say, the backward of Dispatch runs
    nevertheless, as its peers need. `done` are the sums, if they have been written, or None. Backward keeps the values
    if weighted, the row weights and the records. Adds may be None. `again` is empty, or has for each rank the rows that
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
        values, row_weights, adds = [list(given[i * n : i * n + n]) for i in range(3)]
        sums, weighted = _new_sums(engine, records) if done is None else done, weights is not None
        if done is None:
            _combine(engine, records, values, sums, weights or [None] * n, adds)
        ctx.save_for_backward(*given[3 * n :], *(values if weighted else []), *row_weights, *_saved(ctx, records))
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
        records = _restored(ctx, saved[n:], saved[:n])
        if tokens:
            # Without weights the backward of combine pushes rows as dispatch does.
            rows, _ = engine._run_combine_backward(records, tokens, [])
            for kept, x in zip(ctx.again, rows, strict=True):
                again = kept()
                if again is not None:  # else no saved tensor needs the rows here; peers' may nevertheless
                    again.rows = x
        if torch.compiler.is_compiling():
            of_values, of_weights = ops.combine_backward(engine, records, gradients, values)
        else:
            of_values, of_weights = engine._run_combine_backward(records, gradients, values)
        added = [g if was else None for g, was in zip(gradients, ctx.added, strict=True)]
        weights = of_weights if ctx.weighted else [None] * n
        return (None, None, None, None, None, *of_values, *weights, *added, *[None] * (ctx.number - 3 * n))
