"""SendRecvTransfer: a rank on a two-sided transport; rows travel in one chunk of exact size per destination.

A chunk holds a sender's rows for a destination in order of physical expert, token and k. Its size follows from the
counts of all ranks. All is laid out on the device; the host reads the sizes once per dispatch, and nothing else waits
for the device. Sums are those of `combine_rows` over the returned chunks, so destinations are summed in the same order
as on other transports, and node by node where there are several.

Messages carry a fingerprint of their operation, so that no rank takes the chunk of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....kernels import Buffers, CountedPairs, Groups, locate_rows, push_rows
from ...statistics import stats
from ...transports.base import TwoSidedTransport
from ..config import DispatchConfig
from ..dispatch_record import Chunks, DispatchRecord, chunk_sizes
from .base import ROUTING, Delivery, Read, Shared, Steps, TokenTransfer
from .chunk_exchange import ChunkExchange, Rows


class SendRecvTransfer(TokenTransfer):
    """Ranks send and receive chunks of exact size."""

    transport: TwoSidedTransport

    in_chunks = True
    tells_refusals = True
    algorithm = "one chunk of exact size per pair of ranks; the host reads their sizes once per dispatch"

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        purposes = super().nbytes(config, chunk_capacity)
        # Received rows are sorted into their groups; returned rows were sorted out of them.
        sent, received = config.most_pairs, config.rows
        if chunk_capacity is not None:
            sent = received = config.ranks * chunk_capacity
        purposes[ROUTING] += received * 8
        # Each of the four operations sends rows in chunks and receives chunks.
        chunks = "chunks sent and received, during dispatch, combine and either's backward"
        row = max(config.hidden * config.dtype.itemsize, config.dispatched_nbytes, config.combined_nbytes)
        return {**purposes, chunks: (sent + received) * row}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with torch.inference_mode(False):
            self._bounds = torch.tensor(self.config.bounds, device="cpu").to(self.device)
            self._row = torch.arange(self.config.rows, device=self.device)
            self._order_by_node()
        self._chunks = ChunkExchange(self.transport, self.ranks, self.me)

    def _order_by_node(self) -> None:
        """Number destinations node by node, the order of sums. All of them have the same buffer here."""
        ranks = self.config.node_ranks
        if ranks is None:
            return
        position = torch.tensor([ranks.position(r) for r in range(self.config.ranks)], dtype=torch.int32, device="cpu")
        destination = position[self.physical_experts.destination.cpu().long()].to(self.device)
        self.physical_experts = replace(self.physical_experts, destination=destination)
        nodes = [ranks.nodes[r] for r in ranks.order]
        self._nodes = torch.tensor(nodes, dtype=torch.int32, device="cpu").to(self.device)

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        yield from ()  # a generator, as in all transfers
        if ids is None:
            return Shared(own)
        counted = self._count(ids)
        ranks, ones = self.config.ranks, [1] * self.config.ranks
        sent = counted.counts.expand(ranks, -1).contiguous()
        received = self._empty(tuple(sent.shape), torch.int32)
        yield from self._exchange(operation, [sent], ones, [received], ones)
        return Shared(own, counted, received)

    def _located(self, counted: CountedPairs, matrix: torch.Tensor, weights: torch.Tensor) -> DispatchRecord:
        groups = self._grouped(matrix, self.physical_experts)
        sizes, places, start = self._laid_out(matrix, groups)
        rows = locate_rows(counted.physical_expert, counted.place, groups._replace(start=start), self.physical_experts)
        numbers, bad_ids = self._read(sizes).tensor_split((2 * self.config.ranks + 1,))
        self._check_refused(on_host(bad_ids))
        return DispatchRecord(weights, groups, rows, matrix, Chunks(numbers, places))

    def _laid_out(self, matrix: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lay out the chunks on the device, in tensors of fixed shapes.

        Returns:
            `Chunks.sizes` on the device, followed by the bad ids of each rank, and `Chunks.places`.
            int32 [S]: the first row of each physical expert in all of this rank's chunks.
        """
        ends = groups.limit.cumsum(0)
        sent = torch.nn.functional.pad(ends, (1, 0))
        received, padding, places = self._arrivals(matrix, groups)
        sizes = torch.cat((sent[self._bounds].diff(), received, padding, matrix[:, -1]))
        return sizes, places, sent[:-1].int()

    def _arrivals(
        self, matrix: torch.Tensor, groups: Groups, order: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows from each source, int64 [W], the padding rows of this rank's buffer, int64 [1], and
        `Chunks.places`.

        Args:
            order: int64 [W], the sources in the order in which their rows arrive; default: ascending.
        """
        # For the own physical experts, by source: earlier sources' rows, this source's kept rows, where they begin.
        low, high = self.config.bounds[self.me : self.me + 2]
        counts = matrix[:, low:high].long()
        before = counts.cumsum(0) - counts
        received = torch.minimum((groups.counts - before).clamp(min=0), counts)
        first = groups.offsets - groups.padded_counts
        padding = groups.padded_counts - groups.counts
        sums = received.sum(1), padding.sum().view(1)
        before = first + before
        if order is not None:
            received, before = received[order], before[order]
        # Rows arrive in runs of one source and expert; the padding of each group follows as one run more.
        begins = torch.cat((before.flatten(), first + groups.counts))
        lengths = torch.cat((received.flatten(), padding))
        if not len(lengths):
            return *sums, torch.zeros_like(self._row)
        run_ends = lengths.cumsum(0)
        run = torch.searchsorted(run_ends, self._row, right=True).clamp_(max=len(lengths) - 1)
        places = begins[run] + self._row - (run_ends - lengths)[run]
        return *sums, torch.where(self._row < run_ends[-1], places, 0)

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        assert delivery.record.chunks is not None
        yield from self._bring(delivery, self._packed(delivery, sum(chunk_sizes(delivery.record.chunks)[0])))

    def _bring(self, delivery: Delivery, packed: Sequence[torch.Tensor]) -> Steps[None]:
        """Exchange chunks, and store the received rows in their groups."""
        assert delivery.record.chunks is not None
        sends, receives, padded = chunk_sizes(delivery.record.chunks)
        places, padding = delivery.record.chunks.places[: sum(receives) + padded].tensor_split([sum(receives)])
        received = [self._empty((len(places), *x.shape[1:]), x.dtype) for x in packed]
        yield from self._exchange(delivery.operation, packed, sends, received, receives)
        for rows, buffer in zip(received, delivery.into, strict=True):
            buffer.index_copy_(0, places, rows)
            if padded:
                buffer.index_fill_(0, padding, 0)
        if delivery.take is not None:
            delivery.take(delivery.into[0])

    def _packed(self, delivery: Delivery, number: int) -> list[torch.Tensor]:
        """Return all chunks that this rank sends: rows, [number, H], and weights, [number], if there are any."""
        _, record, x, _, weights, _ = delivery
        packed = self._new_chunks(delivery, number)
        rows, *numbers = self._as_destinations(packed)
        of_weights = numbers[0] if numbers else None
        # A chunk has no padding.
        push_rows(x, record.rows, rows, record.groups, self.me, weights, of_weights, 0, self._launch_of(x))
        return packed

    def _new_chunks(self, delivery: Delivery, number: int) -> list[torch.Tensor]:
        """Return memory for chunks of `number` rows in all, and of weights, if there are any."""
        chunks = [self._empty((number, delivery.x.shape[1]), delivery.x.dtype)]
        return chunks if delivery.weights is None else [*chunks, self._empty((number,), torch.float32)]

    def _as_destinations(self, chunks: Sequence[torch.Tensor]) -> list[Buffers]:
        """Return chunks as the buffers of all destinations."""
        return [Buffers([chunk] * self.config.ranks, self.tables) for chunk in chunks]

    def _fetch(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor], read: Read
    ) -> Steps[list[torch.Tensor]]:
        return read(self._as_destinations((yield from self._returned(operation, record, given))))

    def _returned(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor]
    ) -> Steps[list[torch.Tensor]]:
        """Return the rows of `given` to those that sent them; return this rank's."""
        assert record.chunks is not None
        sends, receives, _ = chunk_sizes(record.chunks)
        returned = [self._empty((sum(sends), *values.shape[1:]), values.dtype) for values in given]
        places = record.chunks.places[: sum(receives)]
        packed = [self._empty((sum(receives), *values.shape[1:]), values.dtype) for values in given]
        for values, rows in zip(given, packed, strict=True):
            torch.index_select(values.detach(), 0, places, out=rows)
        yield from self._exchange(operation, packed, receives, returned, sends)
        return returned

    def _exchange(
        self,
        operation: int,
        sends: Sequence[torch.Tensor],
        send_sizes: list[int],
        receives: Sequence[torch.Tensor],
        receive_sizes: list[int],
    ) -> Steps[None]:
        """Send contiguous rows of `sends` to each rank and receive rows from each; sizes count rows."""
        parts = [Rows(x, send_sizes, y, receive_sizes) for x, y in zip(sends, receives, strict=True)]
        yield from self._chunks.run(self.fingerprint + operation, parts, self.config.active_ranks)

    def _read(self, sizes: torch.Tensor) -> torch.Tensor:
        """Return the sizes on the host; waits for them.

        Raises:
            TransportError: they belong to another call, or did not arrive.
        """
        stats().host_reads["counts of a token dispatch"] += 1
        if sizes.device.type != "cuda":
            return sizes
        host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True, device="cpu")
        host.copy_(sizes, non_blocking=True)
        torch.cuda.current_stream(sizes.device).synchronize()
        self.transport.check()
        return host


def on_host(numbers: torch.Tensor) -> list[int]:
    """Return numbers that `_read` has returned."""
    return numbers.tolist()
