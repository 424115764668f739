"""OneExchangeTransfer: a rank on gloo whose dispatch is one exchange, of messages with counts, weights and rows.

A rank knows its own counts before those of its peers. If no pair can be dropped, these determine what it sends, and
receivers take messages of any size up to a bound: an exchange of counts ahead of the rows would only cost its wait.
Combine and backward, whose sizes are known by then, are those of SendRecvTransfer, and so are all results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....kernels import CountedPairs, Groups, TokenRows, locate_rows, push_rows
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord, Tokens
from .base import DISPATCH, Steps, copied
from .chunk_exchange import flat_bytes
from .sendrecv import SendRecvTransfer, chunk_sizes

_LARGEST = 16 << 20
"""Bytes of a message. Beyond, the exchange of counts is short beside that of the rows, and bounds would take memory."""


class OneExchangeTransfer(SendRecvTransfer):
    """Ranks send rows before they know their peers' counts."""

    algorithm = "one chunk of exact size per pair of ranks, in one message with its counts and weights"

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        config = self.config
        if record is not None or config.active_ranks is not None:
            return (yield from super().dispatch(tokens, outs, record))
        counted = self._count(tokens.ids)
        sent, numbers, of_pairs = self._packed_pairs(tokens, counted)
        sizes = counted.counts[:-1].tolist()
        number = [sum(sizes[a:b]) for a, b in zip(config.bounds, config.bounds[1:], strict=False)]
        heads = [flat_bytes(torch.cat((counted.counts, x.view(torch.int32)))) for x in numbers.split(number)]
        nothing = torch.zeros(1, dtype=torch.uint8, device=self.device)  # a message is never empty
        bodies = [flat_bytes(x) if len(x) else nothing for x in sent.split(number)]
        arrived = yield from self._chunks.run_bounded(
            self.fingerprint + DISPATCH, list(zip(heads, bodies, strict=True)), message_bounds(config),
            self._head_nbytes, lambda nbytes: self._empty((nbytes,), torch.uint8), self.collectives,
        )  # fmt: skip
        columns = len(counted.counts)
        words = [head.view(torch.int32) for head, _ in arrived]
        matrix = torch.stack([of_rank[:columns] for of_rank in words])
        own = self._rows_to_receive(), self._new_numbers()
        record = self._located(counted, matrix, (outs or own)[1], of_pairs)
        self._fill_unused(record.groups, *(outs or own))
        assert record.chunks is not None
        _, receives, padded, _ = chunk_sizes(record.chunks)
        *places, padding = record.chunks.places[: sum(receives) + padded].split([*receives, padded])
        nbytes = config.dispatched_nbytes
        for at, n, (_, body), of_rank in zip(places, receives, arrived, words, strict=True):
            if n:
                own[0].index_copy_(0, at, body[: n * nbytes].view(own[0].dtype).view(n, -1))
                own[1].index_copy_(0, at, of_rank[columns:].view(torch.float32))
        if padded:
            for buffer in own:
                buffer.index_fill_(0, padding, 0)
        return copied(own, outs, record.groups)[0], record

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

    def _head_nbytes(self, message: torch.Tensor) -> int:
        """Return the bytes of the counts and weights that a message to this rank begins with."""
        low, high = self.config.bounds[self.me : self.me + 2]
        counts = message[: (self.config.bounds[-1] + 1) * 4].view(torch.int32)
        return (len(counts) + int(counts[low:high].sum())) * 4


def goes_at_once(config: DispatchConfig) -> bool:
    """Whether a rank may send rows before it knows its peers' counts."""
    return config.has_room_for_all and sum(message_bounds(config)) <= _LARGEST


def message_bounds(config: DispatchConfig) -> tuple[int, int]:
    """Return the most bytes of counts and weights, and of rows, from one rank to another."""
    counts = config.bounds[-1] + 1
    return (counts + config.most_pairs) * 4, max(config.most_pairs * config.dispatched_nbytes, 1)
