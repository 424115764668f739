"""TwoLevelSendRecvTransfer: two levels on a two-sided transport; inside a node rows travel in chunks of exact size.

A rank sends its counts to every other rank, with the number of tokens that it will send to their node. From these the
device lays out all chunks inside its node: those of a rank for another one hold the rows of its own tokens, then those
of the tokens that it forwards, by source; each in order of physical expert, token and k. The host reads the sizes of
all messages once per dispatch, and nothing else waits for the device.

The number of tokens is sent before anyone knows which rows are dropped. So a token is sent to a node that has experts
of it even if all of its rows there are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ....kernels import Buffers, CountedPairs, locate_rows
from ..config import DispatchConfig
from ..dispatch_record import Chunks, DispatchRecord, Tokens, chunk_sizes
from .base import DISPATCH, Delivery, Steps, copied
from .chunk_exchange import Rows
from .sendrecv import SendRecvTransfer, on_host
from .two_level import COUNTS, Sent
from .two_level_counts import CountsOfAll, Forwarding


class _Counts(NamedTuple):
    """What a rank knows of a dispatch before it has routed its tokens."""

    pairs: CountedPairs
    matrix: torch.Tensor
    """int32 [W, S + 1]: all ranks' counts."""
    by_node: torch.Tensor
    """bool [nodes - 1, T]: which tokens have a pair on each other node."""
    numbers: torch.Tensor
    """As of `Forwarding`."""


