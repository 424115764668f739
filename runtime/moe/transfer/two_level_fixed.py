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
from .two_level_sendrecv import Forwarding, TwoLevelSendRecvTransfer


class TwoLevelFixedTransfer(TwoLevelSendRecvTransfer, FixedTransfer):
    """Ranks exchange messages of fixed size, between nodes and inside them."""

    algorithm = (
        "each token once per node that has experts of it, and one sum back; messages of fixed size, inside a node as "
        "well; no host read"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks, capacity = self.config.node_ranks, self._capacity
        assert ranks is not None
        size = self.config.ranks
        places = ranks.token_places(self.config.max_tokens, capacity)
        others = [node for node in range(self._node_count) if node != self._node]
        of_others = [places[node] for node in others]
        sends, receives, tokens_to, tokens_from = torch.zeros((4, size), dtype=torch.int64, device="cpu")
        each = (1 + len(self._sources)) * capacity
        for member in self._members:
            sends[member], receives[member] = each, (1 + len(ranks.sources(member))) * capacity
        for forwarder, number in zip(self._forwarders, of_others, strict=True):
            tokens_to[forwarder] = number
        tokens_from[self._sources] = places[self._node]
        self._sizes_of_all, self._tokens_of_all = (sends, receives), (tokens_to, tokens_from)
        chunk = [self._members.index(r) * each if r in self._members else 0 for r in self._rank_of_expert]
        with torch.inference_mode(False):
            first = torch.arange(1 + len(self._sources), device=self.device)[:, None] * capacity
            # int64 [1 + sources, S]: where the rows for the rank of each physical expert begin.
            self._begins = first + self._numbers(chunk)
            self._places_before = self._numbers([sum(of_others[:i]) for i in range(len(of_others))])[:, None]
            self._node_of_place = self._numbers([node for node in others for _ in range(places[node])])
            self._places_of_sources = self._numbers([places[self._node]] * len(self._sources))

    def _routed(
        self, tokens: Tokens, row_weights: torch.Tensor
    ) -> Steps[tuple[DispatchRecord, Sent, torch.Tensor, Forwarding]]:
        counted = self._count(tokens.ids)
        matrix = yield from self._exchange_counts(counted.counts.expand(self.config.ranks, -1).contiguous())
        expert, place, _ = counted
        fitting, groups = self._fitted(matrix)
        kept = self._kept(with_counts(matrix, fitting))
        start = self._begins + self._before(kept)
        of_own = groups._replace(start=start[0].int(), limit=kept[0].int())
        rows = locate_rows(expert, place, of_own, self.physical_experts)
        record = DispatchRecord(row_weights, groups, rows, matrix, self._chunks_with(self._places(fitting, groups)))
        has_row = (expert >= 0) & (place < groups.limit[expert.clamp(min=0).long()])
        sends, receives = (sizes.clone() for sizes in self._tokens_of_all)
        token, node = self._placed(self._tokens_by_node(expert, has_row))
        sent = Sent(token, self._pairs_of(tokens, node, token, expert, has_row), sends)
        return record, sent, receives, Forwarding(self._places_of_sources, start[1:], kept[1:])

    def _placed(self, by_node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of each place in the messages to other nodes, and its node; -1 for a place without a token,
        which has any one's row and adds zeros to its sum.

        Args:
            by_node: bool [nodes - 1, T], which tokens are sent to each other node.
        """
        number, tokens = len(self._node_of_place), by_node.shape[1]
        place = torch.where(by_node, self._places_before + by_node.cumsum(1) - 1, number)  # the last is for others
        index = torch.arange(tokens, device=self.device).expand_as(place)
        token = torch.full((number + 1,), -1, dtype=torch.int64, device=self.device)
        token = token.scatter_(0, place.reshape(-1), index.reshape(-1))[:number]
        # Spread, so that on GPUs not all zeros are added to one row.
        other = torch.arange(number, device=self.device) % max(tokens, 1)
        return torch.where(token < 0, other, token), torch.where(token < 0, -1, self._node_of_place)

    def _places(self, counts: torch.Tensor, groups: Groups) -> torch.Tensor:
        by_source = super()._places(counts, groups).view(self.config.ranks, self._capacity)
        return by_source[self._arrival_order].view(-1)
