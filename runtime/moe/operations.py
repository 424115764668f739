"""The operations of a TokenEngine on tensors as callers and autograd have them; under dispatch modes one operator each.

A mode sees an operator's inputs and results; the engine itself runs below all modes. An operator takes tensors only, so
records travel as `DispatchRecord.tensors()`. `ops` has the operators for `torch.compile`, which write into memory of
the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..executor.dispatch_modes import as_operator_on_lists, below_modes, operator_on_lists, under_modes
from .config import DispatchConfig, fill_value
from .dispatch_record import DispatchRecord, Tokens, empty_record
from .engine import Received, TokenEngine, in_memory
from .packed_rows import ScaleBlocks
from .transfer.base import TokenTransfer

Tensors = list[torch.Tensor]
Arrived = tuple[Tensors, DispatchRecord]
"""The payloads that a rank received, [rows, ...] each, and the record of the dispatch."""

_c10d: Any = torch.ops._c10d_functional
DISPATCH, COMBINE, DISPATCH_BACKWARD, COMBINE_BACKWARD = map(
    operator_on_lists, ("dispatch", "combine", "dispatch_backward", "combine_backward")
)


def seen_by_modes(
    operator: Any,
    engine: TokenEngine,
    run: Callable[[list[Any], bool], Tensors],
    fake: Callable[[list[Any]], Tensors],
    tensors: Sequence[torch.Tensor | None],
    like: tuple[torch.Size | tuple[int, ...], torch.dtype],
) -> Tensors:
    """`as_operator_on_lists`. Policies are applied to an all-to-all of the first tensor.

    Args:
        like: the shape and dtype of what the all-to-all returns.
    """
    ranks, (shape, dtype) = engine.config.ranks, like
    with below_modes():
        (tensors,) = in_memory(tensors)
        x = next(tensor for tensor in tensors if tensor is not None)
        stand_in = x.new_empty((1,) * len(shape), dtype=dtype).expand(shape)
    # Sizes that depend on values are not known here; these are equal ones, as torch has them by default.
    sizes = [len(x) // ranks] * ranks
    collective = _c10d.all_to_all_single.default, x, sizes, sizes, engine.group_name
    return as_operator_on_lists(operator, run, fake, tensors, collective, stand_in)


def dispatch(engine: TokenEngine, tokens: Sequence[Tokens], started: bool = False) -> list[Arrived]:
    """A dispatch as one operator. `started`: as `TokenEngine._start_dispatch`, to its end."""
    config, n = engine.config, len(tokens)

    def run(given: list[Any], saved: bool) -> Tensors:
        items = [Tokens(*given[i : i + 3]) for i in range(0, 3 * n, 3)]
        outs = engine._new_copies(items) if saved else None
        received = engine._start_dispatch(items, outs)() if started else engine._run_dispatch(items, outs)
        return flat(payloads_of(engine, config, received))

    def fake(given: list[Any]) -> Tensors:
        items = [Tokens(*given[i : i + 3]) for i in range(0, 3 * n, 3)]
        arrived: list[Arrived] = []
        for transfer, item, (rows, weights) in zip(engine.transfers, items, engine._new_received(items), strict=True):
            kind = transfer.in_chunks, transfer.two_level, transfer.deduped
            record = empty_record(config, transfer.me, len(item.x), weights, *kind)
            payloads = [rows]
            if config.packed is not None:
                payloads = config.packed.unpack(rows, None, None)
                shape = config.blocked_scales(transfer.me)
                if shape is not None:
                    payloads[1] = rows.new_empty(shape, dtype=torch.uint8).view(payloads[1].dtype)
            arrived.append((payloads, record))
        return flat(arrived)

    def flat(arrived: Sequence[Arrived]) -> Tensors:
        return [tensor for payloads, record in arrived for tensor in (*payloads, *record.tensors())]

    given, (elements, dtype) = [tensor for item in tokens for tensor in item], config.dispatched
    results = seen_by_modes(DISPATCH, engine, run, fake, given, ((config.rows, elements), dtype))
    each, payloads = len(results) // n, 1 if config.packed is None else len(config.packed.dtypes)
    parts = [results[i : i + each] for i in range(0, len(results), each)]
    return [(part[:payloads], DispatchRecord.of(part[payloads:])) for part in parts]


def combine(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    started: bool = False,
) -> Tensors:
    """A combine as one operator: the sums, [T, H]. `started`: as `TokenEngine._start_combine`, to its end."""
    config, n = engine.config, len(records)

    def run(given: list[Any], saved: bool) -> Tensors:
        of, values = records_of(given[3 * n :], n), [flat_rows(v, config) for v in given[:n]]
        sums = new_tensors(of, config.hidden, config.dtype) if saved else engine._new_sums(of)
        arguments = of, values, sums, given[n : 2 * n], given[2 * n : 3 * n]
        if started:
            engine._start_combine(*arguments)()
        else:
            engine._run_combine(*arguments)
        return sums

    def fake(given: list[Any]) -> Tensors:
        return new_tensors(records_of(given[3 * n :], n), config.hidden, config.dtype)

    given = [*values, *weights, *adds, *tensors_of(records)]
    like = (len(records[0].rows.key), config.hidden), config.dtype
    return seen_by_modes(COMBINE, engine, run, fake, given, like)


def dispatch_backward(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor | None],
    weight_gradients: Sequence[torch.Tensor | None],
    dtypes: Sequence[torch.dtype],
) -> tuple[Tensors, Tensors]:
    """Return the gradients of x, [T, H], and those of the weights, [T, K] of `dtypes`.

    Args:
        gradients, weight_gradients: of the received rows and their weights; None: zero.
    """
    config, n = engine.config, len(records)

    def run(given: list[Any], saved: bool) -> Tensors:
        of = records_of(given[2 * n :], n)
        rows, row_weights = padded_gradients(config, of, given[:n], given[n : 2 * n])
        sums = new_tensors(of, config.hidden, config.dtype) if saved else engine._new_sums(of)
        weights = engine._run_dispatch_backward(of, rows, row_weights, sums)
        return [*sums, *(w.to(dtype) for w, dtype in zip(weights, dtypes, strict=True))]

    def fake(given: list[Any]) -> Tensors:
        of = records_of(given[2 * n :], n)
        keys = zip(of, dtypes, strict=True)
        return [
            *new_tensors(of, config.hidden, config.dtype),
            *(record.rows.key.new_empty(record.rows.key.shape, dtype=dtype) for record, dtype in keys),
        ]

    given = [*gradients, *weight_gradients, *tensors_of(records)]
    if under_modes():
        like = (len(records[0].rows.key), config.hidden), config.dtype
        results = seen_by_modes(DISPATCH_BACKWARD, engine, run, fake, given, like)
    else:
        results = run(given, False)
    return results[:n], results[n:]


def combine_backward(
    engine: TokenEngine,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor],
) -> tuple[Tensors, Tensors, Tensors]:
    """Return the gradients of the values, [R, H] (batched [S_local, C, H]), those of the rows' weights, likewise
    without H, and the rows of `tokens`, which are dispatched again.

    Args:
        gradients: of the sums; None: zero.
        values: the combined values; empty: they were not weighted, and there are no gradients of weights.
        tokens: of each rank, [T, H], or empty.
    """
    config, n, weighted = engine.config, len(records), len(values)
    groups = [config.bounds[t.me + 1] - config.bounds[t.me] for t in engine.transfers]

    def run(given: list[Any], saved: bool) -> Tensors:
        of, given = records_of(given[n + weighted + len(tokens) :], n), given[: n + weighted + len(tokens)]
        # Without weights the backward of combine pushes rows as dispatch does.
        again = engine._run_combine_backward(of, given[n + weighted :], [])[0] if tokens else []
        sums = [
            r.weights.new_zeros(len(r.rows.key), config.hidden, dtype=config.dtype) if g is None else g
            for g, r in zip(given[:n], of, strict=True)
        ]
        combined = [flat_rows(v, config) for v in given[n : n + weighted]]
        outs, weight_outs = (new_rows(of), [torch.empty_like(r.weights) for r in of]) if saved else (None, None)
        rows, of_weights = engine._run_combine_backward(of, sums, combined, outs, weight_outs)
        return [*by_groups(rows), *by_groups(of_weights), *again]

    def fake(given: list[Any]) -> Tensors:
        of = records_of(given[n + weighted + len(tokens) :], n)
        of_weights = [torch.empty_like(r.weights) for r in of] if weighted else []
        return [*by_groups(new_rows(of)), *by_groups(of_weights), *(new_rows(of) if tokens else [])]

    def new_rows(of: Sequence[DispatchRecord]) -> Tensors:
        return [r.weights.new_empty(config.rows, config.hidden, dtype=config.dtype) for r in of]

    def by_groups(rows: Sequence[torch.Tensor]) -> Tensors:
        return [by_group(x, number, config) for x, number in zip(rows, groups, strict=bool(rows))]

    given = [*gradients, *values, *tokens, *tensors_of(records)]
    if under_modes():
        like = (config.rows, config.hidden), config.dtype
        results = seen_by_modes(COMBINE_BACKWARD, engine, run, fake, given, like)
    else:
        results = run(given, False)
    return results[:n], results[n : n + weighted], results[n + weighted :]


def payloads_of(engine: TokenEngine, config: DispatchConfig, received: Sequence[Received]) -> list[Arrived]:
    """Return the payloads of received rows in the place of the rows; `config`: that of the dispatch."""
    if config.packed is None:
        return [([rows], record) for rows, record in received]
    ranks = zip(engine.transfers, received, strict=True)
    return [(unpacked(config, transfer, rows, record), record) for transfer, (rows, record) in ranks]


def unpacked(
    config: DispatchConfig, transfer: TokenTransfer, rows: torch.Tensor, record: DispatchRecord
) -> list[torch.Tensor]:
    """Return the payloads of packed rows, [rows, ...] each."""
    assert config.packed is not None
    # Unused rows are copied where they have been filled.
    fill = fill_value(config.zero_rows)
    num_rows = None if torch.compiler.is_compiling() or fill is not None else record.groups.num_rows
    shape = config.blocked_scales(transfer.me)
    blocks = None if shape is None else ScaleBlocks(record.groups.offsets, shape, -1 if fill else 0)
    return config.packed.unpack(rows, num_rows, blocks, record.scale)


def padded_gradients(
    config: DispatchConfig,
    records: Sequence[DispatchRecord],
    gradients: Sequence[torch.Tensor | None],
    weight_gradients: Sequence[torch.Tensor | None],
) -> tuple[Tensors, Tensors]:
    """Return the gradients of the received rows, [rows, H], and of their weights, float32 [rows]; None: zero."""
    shape = config.rows, config.hidden
    rows, row_weights = (
        [
            r.matrix.new_zeros(size, dtype=dtype) if g is None else flat_rows(g, config)
            for g, r in zip(part, records, strict=True)
        ]
        for part, size, dtype in (
            (gradients, shape, config.dtype),
            (weight_gradients, shape[:1], torch.float32),
        )
    )
    return rows, row_weights


def by_group(rows: torch.Tensor, groups: int, config: DispatchConfig) -> torch.Tensor:
    """Return rows, [rows, ...], as they are, or batched as [S_local, C, ...]."""
    if not config.batched:
        return rows
    assert config.expert_capacity is not None
    return rows[: groups * config.expert_capacity].view(groups, config.expert_capacity, *rows.shape[1:])


def flat_rows(x: torch.Tensor, config: DispatchConfig) -> torch.Tensor:
    """Return what `by_group` returned, or its gradient, as [rows, ...]; a rank may have fewer physical experts than
    others."""
    if not config.batched:
        return x
    x = x.flatten(0, 1)
    more = config.rows - len(x)
    return x if more <= 0 else torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, more))


def new_tensors(records: Sequence[DispatchRecord], hidden: int, dtype: torch.dtype) -> Tensors:
    """Return ordinary memory for the tokens of each record, [T, hidden]."""
    return [r.weights.new_empty(len(r.rows.key), hidden, dtype=dtype) for r in records]


def tensors_of(records: Sequence[DispatchRecord]) -> Tensors:
    """Return the tensors of all records."""
    return [tensor for record in records for tensor in record.tensors()]


def records_of(tensors: Tensors, number: int) -> list[DispatchRecord]:
    """Return the records of `tensors_of`."""
    each = len(tensors) // number
    return [DispatchRecord.of(tensors[i : i + each]) for i in range(0, len(tensors), each)]
