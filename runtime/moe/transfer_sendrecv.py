"""One rank of a token dispatcher on a two-sided transport: rows travel in one slab for each owner, of the exact size.

A slab has a sender's rows for an owner in order of slot, token and k. Its sizes follow from the counts of all ranks,
which the host reads once for each dispatch; nothing else waits for the device. Sums are those of `combine_rows` over
the slabs that come back, so owners are in the order that they have everywhere.

Messages say of which run they are, so that no rank takes a slab for another's.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ...kernels import Buffers, Groups, Routed, Slots, locate_rows, padding_rows, push_rows
from ..statistics import stats
from ..transports.requests import CommRequest, Transfer
from .config import DispatchLayout
from .routing import Sent, Slabs
from .transfer import ROUTING, Read, Take, TokenRank

_HOST = torch.device("cpu")


class SlabRank(TokenRank):
    """Ranks that send and receive."""

    in_slabs = True
    way = "one slab of exact size for each pair of ranks; the host reads the counts once for each dispatch"

    @classmethod
    def nbytes(cls, layout: DispatchLayout, slab_capacity: int | None) -> dict[str, int]:
        found = super().nbytes(layout, slab_capacity)
        # Rows that come are sorted into their groups; those that go were sorted out of them.
        sent, came = layout.max_tokens * layout.top_k, layout.rows
        if slab_capacity is not None:
            sent = came = layout.ranks * slab_capacity
        found[ROUTING] += came * 8
        # Each of the four sends rows as slabs and receives such.
        slabs = "slabs sent and received, during dispatch, combine and either's backward"
        return {**found, slabs: (sent + came) * layout.hidden * layout.dtype.itemsize}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._host_slots = Slots.divided(self.layout.bounds, _HOST)

    def _share(
        self, what: int, own: Sequence[torch.Tensor], counts: torch.Tensor | None = None
    ) -> Generator[CommRequest, Any, tuple[Any, torch.Tensor | None]]:
        yield from ()  # a generator, as for all ranks
        if counts is None:
            return own, None
        ranks, ones = self.layout.ranks, [1] * self.layout.ranks
        telling = counts.expand(ranks, -1).contiguous()
        told = self._empty(tuple(telling.shape), torch.int32)
        yield from self._exchange(what, telling, ones, told, ones)
        return own, told

    def _located(self, routed: Routed, counted: torch.Tensor, weights: torch.Tensor) -> Sent:
        told = self._read(counted)
        groups = self._grouped(counted, self.slots)
        slabs, starts = self._planned(told, groups if self.device == _HOST else None)
        slabs = slabs._replace(places=self._upload(slabs.places))
        rows = locate_rows(routed.slot, routed.place, groups._replace(start=self._upload(starts)), self.slots)
        return Sent(weights, groups, rows, counted, slabs)

    def _planned(self, told: torch.Tensor, groups: Groups | None) -> tuple[Slabs, torch.Tensor]:
        """Slabs, and where this rank's rows of each slot begin in all of its own, int32 [S]; all on the host, where
        `told` and `groups` are."""
        if groups is None:
            groups = self._grouped(told, self._host_slots)
        sent = torch.nn.functional.pad(groups.limit.long().cumsum(0), (1, 0))
        sends = sent[torch.tensor(self.layout.bounds, device="cpu")].diff()
        # Of the own slots, by source: rows before a source's, how many it has of those that are kept, where they begin.
        low, high = self.layout.bounds[self.me : self.me + 2]
        counts = told[:, low:high].long()
        before = counts.cumsum(0) - counts
        came = torch.minimum((groups.counts - before).clamp(min=0), counts)
        begin = (groups.offsets.long() - groups.padded_counts + before).flatten()
        lengths = came.flatten()
        rows = (begin - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        rows += torch.arange(len(rows), device="cpu")
        padding = padding_rows(groups)
        places = torch.zeros(self.layout.rows, dtype=torch.int64, device="cpu")
        places[: len(rows)] = rows
        places[len(rows) : len(rows) + len(padding)] = padding
        return Slabs(sends, came.sum(1), torch.tensor([len(padding)], device="cpu"), places), sent[:-1].int()

    def _deliver(
        self,
        what: int,
        sent: Sent,
        x: torch.Tensor,
        into: Any,
        weights: torch.Tensor | None = None,
        take: Take | None = None,
    ) -> Generator[CommRequest, Any, None]:
        slabs, owners = sent.slabs, self.layout.ranks
        assert slabs is not None
        sends, receives, number = _sizes(slabs)
        places, padding = slabs.places[: sum(receives) + number].tensor_split([sum(receives)])
        packed, several = [self._empty((sum(sends), self.layout.hidden), x.dtype)], None
        if weights is not None:
            packed.append(self._empty((sum(sends),), torch.float32))
            several = Buffers([packed[1]] * owners, self.tables)
        # A slab has no padding.
        slab_of_all = Buffers([packed[0]] * owners, self.tables)
        push_rows(x, sent.rows, slab_of_all, sent.groups, self.me, weights, several, most_padding=0)
        for slab, buffer in zip(packed, into, strict=True):
            came = self._empty((len(places), *slab.shape[1:]), slab.dtype)
            yield from self._exchange(what, slab, sends, came, receives)
            buffer.index_copy_(0, places, came)
            buffer.index_fill_(0, padding, 0)
        if take is not None:
            take(into[0])

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[CommRequest, Any, list[torch.Tensor]]:
        slabs = sent.slabs
        assert slabs is not None
        sends, receives, _ = _sizes(slabs)
        found = []
        for values in given:
            back = self._empty((sum(sends), *values.shape[1:]), values.dtype)
            going = values.index_select(0, slabs.places[: sum(receives)])
            yield from self._exchange(what, going, receives, back, sends)
            found.append(Buffers([back] * self.layout.ranks, self.tables))
        return read(found)

    def _exchange(
        self, what: int, sends: torch.Tensor, send_sizes: list[int], receives: torch.Tensor, receive_sizes: list[int]
    ) -> Generator[CommRequest, Any, None]:
        """One contiguous piece of `sends` to each rank, one from each; sizes count rows."""
        outgoing, incoming = sends.split(send_sizes), receives.split(receive_sizes)
        incoming[self.me].copy_(outgoing[self.me])
        others = [r for r in range(self.layout.ranks) if r != self.me]
        yield Transfer(
            tuple((self.ranks[r], _bytes(outgoing[r])) for r in others if outgoing[r].numel()),
            tuple((self.ranks[r], _bytes(incoming[r])) for r in others if incoming[r].numel()),
            self.token + what,
        )

    def _read(self, counted: torch.Tensor) -> torch.Tensor:
        """On the host, which waits for it.

        Raises:
            TransportError: they are of another call, or did not come.
        """
        stats().host_reads["counts of a token dispatch"] += 1
        if counted.device.type != "cuda":
            return counted
        host = torch.empty(counted.shape, dtype=counted.dtype, pin_memory=True, device="cpu")
        host.copy_(counted, non_blocking=True)
        torch.cuda.current_stream(counted.device).synchronize()
        self.transport.check()
        return host

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        """On the device; nothing waits for it."""
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _sizes(slabs: Slabs) -> tuple[list[int], list[int], int]:
    """What goes to each owner, what comes from each source, and how many rows are padding."""
    return slabs.sends.tolist(), slabs.receives.tolist(), int(slabs.padding)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