class TwoLevelSendRecvTransfer(CountsOfAll, SendRecvTransfer):
    """Ranks of a node send and receive chunks of exact size."""

    algorithm = (
        "each token once per node that has experts of it, and one sum back; inside a node one chunk of exact size per "
        "pair of ranks; the host reads the sizes once per dispatch"
    )

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        purposes = super().nbytes(config, chunk_capacity)
        # Chunks have the rows of forwarded tokens, too.
        (chunks,) = [purpose for purpose in purposes if purpose.startswith("chunks")]
        row = max(config.hidden * config.dtype.itemsize, config.dispatched_nbytes, config.combined_nbytes)
        ranks = config.node_ranks
        assert ranks is not None
        if chunk_capacity is not None:
            sent = [len(ranks.members[node]) * (1 + len(ranks.sources(r))) for r, node in enumerate(ranks.nodes)]
            return {**purposes, chunks: (max(sent) + config.ranks) * chunk_capacity * row}
        forwarded = ranks.most_forwarded(config.max_tokens, None)
        return {**purposes, chunks: purposes[chunks] + forwarded * config.top_k * row}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = self.config.node_ranks
        assert ranks is not None
        self._at = self.me
        # Who brings the rows of each rank to this node's ranks: itself, or the one that forwards them.
        bringer = [ranks.forwarder(r, self._node) if n != self._node else r for r, n in enumerate(ranks.nodes)]
        order = [r for member in self._members for r in (member, *ranks.sources(member))]
        with torch.inference_mode(False):
            self._set_inside(self.physical_experts)
            self._bringer, self._arrival_order = self._uploaded(bringer), self._uploaded(order)
            self._destination, self._node_of_rank = self._uploaded(self._rank_of_expert), self._uploaded(ranks.nodes)
            self._forwarder = self._uploaded(self._forwarders)

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:
            return (yield from super().dispatch(tokens, outs, record))
        own = (self._rows_to_receive(), self._new_numbers())
        record, sent, receives, forwarding = yield from self._routed(tokens, (outs or own)[1])
        self._fill_unused(record.groups, *(outs or own))
        delivery = Delivery(DISPATCH, record, tokens.x, own, tokens.weights)
        assert record.chunks is not None
        packed = self._new_chunks(delivery, sum(chunk_sizes(record.chunks)[0]))
        locate = partial(self._locate, forwarding=forwarding, record=record)
        record = yield from self._send(tokens, record, sent, receives, self._as_destinations(packed), locate)
        yield from self._bring(delivery, packed)
        return copied(own, outs, record.groups)[0], record

    def _routed(
        self, tokens: Tokens, row_weights: torch.Tensor
    ) -> Steps[tuple[DispatchRecord, Sent, torch.Tensor, Forwarding]]:
        """Return the record without `forwards`, what this rank sends to other nodes, `Forwards.receives`, and where the
        forwarded rows lie in the chunks."""
        return self._route(tokens, (yield from self._share_counts(tokens.ids)), row_weights)

    def _share_counts(self, ids: torch.Tensor) -> Steps[_Counts]:
        """Count the pairs of `ids`, and exchange the counts."""
        counted = self._count(ids)
        by_node = self._tokens_by_node(counted.physical_expert, counted.physical_expert >= 0)
        ranks, width = self.config.ranks, self.physical_experts.count + 1
        numbers = torch.zeros(self._node_count, dtype=torch.int64, device=self.device)
        numbers.index_copy_(0, self._others, by_node.sum(1))
        sent = self._empty((ranks, width + 1), torch.int32)
        sent[:, :width] = counted.counts
        sent[:, width] = numbers[self._node_of_rank]
        received = yield from self._exchange_counts(sent)
        return _Counts(counted, received[:, :width].contiguous(), by_node, received[self._brought[1:], width].long())

    def _exchange_counts(self, sent: torch.Tensor) -> Steps[torch.Tensor]:
        """Send row r, int32, to each rank r of all nodes, and return what each sends to this one, alike."""
        ones, received = [1] * self.config.ranks, self._empty(tuple(sent.shape), torch.int32)
        rows, fingerprint = Rows(sent, ones, received, ones), self.fingerprint + DISPATCH + COUNTS
        yield from self._chunks.run(fingerprint, [rows])
        return received

    def _route(
        self, tokens: Tokens, shared: _Counts, row_weights: torch.Tensor
    ) -> tuple[DispatchRecord, Sent, torch.Tensor, Forwarding]:
        """Return the same as `_routed`."""
        counted, matrix, by_node, numbers = shared
        expert, place = counted.physical_expert, counted.place
        c = self.config
        groups = self._grouped(matrix, self.physical_experts)
        kept = self._kept(matrix)
        sends, start = self._chunk_rows(kept)
        received, padding, places = self._arrivals(matrix, groups, self._arrival_order)
        receives = torch.zeros_like(received).index_add_(0, self._bringer, received)
        start_of_own = groups._replace(start=start[0].int(), limit=kept[0].int())
        rows = locate_rows(expert, place, start_of_own, self.physical_experts)
        tokens_to = torch.zeros_like(received).index_copy_(0, self._forwarder, by_node.sum(1))
        tokens_from = torch.zeros_like(received).index_copy_(0, self._brought[1:], numbers)
        numbers_of_all = torch.cat((sends, receives, padding, tokens_to, tokens_from, matrix[:, -1]))
        of_host = self._read(numbers_of_all).split((2 * c.ranks + 1, c.ranks, c.ranks, c.ranks))
        sizes, host_sends, host_receives, bad_ids = of_host
        self._check_refused(on_host(bad_ids))
        chunks = Chunks(sizes, places)
        # Of known size, so that the host need not wait for it.
        which, token = torch.nonzero_static(by_node, size=_total(host_sends)).unbind(1)
        has_row = (expert >= 0) & (place < groups.limit[expert.clamp(min=0).long()])
        sent = Sent(token.contiguous(), self._pairs_of(tokens, self._others[which], token, expert, has_row), host_sends)
        record = DispatchRecord(row_weights, groups, rows, matrix, chunks)
        return record, sent, host_receives, Forwarding(numbers, start[1:], kept[1:])

    def _chunk_rows(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the chunk for each destination, int64 [W], and the first row of each source's pairs of
        each physical expert in all chunks of this rank.

        Args:
            kept: int64 [1 + sources, S], of this rank and its sources: the pairs of each physical expert.
        """
        before = kept.cumsum(1)
        at_bounds = torch.nn.functional.pad(before, (1, 0))[:, self._bounds]
        by_rank = at_bounds.diff()  # [1 + sources, W]
        sends = by_rank.sum(0)
        begin = sends.cumsum(0) - sends + by_rank.cumsum(0) - by_rank - at_bounds[:, :-1]
        return sends, before - kept + begin[:, self._destination]

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        assert delivery.record.chunks is not None
        packed = self._new_chunks(delivery, sum(chunk_sizes(delivery.record.chunks)[0]))
        yield from super()._deliver(delivery._replace(into=self._as_destinations(packed), take=None))
        yield from self._bring(delivery, packed)

    def _opened(
        self, operation: int, given: Sequence[torch.Tensor], record: DispatchRecord
    ) -> Steps[Sequence[Buffers]]:
        return self._as_destinations((yield from self._returned(operation, record, given)))

    def _exchange(
        self,
        operation: int,
        sends: Sequence[torch.Tensor],
        send_sizes: list[int],
        receives: Sequence[torch.Tensor],
        receive_sizes: list[int],
    ) -> Steps[None]:
        """Exchange rows inside this node."""
        parts = [Rows(x, send_sizes, y, receive_sizes) for x, y in zip(sends, receives, strict=True)]
        yield from self._chunks.run(self.fingerprint + operation, parts, self._members)


def _total(sizes: torch.Tensor) -> int:
    """Return the sum of numbers on the host."""
    return int(sizes.sum())
