"""TwoLevelPushTransfer: two levels among CPUs; inside a node rows are pushed straight to their group.

A rank sends its counts to the ranks that forward its tokens, with the number of tokens that it will send; they write
them to the matrices of their node. Tokens follow: if no row of any rank is dropped, the numbers are exact; otherwise
tokens without a row are not sent, and the numbers are exchanged again. Inside a node all is as in `PushTransfer`, and a
node of one rank has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ....kernels import Buffers, CountedPairs, CountShare, TokenRows, locate_rows
from ...statistics import stats
from ..dispatch_record import DispatchRecord, Tokens
from .base import DISPATCH, REFUSED, Shared, Steps, copied
from .push import PushTransfer
from .two_level import COUNTS, LAST, NUMBERS, Sent, TwoLevelTransfer


class TwoLevelPushTransfer(TwoLevelTransfer, PushTransfer):  # type: ignore[misc] # a transport of both kinds
    """Ranks of a node write into each other's memory and read it."""

    algorithm = "each token once per node that has experts of it, and one sum back; inside a node rows are pushed"
    tells_refusals = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._at, self._among = self._members.index(self.me), tuple(self.ranks[r] for r in self._members)
        self.peers = self._among[self._at + 1 :] + self._among[: self._at]
        self._offered: Sequence[torch.Tensor] = ()
        """Of this rank, what ranks of its node are reading."""
        with torch.inference_mode(False):
            self._set_inside(self._members_as_destinations())
            self._source_index = torch.tensor(self._sources, dtype=torch.int64, device="cpu").to(self.device)
            """`_sources` as an index."""

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:
            return (yield from super().dispatch(tokens, outs, record))
        own = (self._rows_to_receive(), self._new_numbers())
        counted, matrix, numbers = yield from self._share_counts(tokens.ids)
        into = yield from self._offer(DISPATCH, *own)
        yield from self._end_if_refused(matrix)
        record, sent, receives = yield from self._route(tokens, counted, matrix, numbers, (outs or own)[1])
        self._fill_unused(record.groups, *(outs or own))
        locate = partial(self._locate, receives=receives, record=record)
        record = yield from self._send(tokens, record, sent, receives, into, locate)
        return copied(own, outs, record.groups)[0], record

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        assert ids is None
        return Shared((yield from self._offer(operation, *own)))

    def _opened(
        self, operation: int, given: Sequence[torch.Tensor], record: DispatchRecord
    ) -> Steps[Sequence[Buffers]]:
        self._offered = [self._addressable(x, record) for x in given]
        return (yield from self._offer(operation, *self._offered))

    def _end_reading(self, operation: int, read: Sequence[torch.Tensor]) -> Steps[None]:
        yield from super()._end_reading(operation, read)
        self._offered = ()

    def _share_counts(self, ids: torch.Tensor) -> Steps[tuple[CountedPairs, torch.Tensor, list[int]]]:
        """Count the pairs of `ids`; return them, all ranks' counts, which the next dispatch overwrites, and the tokens
        to expect from each source if no row is dropped."""
        matrices = yield from self._open_matrices(DISPATCH)
        counted = self._count(ids, CountShare(matrices, self.me))
        width = self.physical_experts.count + 1
        sent = self._empty((len(self._forwarders), width + 1), torch.int32)
        sent[:, :-1] = counted.counts
        sent[:, -1] = self._tokens_by_node(counted.physical_expert, counted.physical_expert >= 0).sum(1)
        received = self._empty((len(self._sources), width + 1), torch.int32)
        yield from self._exchange_messages(
            DISPATCH + COUNTS, list(zip(self._forwarders, sent, strict=True)),
            list(zip(self._sources, received, strict=True)),
        )  # fmt: skip
        for matrix in matrices.tensors:
            matrix.index_copy_(0, self._source_index, received[:, :-1])
        # Before peers read the matrices, they synchronise by offering their receive buffers.
        return counted, matrices.tensors[self._at], received[:, -1].tolist()

    def _end_if_refused(self, matrix: torch.Tensor) -> Steps[None]:
        """Raise on all ranks if one of them refuses its arguments."""
        bad_ids = matrix[:, -1].tolist()
        if REFUSED in bad_ids:
            # As after any dispatch, peers may write the matrix again once all have read it.
            yield from self._synchronise(DISPATCH + LAST)
            self._check_refused(bad_ids)

    def _route(
        self,
        tokens: Tokens,
        counted: CountedPairs,
        matrix: torch.Tensor,
        numbers: list[int],
        row_weights: torch.Tensor,
    ) -> Steps[tuple[DispatchRecord, Sent, torch.Tensor]]:
        """Return the record without `forwards`, what this rank sends, and the tokens from each source."""
        matrix = matrix.clone()  # peers write it again
        groups = self._grouped(matrix, self.physical_experts)
        expert, place = counted.physical_expert, counted.place
        on_node = groups._replace(limit=groups.limit * (self._node_of_expert == self._node))
        record = DispatchRecord(row_weights, groups, locate_rows(expert, place, on_node, self._on_node), matrix)
        kept = (expert >= 0) & (place < groups.limit[expert.clamp(min=0).long()])
        sent, sizes = self._sent(tokens, expert, kept)
        if int(groups.overflow[0]):  # equal on all ranks
            exact = [torch.tensor([size], dtype=torch.int64, device="cpu") for size in sizes]
            received = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in self._sources]
            yield from self._exchange_messages(
                DISPATCH + NUMBERS, list(zip(self._forwarders, exact, strict=True)),
                list(zip(self._sources, received, strict=True)),
            )  # fmt: skip
            numbers = [int(number) for number in received]
        return record, sent, self._by_rank(self._sources, numbers)

    def _sent(self, tokens: Tokens, expert: torch.Tensor, kept: torch.Tensor) -> tuple[Sent, list[int]]:
        """Return what this rank sends, and the number of tokens to each other node.

        Args:
            expert, kept: the physical expert of each pair, and whether it has a row; [T, K].
        """
        by_node = self._tokens_by_node(expert, kept)
        stats().host_reads["counts of a token dispatch"] += 1
        sizes: list[int] = by_node.sum(1).tolist()
        which, token = by_node.nonzero(as_tuple=True)
        pairs = self._pairs_of(tokens, self._others[which], token, expert, kept)
        return Sent(token, pairs, self._by_rank(self._forwarders, sizes)), sizes

    def _by_rank(self, ranks: Sequence[int], numbers: Sequence[int]) -> torch.Tensor:
        """Return the numbers of some ranks as int64 [W], with 0 for the others."""
        given = dict(zip(ranks, numbers, strict=True))
        return torch.tensor([given.get(r, 0) for r in range(self.config.ranks)], dtype=torch.int64, device="cpu")

    def _locate(self, experts: torch.Tensor, receives: torch.Tensor, record: DispatchRecord) -> TokenRows:
        """Return the rows on this node of the forwarded tokens; `experts`: int32 [F, K], physical, -1 for none."""
        counts, number = record.matrix[:, :-1], self.physical_experts.count
        source = torch.arange(len(self._sources), dtype=torch.int32, device=self.device)
        source = source.repeat_interleave(receives.to(self.device).index_select(0, self._source_index))
        of_source = (experts + number * source[:, None])[experts >= 0]
        sent = torch.bincount(of_source, minlength=len(self._sources) * number).view(-1, number)
        before = counts.cumsum(0) - counts  # rows of earlier ranks
        start = record.groups.start - before[self.me] + before.index_select(0, self._source_index)
        return self._locate_forwarded(experts, source, start, sent, record)

    def _synchronise(self, operation: int) -> Steps[None]:
        if self.peers:
            yield self._barrier(operation)

    def _addressable(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        return super()._addressable(values, record) if self.peers else values.contiguous()
