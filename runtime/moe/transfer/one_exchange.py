"""OneExchangeTransfer: a rank on gloo whose dispatch is one exchange, of messages with counts, weights and rows.

A rank knows its own counts before those of its peers. If no pair can be dropped, these determine what it sends. An
all-to-all of small messages has room for any of them: an exchange of counts ahead of the rows would only cost its wait.
Larger rows follow the counts as those of SendRecvTransfer do, likewise combine and backward; results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ....kernels import CountedPairs, Groups, TokenRows, locate_rows, push_rows
from ...transports.backend_limits import BACKENDS
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord, Tokens
from .base import DISPATCH, Steps, copied
from .chunk_exchange import flat_bytes
from .sendrecv import SendRecvTransfer, chunk_sizes


class OneExchangeTransfer(SendRecvTransfer):
    """Ranks send rows before they know their peers' counts."""

    algorithm = "one chunk of exact size per pair of ranks, in one message with its counts and weights"

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        config = self.config
        at_once = self.collectives and self._chunks.takes_at_once(_largest_message(config))
        if record is not None or config.active_ranks is not None or not at_once:
            return (yield from super().dispatch(tokens, outs, record))
        counted = self._count(tokens.ids)
        sent, numbers, of_pairs = self._packed_pairs(tokens, counted)
        columns, own_counts = config.bounds[-1] + 1, counted.counts.tolist()
        number = [sum(own_counts[a:b]) for a, b in pairwise(config.bounds)]
        messages = {
            r: (flat_bytes(counted.counts), flat_bytes(of_weights), flat_bytes(x))
            for r, (of_weights, x) in enumerate(zip(numbers.split(number), sent.split(number), strict=True))
        }
        arrived = yield from self._chunks.bytes_of_others(self.fingerprint + DISPATCH, messages)
        matrix = torch.stack(
            [
                counted.counts if r == self.me else arrived[r][: columns * 4].view(torch.int32)
                for r in range(config.ranks)
            ]
        )
        own = rows, row_weights = self._rows_to_receive(), self._new_numbers()
        groups = self._grouped(matrix, self.physical_experts)
        sizes, in_order, _ = self._laid_out(matrix, groups)
        chunks = self._chunks_of(sizes, in_order)
        self._fill_unused(groups, *(outs or own))
        _, receives, padded, _ = chunk_sizes(chunks)
        *by_source, padding = in_order[: sum(receives) + padded].split([*receives, padded])
        for r, (at, n) in enumerate(zip(by_source, receives, strict=True)):
            if not n:
                continue
            _, of_weights, x = messages[r] if r == self.me else _parts(arrived[r], columns, n, config.dispatched_nbytes)
            rows.index_copy_(0, at, x.view(rows.dtype).view(n, -1))
            row_weights.index_copy_(0, at, of_weights.view(torch.float32))
        if padded:
            for buffer in own:
                buffer.index_fill_(0, padding, 0)
        record = DispatchRecord((outs or own)[1], groups, of_pairs, matrix, chunks)
        return copied(own, outs, groups)[0], record

    def _packed_pairs(self, tokens: Tokens, counted: CountedPairs) -> tuple[torch.Tensor, torch.Tensor, TokenRows]:
        """Return the rows and weights of all pairs by physical expert, token and k, and where each pair has its own."""
        limit = counted.counts[:-1]
        ends = limit.cumsum(0)
        number = int(limit.sum())
        sent, numbers = self._empty((number, tokens.x.shape[1]), tokens.x.dtype), self._empty((number,), torch.float32)
        none = limit[:0]  # not read where no rows are padded
        groups = Groups((ends - limit).int(), limit, none, none, none, none, none)
        of_pairs = locate_rows(counted.physical_expert, counted.place, groups, self.physical_experts)
        rows, of_weights = self._as_destinations((sent, numbers))
        launch = self._launch_of(tokens.x)
        push_rows(tokens.x, of_pairs, rows, groups, self.me, tokens.weights, of_weights, 0, launch)
        return sent, numbers, of_pairs


def goes_at_once(config: DispatchConfig) -> bool:
    """Whether a rank may send rows before it knows its peers' counts, in one all-to-all of gloo."""
    return config.has_room_for_all and _largest_message(config) <= BACKENDS["gloo"].all_to_all


def _largest_message(config: DispatchConfig) -> int:
    """Return the most bytes of counts, weights and rows from one rank to another."""
    return (config.bounds[-1] + 1) * 4 + config.most_pairs * (4 + config.dispatched_nbytes)


def _parts(message: torch.Tensor, columns: int, number: int, row_nbytes: int) -> tuple[torch.Tensor, ...]:
    """Return the counts, weights and rows that a message begins with, uint8 [bytes] each."""
    return message[: columns * 4 + number * (4 + row_nbytes)].split([columns * 4, number * 4, number * row_nbytes])
