"""DedupedTransfer: a rank in windows; a token crosses once for each rank that has any of its experts, as one row.

A dispatch copies its tokens to its window and writes to each rank which rows of its buffer they have there. After the
barrier every rank fetches each token with such rows once, and stores it in all of them. Combine goes the other way: the
experts' rank sums a token's rows, in order of k, and writes one sum to the window of the token's rank, which adds up
the sums of all ranks: the steps of the order of sums that `combine_rows` has as well, so that results are the same
bits. The host neither waits for peers nor reads device values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ....errors import UnsupportedError
from ....kernels import (
    Buffers,
    CountedPairs,
    OwnRows,
    QuantizedRows,
    RowTables,
    TokenRows,
    combine_rows,
    offer_tokens,
    push_sums,
    receive_rows,
    spread_rows,
)
from ....planner import MachineFigures, price_dedupe
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord, Tokens, empty_deduped
from .base import DISPATCH, ROUTING, Delivery, Shared, Steps, TokenTransfer
from .window import _LAST, WindowTransfer


class DedupedTransfer(WindowTransfer):
    """Peers read this rank's tokens in its window, and write sums into it."""

    deduped = True
    quantizes_rows = False  # several ranks fetch a token, which is quantized once before
    algorithm = "tokens fetched once by each rank that has experts of them, and copied there to their rows"

    @classmethod
    def parts(cls, config: DispatchConfig) -> tuple[int, ...]:
        """Return the bytes of counts, of the gradients of weights, of the tables of rows and of weights, and of tokens
        or sums."""
        counts, numbers, _ = super().parts(config)
        of_sum = config.hidden * config.dtype.itemsize
        rows = config.max_tokens * max(config.dispatched_nbytes, config.ranks * of_sum)
        return counts, numbers, _table_nbytes(config), _table_nbytes(config), rows

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        purposes = super().nbytes(config, chunk_capacity)
        purposes[ROUTING] += 2 * _table_nbytes(config) + 4 * config.most_pairs
        return purposes

    def _set_row_buffers(self, *parts: Mapping[int, torch.Tensor]) -> None:
        rows, weights, data = parts
        c = self.config
        table = c.ranks * c.max_tokens, c.top_k
        self._tables = RowTables(
            self._buffers([rows], table, torch.int32), self._buffers([weights], table, torch.float32)
        )
        elements, dtype = c.dispatched
        self._tokens = self._buffers([data], (c.max_tokens, elements), dtype)
        self._gradients = self._buffers([data], (c.max_tokens, c.hidden), c.dtype)
        # The sums of rank r for rank s are the r-th part of the data of s.
        shape = c.max_tokens, c.hidden
        each = c.max_tokens * c.hidden * c.dtype.itemsize
        of_each = [{s: part[r * each : (r + 1) * each] for s, part in data.items()} for r in range(c.ranks)]
        self._sums_for = self._buffers(of_each[self.me : self.me + 1], shape, c.dtype)
        self._sums = Buffers([part[self.ranks[self.me]].view(c.dtype).view(shape) for part in of_each], self.tables)
        self._sums.table()

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:  # its own is kept for backward
            record = record._replace(deduped=empty_deduped(self.config, record.rows.key))
        return (yield from super().dispatch(tokens, outs, record))

    def _located(self, counted: CountedPairs, matrix: torch.Tensor, weights: torch.Tensor) -> DispatchRecord:
        record = super()._located(counted, matrix, weights)
        return record._replace(deduped=empty_deduped(self.config, record.rows.key))

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        yield from ()  # a generator, as in all transfers
        if ids is None:
            self._acquire()
            return Shared(own)
        return Shared(own, self._share_counts(operation, ids, self._candidate(None)), self._matrices.tensors[self.me])

    def _candidate(self, number: int | None) -> int:
        return 0  # no rank writes into another's buffers

    def _output(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        return TokenTransfer._output(self, values, record)  # which are summed here, and not offered

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        yield from ()
        operation, record, x, own, weights, take = delivery
        deduped, groups = record.deduped, record.groups
        assert deduped is not None
        barrier, launch = self._barrier(operation + _LAST), self._launch_of(x)
        tokens = self._tokens if operation == DISPATCH else self._gradients
        kept, padding = OwnRows(deduped.row, deduped.weight), self.config.most_padding
        given = None
        if weights is None:
            offer_tokens(x, tokens.tensors[self.me], launch=launch, barrier=barrier)
        else:
            given = own[1], own[1]
            offer_tokens(
                x, tokens.tensors[self.me], record.rows, weights, self._tables, deduped.once, self.me, launch, barrier
            )  # fmt: skip
        if barrier is None:
            self._signal("barrier", operation + _LAST)
        if weights is None:
            spread_rows(tokens, kept, own[0], groups, padding, launch=launch)
        else:
            table = OwnRows(self._tables.row.tensors[self.me], self._tables.weight.tensors[self.me])
            spread_rows(tokens, table, own[0], groups, padding, kept, own[1], self._error, launch)
        if take is not None:
            take(own[0])
        columns = self._columns(operation, own, groups)
        receive_rows(None, own[0], groups.num_rows, self._unused_rows, given, self._signals, columns)
        if self._signals is None:
            self._leave(own)
        else:
            self._windows.check()

    def _sum(
        self,
        operation: int,
        record: DispatchRecord,
        given: Sequence[torch.Tensor],
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        quantized: QuantizedRows | None = None,
    ) -> Steps[list[torch.Tensor]]:
        of_pairs = []
        for numbers in given[1:]:
            of_pairs.append((yield from self._fetch_numbers(record, numbers)))
        deduped, barrier = record.deduped, self._barrier(operation)
        assert deduped is not None
        self._acquire()
        of_rows = None if weights is None else deduped.weight
        push_sums(given[0].contiguous(), deduped.row, of_rows, self._sums_for, quantized, self.launch, barrier)
        if barrier is None:
            self._signal("barrier", operation)
        once = TokenRows(record.rows.key, deduped.once)
        combine_rows(once, self._sums, out, None, add, self.launch, self._signals)
        if self._signals is None:
            self._leave([out])
        else:
            self._windows.check()
        return of_pairs


def _table_nbytes(config: DispatchConfig) -> int:
    return config.ranks * config.max_tokens * config.top_k * 4


def with_dedupe(
    config: DispatchConfig, device: torch.device, in_windows: bool, figures: Callable[[], MachineFigures]
) -> tuple[DispatchConfig, str]:
    """Return the config with `dedupe` set, and why; equal on all ranks.

    Args:
        in_windows: whether ranks read each other's memory and synchronise on the device.
        figures: returns those of the ranks' machine, equal on all. Called if they share NVLink or the like.

    Raises:
        UnsupportedError: dedupe=True, and the transport does not support it.
    """
    if not in_windows:
        obstacle = "only transport='symmetric_memory' on one node has it"
        if config.dedupe:
            raise UnsupportedError(f"dedupe: True, but {obstacle}; allowed: False, None")
        return replace(config, dedupe=False), _text(False, obstacle)
    if device.type == "cpu":
        why = "requested" if config.dedupe is not None else "ranks share the memory in which a row is copied"
        return replace(config, dedupe=bool(config.dedupe)), _text(bool(config.dedupe), why)
    found = figures()  # also if they are not needed, since peers that need them may wait for this rank's
    if config.dedupe is not None:
        return config, _text(config.dedupe, "requested")
    experts = config.experts_per_rank
    prices = price_dedupe(
        experts, config.max_tokens, config.top_k, config.dispatched_nbytes, config.combined_nbytes,
        config.hidden * config.dtype.itemsize, config.pooled_buffers if config.save != "copy" else 0, found.topology(),
    )  # fmt: skip
    why = (
        f"the cheaper by {found.device_source}: {prices.once:.0f} us and {prices.once_bytes:,.0f} bytes from a rank to "
        f"others for a dispatch and a combine once per rank, {prices.each:.0f} us and {prices.each_bytes:,.0f} once "
        "per expert, with even routing"
    )
    return replace(config, dedupe=prices.once_is_cheaper), _text(prices.once_is_cheaper, why)


def _text(dedupe: bool, why: str) -> str:
    return f"a token crosses once for each {'rank' if dedupe else 'expert'} inside a node: {why}"
