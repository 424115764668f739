"""PushTransfer: a rank on a one-sided transport; rows are pushed straight to their group at the destination.

A dispatch has two barriers: one when counts have been written into every rank's matrix and buffers are offered, one
when all rows have been pushed. Reading from peers has a barrier before, when values are there, and one after, when
they have been read. All dispatches share one matrix: a rank has read it when it enters the second barrier, and peers
write to it only after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels import Buffers, CountShare, push_rows
from ...transports.base import OneSidedTransport
from ...transports.comm_requests import Address, Barrier
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord
from .base import Delivery, Read, Shared, Steps, TokenTransfer

# Barriers of an operation after its first, added to its number.
_LAST, _OPENED = 1, 2
_MOST_OPENED = 4096  # tensors on ranks' memory that are kept


class PushTransfer(TokenTransfer):
    """Peers write into this rank's memory and read it."""

    transport: OneSidedTransport

    quantizes_rows = True
    algorithm = "rows pushed straight to their group at the destination"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._at, self._among = self.me, self.ranks
        """This rank's index among the ranks whose memory it writes, itself included; and those ranks."""
        self._opened_buffers: dict[tuple[tuple[Address, ...], torch.Size, torch.dtype], Buffers] = {}
        """Buffers by address, where an address refers to the same memory for ever. They do not keep it in use."""
        self._matrices: dict[tuple[int, ...], Buffers] = {}
        """The matrices of counts by peers: ranks that were not active keep those that they opened before."""
        self._own_matrix: torch.Tensor | None = None
        """One for all sets of active ranks: a rank writes its own row, once all have read the one before."""
        self._held: object = None

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        read = config.rows * config.combined_nbytes
        return {**super().nbytes(config, chunk_capacity), "expert output that peers read, during combine": read}

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        if ids is None:
            return Shared((yield from self._offer(operation, *own)))
        matrices = yield from self._open_matrices(operation)
        counted = self._count(ids, CountShare(matrices, self.me))
        buffers = yield from self._offer(operation, *own)
        return Shared(buffers, counted, matrices.tensors[self._at])

    def _open_matrices(self, operation: int) -> Steps[Buffers]:
        """Return the matrices of counts of all ranks. The first call with these peers allocates and offers its own."""
        if self.peers not in self._matrices:
            if self._own_matrix is None:
                with torch.inference_mode(False):  # written for as long as the dispatcher lives
                    self._own_matrix = self._empty((self.config.ranks, self.physical_experts.count + 1), torch.int32)
            (self._matrices[self.peers],) = yield from self._offer(operation + _OPENED, self._own_matrix)
        return self._matrices[self.peers]

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        operation, record, x, (rows, *numbers), weights, take = delivery
        weight_buffers = numbers[0] if numbers else None
        padding = self.config.most_padding
        launch = self._launch_of(x)
        push_rows(
            x, record.rows, rows, record.groups, self.me, weights, weight_buffers, padding, launch,
            quantized=self._quantized(operation),
        )  # fmt: skip
        yield self._barrier(operation + _LAST)
        if take is not None:
            take(rows.tensors[self.me])

    def _fetch(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor], read: Read
    ) -> Steps[list[torch.Tensor]]:
        # Kept until the barrier: a freed buffer loses its pages or is used anew, and slower peers may still read it.
        own = [self._addressable(x, record) for x in given]
        result = read((yield from self._offer(operation, *own)))
        yield self._barrier(operation + _LAST)
        return result

    def _barrier(self, operation: int, offer: Address | None = None) -> Barrier:
        return Barrier(self.peers, self.fingerprint + operation, offer)

    def _offer(self, operation: int, *own: torch.Tensor) -> Steps[list[Buffers]]:
        """Offer buffers to the peers; return the corresponding buffers of all, in order of rank. Of a rank that is not
        active they are this rank's own, since nothing is written there or read. The caller keeps its own in use."""
        if not self.peers:
            return [Buffers([tensor] * len(self._among), self.tables) for tensor in own]
        transport, number = self.transport, len(own)
        address, held = transport.offer(own)
        replies = yield self._barrier(operation, address)
        theirs = {peer: transport.offered(reply, number) for peer, reply in zip(self.peers, replies, strict=True)}
        here = transport.offered(address, number)
        in_order = [theirs.get(rank, here) for rank in self._among]
        self._held = held  # a table, until peers have read it, which they have at the next call
        by_buffer = zip(*in_order, strict=True)
        return [self._buffers_at(addresses, like) for addresses, like in zip(by_buffer, own, strict=True)]

    def _buffers_at(self, addresses: tuple[Address, ...], like: torch.Tensor) -> Buffers:
        """Return the memory at an address of each rank as buffers of the shape and dtype of a tensor."""
        key = addresses, like.shape, like.dtype
        kept = self._opened_buffers if self.transport.recycles else {}
        buffers = kept.get(key)
        if buffers is None:
            if len(kept) * len(addresses) >= _MOST_OPENED:
                kept.clear()
            with torch.inference_mode(False):
                opened = [self.transport.open(address, _nbytes(like)) for address in addresses]
                tensors = [x.view(like.dtype).view(like.shape) for x in opened]
            buffers = kept[key] = Buffers(tensors, self.tables)
        return buffers

    def _addressable(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        """Return `values` in memory that peers can address; copies only the rows that peers read."""
        if values.is_contiguous() and self.transport.addressable(values):
            return values
        copied = self._empty(tuple(values.shape), values.dtype)
        n = int(record.groups.num_rows)
        copied[:n].copy_(values[:n])
        return copied


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
