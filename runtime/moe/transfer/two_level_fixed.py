"""TwoLevelFixedTransfer: two levels on a two-sided transport without a host read; all messages have a fixed size.

A rank sends its counts to every other rank. From these all devices know alike which rows fit in their chunks and which
are dropped, as in `FixedTransfer`. A message to another node has a place for each token that may have a row there; a
place without a token has no pairs. Inside the node, a rank's chunk for another one has room for `chunk_capacity` rows
of itself and of each rank whose tokens it forwards. So a destination receives as many rows as on one level, from the
ranks of its own node only.
"""

from __future__ import annotations

from typing import Any

import torch

from ....kernels import Groups, locate_rows
from ..dispatch_record import DispatchRecord, Tokens
from .base import Steps
from .fixed import FixedTransfer, with_counts
from .two_level import Sent
from .two_level_counts import Forwarding, TokenPlaces
from .two_level_sendrecv import TwoLevelSendRecvTransfer


class TwoLevelFixedTransfer(TokenPlaces, TwoLevelSendRecvTransfer, FixedTransfer):
    """Ranks exchange messages of fixed size, between nodes and inside them."""

    algorithm = (
        "each token once per node that has experts of it, and one sum back; messages of fixed size, inside a node as "
        "well; no host read"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks, capacity = self.config.node_ranks, self._capacity
        assert ranks is not None
        sends, receives = [0] * self.config.ranks, [0] * self.config.ranks
        each = (1 + len(self._sources)) * capacity
        for member in self._members:
            sends[member], receives[member] = each, (1 + len(ranks.sources(member))) * capacity
        self._sizes_of_all = torch.tensor([*sends, *receives, 0], device="cpu")
        chunk = [self._members.index(r) * each if r in self._members else 0 for r in self._rank_of_expert]
        with torch.inference_mode(False):
            first = torch.arange(1 + len(self._sources), device=self.device)[:, None] * capacity
            # int64 [1 + sources, S]: where the rows for the rank of each physical expert begin.
            self._begins = first + self._uploaded(chunk)

    def _routed(
        self, tokens: Tokens, row_weights: torch.Tensor
    ) -> Steps[tuple[DispatchRecord, Sent, torch.Tensor, Forwarding]]:
        counted = self._count(tokens.ids)
        matrix = yield from self._exchange_counts(counted.counts.expand(self.config.ranks, -1).contiguous())
        fitting, groups = self._fitted(matrix)
        kept = self._kept(with_counts(matrix, fitting))
        start = self._begins + self._before(kept)
        of_own = groups._replace(start=start[0].int(), limit=kept[0].int())
        rows = locate_rows(counted.physical_expert, counted.place, of_own, self.physical_experts)
        record = DispatchRecord(row_weights, groups, rows, matrix, self._chunks_with(self._places(fitting, groups)))
        forwarding = Forwarding(self._places_of_sources, start[1:], kept[1:])
        return record, *self._sent(tokens, counted, groups), forwarding

    def _places(self, counts: torch.Tensor, groups: Groups) -> torch.Tensor:
        by_source = super()._places(counts, groups).view(self.config.ranks, self._capacity)
        return by_source[self._arrival_order].view(-1)
