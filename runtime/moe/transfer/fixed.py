"""FixedTransfer: a rank on a two-sided transport without a host read; rows travel in chunks of fixed size.

A chunk has room for `chunk_capacity` rows of a sender for a destination. Which rows it holds, and which exceed it,
follows from the counts of all ranks and is computed on each device alike. So sizes are known ahead, chunks travel
whole, and the unused end of a chunk is never read.

Ranks that run different dispatchers are detected on gloo; on other backends only when one of them runs for the first
time, since equal sizes give the host nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels import Buffers, CountedPairs, Groups, TokenRows, locate_rows, push_rows, runs_on
from ..config import DispatchConfig
from ..dispatch_record import Chunks, DispatchRecord, chunk_sizes
from .base import Delivery, Steps, TokenTransfer
from .sendrecv import SendRecvTransfer


class FittingRows(TokenTransfer):
    """Mixin: a rank sends each other rank at most `config.chunk_capacity` rows and drops the rest. List it before the
    transfer class."""

    fixed_size = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        capacity, bounds = self.config.chunk_rows, torch.tensor(self.config.bounds, device="cpu")
        assert capacity is not None
        self._capacity = capacity
        self.tells_refusals = self.device.type == "cpu" and not runs_on(self.device)
        self._first = bounds[:-1].repeat_interleave(bounds.diff()).to(self.device)  # int64 [S], of the same destination

    def _before(self, rows: torch.Tensor) -> torch.Tensor:
        """Return how many rows precede those of each physical expert in the chunk of the same destination.

        Args:
            rows: int64 [..., S], rows of each physical expert.
        """
        before = rows.cumsum(-1) - rows
        return before - before[..., self._first]

    def _fitted(self, matrix: torch.Tensor) -> tuple[torch.Tensor, Groups]:
        """Return the rows that fit in the chunks, int64 [W, S], and the groups of those, whose overflow counts all."""
        if self.tells_refusals:
            self._check_refused(matrix[:, -1].tolist())
        counts = matrix[:, :-1].long()
        fitting = torch.minimum(counts, (self._capacity - self._before(counts)).clamp(min=0))
        groups = self._grouped(with_counts(matrix, fitting), self.physical_experts)
        exceeding = torch.stack(((counts - fitting).sum(), counts.new_zeros(())))
        return fitting, groups._replace(overflow=groups.overflow + exceeding)


class FixedTransfer(FittingRows, SendRecvTransfer):
    """Ranks send and receive chunks of `config.chunk_capacity` rows."""

    algorithm = "one chunk of fixed size per pair of ranks; no host read"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        capacity, ranks = self._capacity, self.config.ranks
        sizes = torch.tensor(self.config.bounds, device="cpu").diff()
        destination = torch.arange(ranks, device="cpu").repeat_interleave(sizes).to(self.device)
        self._chunk = destination * capacity  # int64 [S]: the first row of the destination's chunk
        self._in_chunk = torch.arange(capacity, device=self.device).expand(ranks, -1).contiguous()
        self._sizes_of_all = torch.tensor([*[capacity] * (2 * ranks), 0], device="cpu")
        """`Chunks.sizes`."""

    def _located(self, counted: CountedPairs, matrix: torch.Tensor, weights: torch.Tensor) -> DispatchRecord:
        fitting, groups = self._fitted(matrix)
        start = (self._chunk + self._before(groups.limit.long())).int()
        in_chunks = groups._replace(start=start)
        rows = locate_rows(counted.physical_expert, counted.place, in_chunks, self.physical_experts)
        return DispatchRecord(weights, groups, rows, matrix, self._chunks_with(self._places(fitting, groups)))

    def _chunks_with(self, places: torch.Tensor) -> Chunks:
        return Chunks(self._sizes_of_all.clone(), places)

    def _places(self, counts: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return the place in this rank's buffer of each row of the received chunks, int64 [W * capacity], -1: none.

        Args:
            counts: int64 [W, S], rows that fit in their chunks.
        """
        low, high = self.config.bounds[self.me : self.me + 2]
        if low == high:
            return torch.full((self._in_chunk.numel(),), -1, dtype=torch.int64, device=self.device)
        own = counts[:, low:high]
        before = own.cumsum(0) - own  # rows of earlier sources in the group
        received = torch.minimum((groups.counts - before).clamp(min=0), own)
        begin = groups.offsets.long() - groups.padded_counts + before
        ends = received.cumsum(1)
        expert = torch.searchsorted(ends, self._in_chunk, right=True).clamp(max=high - low - 1)
        place = begin.gather(1, expert) + self._in_chunk - (ends - received).gather(1, expert)
        return torch.where(self._in_chunk < ends[:, -1:], place, -1).view(-1)

    def _bring(self, delivery: Delivery, packed: Sequence[torch.Tensor]) -> Steps[None]:
        operation, record, _, into, weights, take = delivery
        assert record.chunks is not None
        ranks, places = self.config.ranks, record.chunks.places
        sends, receives, _ = chunk_sizes(record.chunks)
        received = [self._empty((len(places), *x.shape[1:]), x.dtype) for x in packed]
        yield from self._exchange(operation, packed, sends, received, receives)
        # Each received row is pushed as a token with one pair, whose destination is this rank.
        place = places.int()[:, None]
        rows = TokenRows(torch.where(place >= 0, self.me, ranks).int(), place)
        buffers = [Buffers([buffer] * ranks, self.tables) for buffer in into]
        numbers, weight_buffers = (None, None) if weights is None else (received[1][:, None], buffers[1])
        padding = self.config.most_padding
        launch = self._launch_of(received[0])
        push_rows(received[0], rows, buffers[0], record.groups, self.me, numbers, weight_buffers, padding, launch)
        if take is not None:
            take(into[0])

    def _returned(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor]
    ) -> Steps[list[torch.Tensor]]:
        assert record.chunks is not None
        sends, receives, _ = chunk_sizes(record.chunks)
        rows = record.chunks.places.clamp(min=0)
        returned = [self._empty((sum(sends), *values.shape[1:]), values.dtype) for values in given]
        packed = [
            values.index_select(0, rows) if len(values) else values.new_zeros(len(rows), *values.shape[1:])
            for values in given
        ]
        yield from self._exchange(operation, packed, receives, returned, sends)
        return returned


def with_counts(matrix: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return a matrix of counts, int32 [W, S + 1], with others, [W, S], but the same numbers of bad ids."""
    return torch.cat((counts.int(), matrix[:, -1:]), 1)


def sendrecv_transfer(config: DispatchConfig) -> type[SendRecvTransfer]:
    """Return the transfer of two-sided transports."""
    return SendRecvTransfer if config.chunk_rows is None else FixedTransfer
