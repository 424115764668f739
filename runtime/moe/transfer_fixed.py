"""One rank of a token dispatcher on a two-sided transport, without a number read by the host: slabs of one size.

A slab has room for `slab_capacity` rows of a sender for an owner. Who has which row, and which have no room, follows
from the counts of all ranks, on the device of each alike. So sizes are known ahead, slabs travel whole, and what is
behind the last row of one is never read.

Ranks that run different dispatchers are told on gloo; on other backends only where one of them runs for the first time:
with sizes that are alike, nothing else shows it to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels import Buffers, Groups, Routed, TokenRows, locate_rows, push_rows
from ...planner import NVLINK_INFINIBAND, price_splits
from ..transports.requests import CommRequest
from .config import DispatchLayout
from .routing import Sent, Slabs
from .transfer import Read, Take, TokenRank
from .transfer_sendrecv import SlabRank


class FixedSlabRank(SlabRank):
    """Ranks send and receive slabs of `layout.slab_capacity` rows."""

    one_size = True
    way = "one slab of one size for each pair of ranks; the host reads nothing"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        capacity = self.layout.slab_capacity
        assert capacity is not None
        self._capacity = capacity
        bounds = torch.tensor(self.layout.bounds, device="cpu")
        self._first = bounds[:-1].repeat_interleave(bounds.diff()).to(self.device)  # int64 [S], of the same owner
        owner = torch.arange(self.layout.ranks, device="cpu").repeat_interleave(bounds.diff()).to(self.device)
        self._slab = owner * capacity  # int64 [S]: where the owner's slab begins
        self._in_slab = torch.arange(capacity, device=self.device).expand(self.layout.ranks, -1).contiguous()
        self._sizes_of_all = torch.full((self.layout.ranks,), capacity, dtype=torch.int64, device="cpu")

    def _before(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows of each slot, [..., S], how many come before them in the slab of the same owner."""
        before = rows.cumsum(-1) - rows
        return before - before[..., self._first]

    def _located(self, routed: Routed, counted: torch.Tensor, weights: torch.Tensor) -> Sent:
        counts = counted[:, :-1].long()
        with_room = torch.minimum(counts, (self._capacity - self._before(counts)).clamp(min=0))
        groups = self._grouped(torch.cat((with_room.int(), counted[:, -1:]), 1), self.slots)
        without = torch.stack(((counts - with_room).sum(), counts.new_zeros(())))
        groups = groups._replace(lost=groups.lost + without)
        start = (self._slab + self._before(groups.limit.long())).int()
        rows = locate_rows(routed.slot, routed.place, groups._replace(start=start), self.slots)
        none = torch.zeros(1, dtype=torch.int64, device="cpu")
        sizes = self._sizes_of_all
        slabs = Slabs(sizes.clone(), sizes.clone(), none, self._places(with_room, groups))
        return Sent(weights, groups, rows, counted, slabs)

    def _places(self, counts: torch.Tensor, groups: Groups) -> torch.Tensor:
        """int64 [W * capacity]: the row in this rank's buffer of each row of the slabs that it receives, -1 of none.

        `counts`: int64 [W, S], rows with room in their slabs.
        """
        low, high = self.layout.bounds[self.me : self.me + 2]
        if low == high:
            return torch.full((self._in_slab.numel(),), -1, dtype=torch.int64, device=self.device)
        own = counts[:, low:high]
        before = own.cumsum(0) - own  # of earlier sources, in the group
        came = torch.minimum((groups.counts - before).clamp(min=0), own)
        begin = groups.offsets.long() - groups.padded_counts + before
        ends = came.cumsum(1)
        slot = torch.searchsorted(ends, self._in_slab, right=True).clamp(max=high - low - 1)
        place = begin.gather(1, slot) + self._in_slab - (ends - came).gather(1, slot)
        return torch.where(self._in_slab < ends[:, -1:], place, -1).view(-1)

    def _deliver(
        self,
        what: int,
        sent: Sent,
        x: torch.Tensor,
        into: Any,
        weights: torch.Tensor | None = None,
        take: Take | None = None,
    ) -> Generator[CommRequest, Any, None]:
        assert sent.slabs is not None
        owners, places = self.layout.ranks, sent.slabs.places
        packed, several = [self._empty((len(places), self.layout.hidden), x.dtype)], None
        if weights is not None:
            packed.append(self._empty((len(places),), torch.float32))
            several = Buffers([packed[1]] * owners, self.tables)
        push_rows(x, sent.rows, Buffers([packed[0]] * owners, self.tables), sent.groups, self.me, weights, several,
                  most_padding=0)  # fmt: skip
        came = []
        for slab in packed:
            came.append(self._empty(tuple(slab.shape), slab.dtype))
            sizes = [self._capacity] * owners
            yield from self._exchange(what, slab, sizes, came[-1], sizes)
        # Each row that came is a token of one entry, whose owner is this rank.
        place = places.int()[:, None]
        rows = TokenRows(torch.where(place >= 0, self.me, owners).int(), place)
        buffers = [Buffers([buffer] * owners, self.tables) for buffer in into]
        numbers = came[1][:, None] if weights is not None else None
        push_rows(came[0], rows, buffers[0], sent.groups, self.me, numbers, buffers[1] if weights is not None else None,
                  most_padding=self.layout.most_padding)  # fmt: skip
        if take is not None:
            take(into[0])

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[CommRequest, Any, list[torch.Tensor]]:
        yield from ()  # a generator, as for all ranks
        assert sent.slabs is not None
        owners, sizes = self.layout.ranks, [self._capacity] * self.layout.ranks
        rows, found = sent.slabs.places.clamp(min=0), []
        for values in given:
            back = self._empty((len(rows), *values.shape[1:]), values.dtype)
            going = values.index_select(0, rows) if len(values) else torch.zeros_like(back)
            yield from self._exchange(what, going, sizes, back, sizes)
            found.append(Buffers([back] * owners, self.tables))
        return read(found)


def ways_of(rank: TokenRank) -> list[TokenRank | type[TokenRank]]:
    """How rows travel, and how they might among the same ranks, as it would be asked for."""
    return [rank, SlabRank if rank.one_size else FixedSlabRank] if rank.in_slabs else [rank]


def with_splits(layout: DispatchLayout, nodes: Sequence[Hashable]) -> tuple[DispatchLayout, str]:
    """The layout with the splits that are cheaper on devices, where none were asked for, and why; alike on all ranks.

    Args:
        nodes: of each rank.
    """
    most, row = layout.max_tokens * layout.top_k, layout.hidden * layout.dtype.itemsize
    prices = price_splits(nodes, most, most, row, NVLINK_INFINIBAND, True)
    if prices.cheaper == "slabs":
        layout = replace(layout, slab_capacity=most)
    why = (
        f"splits: {prices.cheaper}, the cheaper on {_number_of(set(nodes))} by the links of {NVLINK_INFINIBAND.name}: "
        f"{prices.host:.0f} us with sizes that the host reads, {prices.slabs:.0f} us in slabs with room for all rows"
    )
    return layout, why


def _number_of(nodes: Collection[Hashable]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def slab_rank(layout: DispatchLayout) -> type[SlabRank]:
    """What ranks that send are."""
    return SlabRank if layout.slab_capacity is None else FixedSlabRank
