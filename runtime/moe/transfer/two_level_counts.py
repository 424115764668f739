"""What ranks on two levels compute alike from the counts of all ranks: rows of forwarded tokens, places in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ....kernels import CountedPairs, Groups, TokenRows, group_rows
from ..dispatch_record import DispatchRecord, Tokens
from .fixed import FittingRows
from .two_level import Sent, TwoLevelTransfer


class Forwarding(NamedTuple):
    """Where rows of forwarded tokens begin."""

    numbers: torch.Tensor
    """int64 [sources]: the tokens that this rank receives of each source."""
    start: torch.Tensor
    """int64 [sources, S]: the first row of each source's pairs of each physical expert."""
    kept: torch.Tensor
    """int64 [sources, S]: how many these are."""


class CountsOfAll(TwoLevelTransfer):
    """Every rank knows the counts of all ranks. Together with a transfer of one level, as TwoLevelTransfer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        count = self.physical_experts.count
        with torch.inference_mode(False):
            # The ranks whose rows this one brings to its node.
            self._brought = self._uploaded([self.me, *self._sources])
            self._here = self._node_of_expert == self._node
            # With rank 0 as the destination of all physical experts, `Groups.counts` are those of all of them.
            self._all_experts = replace(self.physical_experts, bounds=(0, *[count] * self.config.ranks))

    def _uploaded(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(self.device)

    def _kept(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the pairs that have a row of this rank and its sources, by physical expert: int64 [1 + sources, S].
        0 for those on other nodes."""
        c = self.config
        rows_of_all = group_rows(matrix, self._all_experts, 0, c.rows, c.align, c.expert_capacity, c.batched).counts
        counts = matrix[:, :-1].long()
        kept = torch.minimum((rows_of_all - (counts.cumsum(0) - counts)).clamp(min=0), counts)[self._brought]
        return kept * self._here

    def _locate(self, experts: torch.Tensor, forwarding: Forwarding, record: DispatchRecord) -> TokenRows:
        """Return the rows of the forwarded tokens; `experts`: int32 [F, K], physical, -1 for none."""
        numbers, start, kept = forwarding
        index = torch.arange(len(experts), device=self.device)
        source = torch.searchsorted(numbers.cumsum(0), index, right=True, out_int32=True)
        return self._locate_forwarded(experts, source, start, kept, record)


class TokenPlaces(CountsOfAll, FittingRows):
    """A message to another node has a place for each token that may have a row there. A place without a token has no
    pairs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = self.config.node_ranks
        assert ranks is not None
        places = ranks.token_places(self.config.max_tokens, self._capacity)
        others = [node for node in range(self._node_count) if node != self._node]
        of_others = [places[node] for node in others]
        tokens_to, tokens_from = torch.zeros((2, self.config.ranks), dtype=torch.int64, device="cpu")
        for forwarder, number in zip(self._forwarders, of_others, strict=True):
            tokens_to[forwarder] = number
        tokens_from[self._sources] = places[self._node]
        self._tokens_of_all = tokens_to, tokens_from
        with torch.inference_mode(False):
            self._places_before = self._uploaded([sum(of_others[:i]) for i in range(len(of_others))])[:, None]
            self._node_of_place = self._uploaded([node for node in others for _ in range(places[node])])
            self._places_of_sources = self._uploaded([places[self._node]] * len(self._sources))

    def _sent(self, tokens: Tokens, counted: CountedPairs, groups: Groups) -> tuple[Sent, torch.Tensor]:
        """Return what this rank sends to other nodes, and `Forwards.receives`."""
        expert, place = counted.physical_expert, counted.place
        has_row = (expert >= 0) & (place < groups.limit[expert.clamp(min=0).long()])
        sends, receives = (sizes.clone() for sizes in self._tokens_of_all)
        token, node = self._placed(self._tokens_by_node(expert, has_row))
        return Sent(token, self._pairs_of(tokens, node, token, expert, has_row), sends), receives

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
