"""One rank of a token dispatcher on a one-sided transport: rows are pushed straight to their group at the owner.

A dispatch meets twice: when counts have been written into every rank's matrix and buffers are offered, and when all
rows have been pushed. What reads from peers meets before, when values are there, and after, when they have been read.
The matrix is one for all dispatches: a rank has read it when it comes to the second meeting, and peers write again
after that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ...kernels import Buffers, push_rows, share_counts
from ..transports.base import OneSidedTransport
from ..transports.requests import Address, Barrier, CommRequest
from .config import DispatchLayout
from .routing import Sent
from .transfer import Read, Take, TokenRank

# Meetings of one run after its first, added to what it is for.
_LAST, _OPENED = 1, 2


class PushingRank(TokenRank):
    """Peers write into this rank's memory, and read it."""

    transport: OneSidedTransport
    way = "rows pushed straight to their group at the owner"
    _matrix: torch.Tensor | None = None
    _matrices: Buffers | None = None

    @classmethod
    def nbytes(cls, layout: DispatchLayout, slab_capacity: int | None) -> dict[str, int]:
        read = layout.rows * layout.hidden * layout.dtype.itemsize
        return {**super().nbytes(layout, slab_capacity), "expert output that peers read, during combine": read}

    def _share(
        self, what: int, own: Sequence[torch.Tensor], counts: torch.Tensor | None = None
    ) -> Generator[CommRequest, Any, tuple[Any, torch.Tensor | None]]:
        if counts is None:
            return (yield from self._offer(what, *own)), None
        if self._matrix is None or self._matrices is None:
            with torch.inference_mode(False):  # it is written for as long as the dispatcher lives
                self._matrix = self._empty((self.layout.ranks, len(counts)), torch.int32)
            self._matrices = (yield from self._offer(what + _OPENED, self._matrix))[0]
        share_counts(counts, self._matrices, self.me)
        buffers = yield from self._offer(what, *own)
        return buffers, self._matrix.clone()

    def _deliver(
        self,
        what: int,
        sent: Sent,
        x: torch.Tensor,
        into: Any,
        weights: torch.Tensor | None = None,
        take: Take | None = None,
    ) -> Generator[CommRequest, Any, None]:
        rows, *numbers = into
        push_rows(
            x, sent.rows, rows, sent.groups, self.me, weights, numbers[0] if numbers else None, self.layout.most_padding
        )
        yield self._meet(what + _LAST)
        if take is not None:
            take(rows.tensors[self.me])

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[CommRequest, Any, list[torch.Tensor]]:
        found = read((yield from self._offer(what, *[self._addressable(x, sent) for x in given])))
        yield self._meet(what + _LAST)
        return found

    def _meet(self, what: int, offer: Address | None = None) -> Barrier:
        return Barrier(self.peers, self.token + what, offer)

    def _offer(self, what: int, *own: torch.Tensor) -> Generator[CommRequest, Any, list[Buffers]]:
        """Offer buffers; the same ones of all ranks, in their order."""
        transport, number = self.transport, len(own)
        address, held = transport.offer(own)
        replies = yield self._meet(what, address)
        # Peers begin with the rank after this one.
        theirs: list[Any] = [transport.offered(reply, number) for reply in replies]
        after = self.layout.ranks - 1 - self.me
        in_order = [*theirs[after:], None, *theirs[:after]]
        with torch.inference_mode(False):  # those of the matrix are kept
            found = [
                Buffers(
                    [
                        tensor
                        if a is None
                        else transport.open(a[i], _nbytes(tensor)).view(tensor.dtype).view(tensor.shape)
                        for a in in_order
                    ],
                    self.tables,
                )
                for i, tensor in enumerate(own)
            ]
        self._held = held  # until peers have read it, which they have when this is called again
        return found

    def _addressable(self, values: torch.Tensor, sent: Sent) -> torch.Tensor:
        """`values` in memory that peers can address; the rows that any of them reads."""
        if values.is_contiguous() and self.transport.addressable(values):
            return values
        window = self._empty(tuple(values.shape), values.dtype)
        n = int(sent.groups.num_rows)
        window[:n].copy_(values[:n])
        return window


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
