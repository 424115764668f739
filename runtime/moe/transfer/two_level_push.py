"""TwoLevelPushTransfer: two levels among CPUs; inside a node rows are pushed straight to their group.

A rank sends its counts to the ranks that forward its tokens, with the number of tokens that it will send; they write
them to the matrices of their node. If no row of any rank is dropped, these numbers are exact; otherwise tokens without
a row are not sent, and the numbers are exchanged again. Inside a node all is as in `PushTransfer`, and a node of one
rank has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ....kernels import Buffers, CountedPairs, CountShare, TokenRows, locate_rows
from ...statistics import stats
from ..dispatch_record import DispatchRecord, Tokens
from .base import DISPATCH, Shared, Steps, copied
from .push import PushTransfer
from .two_level import COUNTS, NUMBERS, Sent, TwoLevelTransfer


class TwoLevelPushTransfer(TwoLevelTransfer, PushTransfer):  # type: ignore[misc] # a transport of both kinds
    """Ranks of a node write into each other's memory and read it."""

    algorithm = "each token once per node that has experts of it, and one sum back; inside a node rows are pushed"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._at, self._among = self._members.index(self.me), tuple(self.ranks[r] for r in self._members)
        self.peers = self._among[self._at + 1 :] + self._among[: self._at]
        self._offered: Sequence[torch.Tensor] = ()
        """Of this rank, what ranks of its node are reading."""
        with torch.inference_mode(False):
            self._set_inside(self._members_as_destinations())

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:
            return (yield from super().dispatch(tokens, outs, record))
        own = (self._rows_to_receive(), self._new_numbers())
        counted, matrix, numbers = yield from self._share_counts(tokens.ids)
        into = yield from self._offer(DISPATCH, *own)
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
            matrix[self._sources] = received[:, :-1]
        # Before peers read the matrices, they synchronise by offering their receive buffers.
        return counted, matrices.tensors[self._at], received[:, -1].tolist()

    def _route(
        self,
        tokens: Tokens,
        counted: CountedPairs,
        matrix: torch.Tensor,
        numbers: list[int],
        row_weights: torch.Tensor,
    ) -> Steps[tuple[DispatchRecord, Sent, torch.Tensor]]:
        """Return the record without `forwards`, what this rank sends, and the tokens from each source."""
        matrix = matrix.clone()
        groups = self._grouped(matrix, self.physical_experts)
        expert, place, _ = counted
        at = expert.clamp(min=0).long()
        kept = (expert >= 0) & (place < groups.limit[at])
        here = self._node_of_expert == self._node
        rows = locate_rows(expert, place, groups._replace(limit=groups.limit * here), self._on_node)
        by_node = self._tokens_by_node(expert, kept)
        stats().host_reads["counts of a token dispatch"] += 1
        sizes = by_node.sum(1).tolist()
        if int(groups.overflow[0]):  # equal on all ranks
            exact = [torch.tensor([size], dtype=torch.int64, device="cpu") for size in sizes]
            received = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in self._sources]
            yield from self._exchange_messages(
                DISPATCH + NUMBERS, list(zip(self._forwarders, exact, strict=True)),
                list(zip(self._sources, received, strict=True)),
            )  # fmt: skip
            numbers = [int(number) for number in received]
        which, token = by_node.nonzero(as_tuple=True)
        pairs = self._pairs_of(tokens, self._others[which], token, expert, kept)
        sends, receives = torch.zeros((2, self.config.ranks), dtype=torch.int64, device="cpu")
        for host, ranks, given in ((sends, self._forwarders, sizes), (receives, self._sources, numbers)):
            host[ranks] = torch.tensor(given, dtype=torch.int64, device="cpu")
        return DispatchRecord(row_weights, groups, rows, matrix), Sent(token, pairs, sends), receives

    def _locate(self, experts: torch.Tensor, receives: torch.Tensor, record: DispatchRecord) -> TokenRows:
        """Return the rows on this node of the forwarded tokens; `experts`: int32 [F, K], physical, -1 for none."""
        counts, number = record.matrix[:, :-1], self.physical_experts.count
        source = torch.arange(len(self._sources), dtype=torch.int32, device=self.device)
        source = source.repeat_interleave(receives[self._sources].to(self.device))
        of_source = (experts + number * source[:, None])[experts >= 0]
        sent = torch.bincount(of_source, minlength=len(self._sources) * number).view(-1, number)
        before = counts.cumsum(0) - counts  # rows of earlier ranks
        start = record.groups.start - before[self.me] + before[self._sources]
        return self._locate_forwarded(experts, source, start, sent, record)

    def _synchronise(self, operation: int) -> Steps[None]:
        if self.peers:
            yield self._barrier(operation)

    def _addressable(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        return super()._addressable(values, record) if self.peers else values.contiguous()
