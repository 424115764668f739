"""One rank of a token dispatcher, as runs that yield where ranks meet; how rows travel is the subclass's.

A subclass has three verbs: `_share` tells all ranks counts, and where rows may be written; `_deliver` brings rows of
tokens to their owners; `_fetch` brings owners' rows back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ...kernels import (
    AddressTables,
    Buffers,
    Groups,
    Routed,
    Slots,
    combine_rows,
    copy_rows,
    fill_rows,
    gather_values,
    group_rows,
    locate_rows,
    route_tokens,
    weigh_rows,
)
from ..transports.base import Transport
from ..transports.requests import CommRequest
from .config import DispatchLayout, fill_of
from .routing import Sent

Read = Callable[[Sequence[Buffers]], list[torch.Tensor]]
"""From owners' buffers to tensors of this rank's entries."""
Take = Callable[[torch.Tensor], None]
"""From the buffer where rows came to wherever it keeps its results; it may be that buffer."""
# Added to the dispatcher's token: what a run is for. Its meetings are numbered from there on.
DISPATCH, COMBINE, BACKWARD, WEIGHED, UNDISPATCH = 0, 8, 16, 24, 32
RUNS = {
    DISPATCH: "dispatch",
    COMBINE: "combine",
    BACKWARD: "backward of combine",
    UNDISPATCH: "backward of dispatch",
}
ROUTING = "routing of one dispatch, held until backward"
"""Of `TokenRank.nbytes`."""


class TokenRank:
    """Rank `ranks[me]` of a dispatcher of `ranks`.

    Args:
        token: of the dispatcher, alike on all ranks; the last 8 bits are zero.

    Attributes:
        in_slabs: rows travel in slabs, and `Sent` has them.
        in_windows: rows travel through windows, which dispatchers share.
        one_size: all slabs have room for as many rows.
        way: how rows travel, in words.
        words_told: words that a rank tells each other one with its counts.
        peers: the others, beginning with the rank after this one.
    """

    in_slabs = False
    in_windows = False
    one_size = False
    way = ""
    words_told = 0

    @classmethod
    def nbytes(cls, layout: DispatchLayout, slab_capacity: int | None) -> dict[str, int]:
        """Bytes of memory of one rank, at most, by what they are for.

        Args:
            slab_capacity: rows of a slab, where all are of one size.
        """
        row = layout.hidden * layout.dtype.itemsize + 4  # and its weight
        # Slots, places and rows of entries, and counts of all ranks.
        routing = layout.max_tokens * layout.top_k * 16 + layout.ranks * (layout.bounds[-1] + 1) * 8
        return {
            cls.received(layout): layout.rows * row,
            "gradients received, in the backward of combine": layout.rows * row,
            ROUTING: routing,
        }

    @classmethod
    def received(cls, layout: DispatchLayout) -> str:
        """How long memory for rows is held, in words."""
        return {
            "lease": "rows received, held until backward",
            "copy": "rows received, twice while they are copied, then once until backward",
            "redispatch": "rows received, held until the experts are done, and again during their backward",
        }[layout.save]

    def __init__(
        self,
        layout: DispatchLayout,
        transport: Transport,
        ranks: tuple[int, ...],
        me: int,
        device: torch.device,
        token: int,
    ) -> None:
        self.layout, self.transport, self.ranks, self.me = layout, transport, ranks, me
        self._rest = fill_of(layout.zero_rows)
        self.device, self.token = device, token
        self.slots = Slots.divided(layout.bounds, device)
        self.slot_of = None
        if layout.slot_of:
            self.slot_of = torch.tensor(layout.slot_of[me], dtype=torch.int32, device=device)
        self.peers = ranks[me + 1 :] + ranks[:me]
        self.tables = AddressTables(device)

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        outs: Sequence[torch.Tensor] | None = None,
    ) -> Generator[CommRequest, Any, tuple[torch.Tensor, Sent]]:
        """The rows that this rank received, [rows, H], and what combine needs. With `outs`, memory for rows and for
        their weights, copies of those in the transport's memory."""
        routed = route_tokens(ids, self.layout.num_experts, self.slot_of, self.slots.number)
        # What comes through a window is copied out of it: to where it is wanted.
        own = outs if outs and self.in_windows else (self._rows_to_receive(), self._new_numbers())
        into, counted = yield from self._share(DISPATCH, own, routed.counts)
        assert counted is not None
        sent = self._located(routed, counted, (outs or own)[1])
        self._fill_rest(sent.groups, *(outs or own))
        yield from self._deliver(DISPATCH, sent, x, into, weights)
        return _lasting(own, outs, sent.groups)[0], sent

    def combine(
        self,
        sent: Sent,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Generator[CommRequest, Any, torch.Tensor | None]:
        """Each token's sum into `out`. With `numbers`, float32 [rows] of each owner, those of each entry: [T, K]."""

        def read(buffers: Sequence[Buffers]) -> list[torch.Tensor]:
            combine_rows(sent.rows, buffers[0], out, weights, add)
            return [out, *[gather_values(sent.rows, numbers) for numbers in buffers[1:]]]

        given = (values,) if numbers is None else (values, numbers)
        _, *of_entries = yield from self._fetch(COMBINE if numbers is None else UNDISPATCH, sent, given, read)
        return of_entries[0] if of_entries else None

    def combine_backward(
        self, sent: Sent, gradient: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> Generator[CommRequest, Any, tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients of an owner's values, and, if they were weighted, of the weights of this rank's entries. With
        `out`, memory for the former, a copy of them."""
        outs, of_weights = None if out is None else (out,), None
        own = outs if outs and self.in_windows else (self._new_rows(),)
        into, _ = yield from self._share(BACKWARD, own)
        self._fill_rest(sent.groups, *(outs or own))
        if values is None:
            yield from self._deliver(BACKWARD, sent, gradient, into)
        else:
            numbers = self._new_numbers()

            def weigh(came: torch.Tensor) -> None:
                weigh_rows(came, values, sent.weights, sent.groups.num_rows, own[0], numbers)

            yield from self._deliver(BACKWARD, sent, gradient, into, take=weigh)
            (of_weights,) = yield from self._fetch(
                WEIGHED, sent, (numbers,), lambda buffers: [gather_values(sent.rows, buffers[0])]
            )
        return _lasting(own, outs, sent.groups)[0], of_weights

    def _share(
        self, what: int, own: Sequence[torch.Tensor], counts: torch.Tensor | None = None
    ) -> Generator[CommRequest, Any, tuple[Any, torch.Tensor | None]]:
        """What `_deliver` needs to write into all ranks' `own` buffers; and what all ranks counted, for `_located`: of
        this dispatch alone."""
        raise NotImplementedError

    def _deliver(
        self,
        what: int,
        sent: Sent,
        x: torch.Tensor,
        into: Any,
        weights: torch.Tensor | None = None,
        take: Take | None = None,
    ) -> Generator[CommRequest, Any, None]:
        """Rows of tokens, [T, H], to their places at the owners, and weights, [T, K], if there are any; padding rows
        zero. Rows that came are this rank's own, or `take` makes those of them."""
        raise NotImplementedError

    def _fetch(
        self, what: int, sent: Sent, given: Sequence[torch.Tensor], read: Read
    ) -> Generator[CommRequest, Any, list[torch.Tensor]]:
        """What `read` makes of all owners' `given`, which `sent.rows` index."""
        raise NotImplementedError

    def _located(self, routed: Routed, counted: torch.Tensor, weights: torch.Tensor) -> Sent:
        groups = self._grouped(counted, self.slots)
        return Sent(weights, groups, locate_rows(routed.slot, routed.place, groups, self.slots), counted)

    def _grouped(self, matrix: torch.Tensor, slots: Slots) -> Groups:
        layout = self.layout
        return group_rows(matrix, slots, self.me, layout.rows, layout.align, layout.expert_capacity, layout.batched)

    def _fill_rest(self, groups: Groups, *of_rows: torch.Tensor) -> None:
        """Rows from `num_rows` on, which nobody delivers; before others are there, since what is overwritten where this
        rank failed stays so."""
        if self._rest is not None:
            for x in of_rows:
                fill_rows(x, groups.num_rows, self._rest)

    def _rows_to_receive(self) -> torch.Tensor:
        """Memory for the rows of a dispatch, [rows, H]."""
        return self._new_rows()

    def _new_rows(self) -> torch.Tensor:
        return self._empty((self.layout.rows, self.layout.hidden), self.layout.dtype)

    def _new_numbers(self) -> torch.Tensor:
        return self._empty((self.layout.rows,), torch.float32)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.transport.empty(shape, dtype, self.device)


def _lasting(
    received: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, groups: Groups
) -> Sequence[torch.Tensor]:
    """What was received, or `outs`, which get copies of its rows."""
    if outs is None or outs is received:
        return received
    for rows, out in zip(received, outs, strict=True):
        copy_rows(rows, out, groups.num_rows)
    return outs
