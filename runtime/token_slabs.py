"""One rank of a token dispatcher on a two-sided world: rows travel in one slab for each owner, of the exact size.

A slab has a sender's rows for an owner in order of slot, token and k. Its sizes follow from the counts of all ranks,
which the host reads once for each dispatch. Sums are those of `combine_rows` over the slabs that come back, so owners
are in the order that they have everywhere.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from ..kernels.combine_rows import combine_rows
from ..kernels.gather_values import gather_values
from ..kernels.group_rows import Slots, group_rows
from ..kernels.locate_rows import locate_rows
from ..kernels.push_rows import padding_rows, push_rows
from ..kernels.route_tokens import route_tokens
from ..kernels.rows import Buffers
from ..kernels.weigh_rows import weigh_rows
from .bound_step import World
from .meeting import Ask, Transfer
from .token_layout import DispatchLayout
from .token_ranks import Sent, Slabs


class SlabRank:
    """Rank `ranks[me]` of a dispatcher of `ranks`.

    Attributes:
        host_reads: how often the host waited for the counts.
    """

    def __init__(
        self, layout: DispatchLayout, world: World, ranks: tuple[int, ...], me: int, device: torch.device
    ) -> None:
        self.layout, self.world, self.ranks, self.me, self.device = layout, world, ranks, me, device
        self.slots = Slots.divided(layout.bounds, device)
        self._host_slots = Slots.divided(layout.bounds, torch.device("cpu"))
        self.slot_of = None
        if layout.slot_of:
            self.slot_of = torch.tensor(layout.slot_of[me], dtype=torch.int32, device=device)
        self.host_reads = 0

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> Generator[Ask, Any, tuple[torch.Tensor, Sent]]:
        """The rows that this rank received, [rows, H], and what combine needs."""
        layout, slots = self.layout, self.slots
        routed = route_tokens(ids, layout.num_experts, self.slot_of, slots.number)
        matrix = self._empty((layout.ranks, slots.number + 1), torch.int32)
        ones = [1] * layout.ranks
        yield from self._exchange(routed.counts.expand(layout.ranks, -1).contiguous(), ones, matrix, ones)
        groups = group_rows(matrix, slots, self.me, layout.rows, layout.align, layout.expert_capacity, layout.batched)
        host = matrix.cpu()
        self.host_reads += 1
        slabs, starts = self._slabs(host)
        rows = locate_rows(routed.slot, routed.place, groups._replace(start=starts.to(self.device)), slots)
        received = self._empty((layout.rows, layout.hidden), layout.dtype)
        numbers = self._empty((layout.rows,), torch.float32)
        sent = Sent(numbers, groups, rows, matrix, slabs)
        yield from self._deliver(sent, x, received, weights, numbers)
        return received, sent

    def combine(
        self,
        sent: Sent,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Generator[Ask, Any, torch.Tensor | None]:
        """Each token's sum into `out`. With `numbers`, float32 [rows] of each owner, those of each entry: [T, K]."""
        back = yield from self._fetch(sent, values)
        combine_rows(sent.rows, back, out, weights, add)
        if numbers is None:
            return None
        back = yield from self._fetch(sent, numbers)
        return gather_values(sent.rows, back)

    def combine_backward(
        self, sent: Sent, gradient: torch.Tensor, values: torch.Tensor | None
    ) -> Generator[Ask, Any, tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients of an owner's values, and, if they were weighted, of the weights of this rank's entries."""
        received = self._empty((self.layout.rows, self.layout.hidden), self.layout.dtype)
        yield from self._deliver(sent, gradient, received)
        if values is None:
            return received, None
        numbers = self._empty(tuple(sent.weights.shape), torch.float32)
        weigh_rows(received, values, sent.weights, sent.groups.num_rows, received, numbers)
        back = yield from self._fetch(sent, numbers)
        return received, gather_values(sent.rows, back)

    def _slabs(self, matrix: torch.Tensor) -> tuple[Slabs, torch.Tensor]:
        """The slabs, and where this rank's rows of each slot begin in all of its slabs, int32 [S]; on the host."""
        layout, slots = self.layout, self._host_slots
        settings = layout.rows, layout.align, layout.expert_capacity, layout.batched
        low, high = layout.bounds[self.me : self.me + 2]
        groups = [group_rows(matrix, slots, rank, *settings) for rank in range(layout.ranks)]
        limits = groups[self.me].limit.long()
        starts = (limits.cumsum(0) - limits).int()
        sends = torch.stack([limits[a:b].sum() for a, b in zip(layout.bounds, layout.bounds[1:], strict=False)])
        came = torch.stack([g.limit[low:high].long() for g in groups])  # [W, S_local]
        begin = torch.stack([g.start[low:high].long() for g in groups])
        lengths = came.flatten()
        first = begin.flatten() - (lengths.cumsum(0) - lengths)
        number = int(lengths.sum())
        places = torch.zeros(layout.rows, dtype=torch.int64)
        places[:number] = first.repeat_interleave(lengths) + torch.arange(number)
        return Slabs(sends, came.sum(1), places.to(self.device, non_blocking=True)), starts

    def _deliver(
        self,
        sent: Sent,
        x: torch.Tensor,
        received: torch.Tensor,
        weights: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> Generator[Ask, Any, None]:
        """Rows of tokens to their places at the owners; padding rows zero."""
        slabs = sent.slabs
        assert isinstance(slabs, Slabs)
        sends, receives, places = _sizes(slabs)
        out = self._empty((sum(sends), self.layout.hidden), x.dtype)
        out_numbers = None if weights is None else self._empty((len(out),), torch.float32)
        owners = self.layout.ranks
        several = None if out_numbers is None else Buffers([out_numbers] * owners)
        # A slab has no padding.
        push_rows(x, sent.rows, Buffers([out] * owners), sent.groups, self.me, weights, several, most_padding=0)
        padding = padding_rows(sent.groups) if self.layout.most_padding else places[:0]
        for given, into in ((out, received), (out_numbers, numbers)):
            if given is not None and into is not None:
                came = self._empty((len(places), *given.shape[1:]), given.dtype)
                yield from self._exchange(given, sends, came, receives)
                into.index_copy_(0, places, came)
                into.index_fill_(0, padding, 0)

    def _fetch(self, sent: Sent, values: torch.Tensor) -> Generator[Ask, Any, Buffers]:
        """The owners' rows of this rank's entries, as buffers that TokenRows index."""
        slabs = sent.slabs
        assert isinstance(slabs, Slabs)
        sends, receives, places = _sizes(slabs)
        back = self._empty((sum(sends), *values.shape[1:]), values.dtype)
        yield from self._exchange(values.index_select(0, places), receives, back, sends)
        return Buffers([back] * self.layout.ranks)

    def _exchange(
        self, sends: torch.Tensor, send_sizes: list[int], receives: torch.Tensor, receive_sizes: list[int]
    ) -> Generator[Ask, Any, None]:
        """One contiguous piece of `sends` to each rank, one from each; sizes count rows."""
        outgoing, incoming = sends.split(send_sizes), receives.split(receive_sizes)
        incoming[self.me].copy_(outgoing[self.me])
        others = [r for r in range(self.layout.ranks) if r != self.me]
        yield Transfer(
            tuple((self.ranks[r], _bytes(outgoing[r])) for r in others if outgoing[r].numel()),
            tuple((self.ranks[r], _bytes(incoming[r])) for r in others if incoming[r].numel()),
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.world.empty(shape, dtype, self.device)


def _sizes(slabs: Slabs) -> tuple[list[int], list[int], torch.Tensor]:
    """What is sent to each owner and comes from each source, and the places of the rows that come."""
    receives = slabs.receives.tolist()
    return slabs.sends.tolist(), receives, slabs.places[: sum(receives)]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
