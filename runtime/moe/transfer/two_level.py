"""TwoLevelTransfer: a token crosses the network once for each node that has experts of it, and its sum once back.

Of each other node one rank forwards a rank's tokens. It receives them with the experts and weights of their pairs on
its node, finds their rows as their own rank would, and writes them to the ranks of its node, beside its own tokens. To
combine, it sums the rows of a token on its node in the order of `combine_rows` and returns one row; the token's rank
adds the sums of the nodes in order of node. So results are those of other transfers, to the bit.

A rank sends its counts to the ranks that forward its tokens, with the number of tokens that it will send; they write
them to the matrices of their node. If no row of any rank is dropped, these numbers are exact; otherwise tokens without
a row are not sent, and the numbers are exchanged again. Inside a node all is as in `PushTransfer`, and a node of one
rank has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ....kernels import (
    Buffers,
    CountedPairs,
    CountShare,
    PhysicalExperts,
    TokenRows,
    combine_rows,
    count_pairs,
    gather_values,
    locate_rows,
    push_rows,
)
from ...statistics import stats
from ...transports.base import TwoSidedTransport
from ...transports.comm_requests import Transfer
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord, Forwards, Tokens
from .base import COMBINE, DISPATCH, ROUTING, UNDISPATCH, WEIGHED, Delivery, Shared, Steps, copied, pair_words
from .chunk_exchange import flat_bytes
from .push import PushTransfer

# Requests of an operation after those of `PushTransfer`, added to its number.
_LAST, _COUNTS, _NUMBERS, _TOKENS = 1, 3, 4, 5
_NO_LIMIT = (1 << 31) - 1
Messages = Sequence[tuple[int, torch.Tensor]]
"""Ranks of the dispatcher, and what is sent to or received from each."""


class _Sent(NamedTuple):
    """What a rank sends to those that forward its tokens."""

    token: torch.Tensor
    """int64 [n], by node."""
    pairs: torch.Tensor
    """int32 [n, pair_words(K)]: float32 weights, then int16 physical experts, -1 for pairs elsewhere."""
    sizes: list[int]
    """Tokens to each forwarder."""


class TwoLevelTransfer(PushTransfer):
    """Ranks push inside their node, and exchange tokens and sums with one rank of each other node."""

    transport: TwoSidedTransport  # type: ignore[assignment]

    two_level = True
    quantizes_rows = False  # they cross the network quantized
    algorithm = "each token once per node that has experts of it, and one sum back; inside a node rows are pushed"

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        purposes = super().nbytes(config, chunk_capacity)
        ranks = config.node_ranks
        assert ranks is not None
        k, row = config.top_k, max(config.hidden * config.dtype.itemsize, config.dispatched_nbytes)
        sent = config.max_tokens * min(k, len(ranks.members) - 1)
        forwarded = config.max_tokens * max(len(ranks.sources(rank)) for rank in range(config.ranks))
        purposes[ROUTING] += sent * 8 + forwarded * 12 * k
        messages = "tokens and sums sent and received, and sums of this node"
        return {**purposes, messages: (sent + forwarded + config.max_tokens) * row}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = self.config.node_ranks
        assert ranks is not None
        mine, bounds = ranks.nodes[self.me], self.config.bounds
        members = ranks.members[mine]
        self._at, self._among = members.index(self.me), tuple(self.ranks[r] for r in members)
        self.peers = self._among[self._at + 1 :] + self._among[: self._at]
        self._node, self._node_count = mine, len(ranks.members)
        self._forwarders = [ranks.forwarder(self.me, node) for node in range(self._node_count) if node != mine]
        self._sources = ranks.sources(self.me)
        self._group = self.transport.group_order(self.ranks)
        index = {rank: i for of_node in ranks.members for i, rank in enumerate(of_node)}
        rank_of = [rank for rank, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) for _ in range(a, b)]
        with torch.inference_mode(False):
            nodes = torch.tensor([ranks.nodes[rank] for rank in rank_of], device="cpu")
            self._node_of_expert = nodes.to(self.device)  # int64 [S]
            indices = torch.tensor([index[rank] for rank in rank_of], dtype=torch.int32, device="cpu")
            # To locate rows on this node, whose ranks are counted from 0: those of own tokens, and of each source's.
            self._on_node, self._of_sources = (
                PhysicalExperts(tuple(range(len(members) + 1)), destination, self.physical_experts.first)
                for destination in (indices.to(self.device), indices.to(self.device).repeat(len(self._sources)))
            )
            self._others = torch.tensor([node for node in range(self._node_count) if node != mine], device="cpu")
            self._others = self._others.to(self.device)

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:
            return (yield from super().dispatch(tokens, outs, record))
        own = (self._rows_to_receive(), self._new_numbers())
        counted, matrix, numbers = yield from self._share_counts(tokens.ids)
        into = yield from self._offer(DISPATCH, *own)
        record, sent, numbers = yield from self._route(tokens, counted, matrix, numbers, (outs or own)[1])
        self._fill_unused(record.groups, *(outs or own))
        record = yield from self._send(tokens, record, sent, numbers, into)
        return copied(own, outs, record.groups)[0], record

    def combine(
        self,
        record: DispatchRecord,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Steps[torch.Tensor | None]:
        operation = COMBINE if numbers is None else UNDISPATCH
        forwards, forwarded = _forwarded(record)
        quantized = self.config.quantized_output if numbers is None else None
        given = (self._output(values, record),) if numbers is None else (values, numbers)
        buffers = yield from self._offer(operation, *[self._addressable(x, record) for x in given])
        n, hidden, dtype = int(forwards.sends.sum()), self.config.hidden, self.config.dtype
        returned = self._empty((len(forwarded.key), hidden), dtype)
        their_weights = None if weights is None else forwards.weights[: len(returned)]
        combine_rows(forwarded, buffers[0], returned, their_weights, None, self.launch, quantized=quantized)
        others = self._empty((n, hidden), dtype)
        # In float32 the first two nodes may be added in any order, and so in the result itself.
        here = dtype is torch.float32 and add is None and self._node < 2
        own = out if here else self._empty((len(record.rows.key), hidden), dtype)
        of_pairs: list[torch.Tensor] = []

        def sum_own() -> None:
            combine_rows(record.rows, buffers[0], own, weights, None, self.launch, quantized=quantized)
            if numbers is not None:
                of_pairs.append(gather_values(record.rows, buffers[1]))

        back = [(returned, others)]
        if numbers is not None:
            back.append((gather_values(forwarded, buffers[1]), self._empty((n, self.config.top_k), torch.float32)))
        yield from self._give_back(operation, forwards, back, sum_own)
        yield from self._synchronise(operation + _LAST)
        self._sum_nodes(forwards, own, others, out, add)
        return _merged(of_pairs[0], forwards, back[1][1]) if of_pairs else None

    def _fetch_numbers(self, record: DispatchRecord, numbers: torch.Tensor) -> Steps[torch.Tensor]:
        forwards, forwarded = _forwarded(record)
        (buffers,) = yield from self._offer(WEIGHED, self._addressable(numbers, record))
        n, own = int(forwards.sends.sum()), gather_values(record.rows, buffers)
        back = gather_values(forwarded, buffers), self._empty((n, self.config.top_k), torch.float32)
        yield from self._give_back(WEIGHED, forwards, [back])
        yield from self._synchronise(WEIGHED + _LAST)
        return _merged(own, forwards, back[1])

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        assert ids is None
        return Shared((yield from self._offer(operation, *own)))

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
        yield from self._exchange(
            DISPATCH + _COUNTS, list(zip(self._forwarders, sent, strict=True)),
            list(zip(self._sources, received, strict=True)),
        )  # fmt: skip
        for matrix in matrices.tensors:
            matrix[self._sources] = received[:, :-1]
        # Before peers read the matrices, they synchronise by offering their receive buffers.
        return counted, matrices.tensors[self._at], received[:, -1].tolist()

    def _tokens_by_node(self, physical_expert: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return which tokens have a kept pair on each other node: bool [nodes - 1, T]."""
        node = torch.where(kept, self._node_of_expert[physical_expert.clamp(min=0).long()], -1)
        return (node == self._others[:, None, None]).any(2)

    def _route(
        self,
        tokens: Tokens,
        counted: CountedPairs,
        matrix: torch.Tensor,
        numbers: list[int],
        row_weights: torch.Tensor,
    ) -> Steps[tuple[DispatchRecord, _Sent, list[int]]]:
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
            yield from self._exchange(
                DISPATCH + _NUMBERS, list(zip(self._forwarders, exact, strict=True)),
                list(zip(self._sources, received, strict=True)),
            )  # fmt: skip
            numbers = [int(number) for number in received]
        which, token = by_node.nonzero(as_tuple=True)
        k = self.config.top_k
        pairs = torch.empty((len(token), pair_words(k)), dtype=torch.int32, device=self.device)
        pairs[:, :k] = tokens.weights.contiguous().view(torch.int32)[token]
        there = kept[token] & (self._node_of_expert[at[token]] == self._others[which][:, None])
        pairs.view(torch.int16)[:, 2 * k : 3 * k] = torch.where(there, expert[token], -1)
        return DispatchRecord(row_weights, groups, rows, matrix), _Sent(token, pairs, sizes), numbers

    def _send(
        self, tokens: Tokens, record: DispatchRecord, sent: _Sent, numbers: list[int], into: Sequence[Buffers]
    ) -> Steps[DispatchRecord]:
        """Deliver the tokens of a new dispatch; return its record."""
        k, width = self.config.top_k, sent.pairs.shape[1]
        pairs = torch.empty((sum(numbers), width), dtype=torch.int32, device=self.device)
        delivery = Delivery(DISPATCH, record, tokens.x, into, tokens.weights)
        beside = [(sent.pairs, pairs)]
        received = yield from self._cross(delivery, sent.token, sent.sizes, numbers, beside)
        weights = pairs[:, :k].contiguous().view(torch.float32)
        experts = pairs.view(torch.int16)[:, 2 * k : 3 * k].int().contiguous()
        forwarded = self._locate_forwarded(experts, numbers, record)
        sends, receives = torch.zeros((2, self.config.ranks), dtype=torch.int64, device="cpu")
        for host, ranks, sizes in ((sends, self._forwarders, sent.sizes), (receives, self._sources, numbers)):
            host[ranks] = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        forwards = Forwards(sends, receives, sent.token, *forwarded[:2], weights)
        record = record._replace(forwards=forwards, forwarded_pairs=forwarded.pairs)
        yield from self._spread(delivery._replace(record=record), received)
        return record

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        forwards, _ = _forwarded(delivery.record)
        sizes, numbers = forwards.sends[self._forwarders].tolist(), forwards.receives[self._sources].tolist()
        received = yield from self._cross(delivery, forwards.token[: sum(sizes)], sizes, numbers)
        yield from self._spread(delivery, received)

    def _cross(
        self,
        delivery: Delivery,
        token: torch.Tensor,
        sizes: list[int],
        numbers: list[int],
        beside: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> Steps[torch.Tensor]:
        """Exchange tokens with other nodes, and push the own ones inside this node meanwhile; return those to forward.

        Args:
            sizes, numbers: tokens to each forwarder, and from each source.
            beside: further tensors to send and to receive, with a row for each token.
        """
        operation, record, x, into, weights, _ = delivery
        packed = self._empty((len(token), x.shape[1]), x.dtype)
        torch.index_select(x, 0, token, out=packed)
        received = self._empty((sum(numbers), x.shape[1]), x.dtype)

        def push_own() -> None:
            self._push(x, record.rows, delivery, weights, self.config.most_padding)

        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for outgoing, incoming in ((packed, received), *beside):
            sends += zip(self._forwarders, outgoing.split(sizes), strict=True)
            receives += zip(self._sources, incoming.split(numbers), strict=True)
        yield from self._exchange(operation + _TOKENS, sends, receives, push_own)
        return received

    def _spread(self, delivery: Delivery, received: torch.Tensor) -> Steps[None]:
        """Push the forwarded tokens inside this node."""
        forwards, forwarded = _forwarded(delivery.record)
        weights = None if delivery.weights is None else forwards.weights[: len(received)]
        self._push(received, forwarded, delivery, weights, 0)
        yield from self._synchronise(delivery.operation + _LAST)
        if delivery.take is not None:
            delivery.take(delivery.into[0].tensors[self._at])

    def _push(
        self, x: torch.Tensor, rows: TokenRows, delivery: Delivery, weights: torch.Tensor | None, padding: int
    ) -> None:
        buffers, *more = delivery.into
        numbers = more[0] if more and weights is not None else None
        launch = self._launch_of(x)
        push_rows(x, rows, buffers, delivery.record.groups, self._at, weights, numbers, padding, launch)

    def _locate_forwarded(self, experts: torch.Tensor, numbers: list[int], record: DispatchRecord) -> TokenRows:
        """Return the rows on this node of the forwarded tokens; `experts`: int32 [F, K], physical, -1 for none."""
        groups, counts, number = record.groups, record.matrix[:, :-1], self.physical_experts.count
        place = count_pairs(experts, number).place  # among the pairs of all sources
        source = torch.arange(len(numbers), dtype=torch.int32, device=self.device)
        source = source.repeat_interleave(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        # Each source has physical experts of its own, whose rows begin where its own rank would begin them.
        expert = torch.where(experts >= 0, experts + number * source[:, None], -1)
        sent = torch.bincount(expert[expert >= 0], minlength=len(numbers) * number).view(len(numbers), number)
        before = counts.cumsum(0) - counts  # rows of earlier ranks
        start = groups.start - before[self.me] + before[self._sources] - (sent.cumsum(0) - sent)
        limit = torch.full((start.numel(),), _NO_LIMIT, dtype=torch.int32, device=self.device)  # all sent have a row
        return locate_rows(expert, place, groups._replace(start=start.int().view(-1), limit=limit), self._of_sources)

    def _sum_nodes(
        self, forwards: Forwards, own: torch.Tensor, others: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None
    ) -> None:
        """Write the sums over nodes to `out`, in float32, rounded once.

        Args:
            own: the sums of this node, [T, H]; may be `out` itself on one of the first two nodes.
            others: those of other nodes, in order of the tokens sent.
        """
        total = own if own is out else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        sizes = forwards.sends[self._forwarders].tolist()
        parts = list(zip(forwards.token[: len(others)].split(sizes), others.split(sizes), strict=True))
        for token, sums in parts[: self._node]:
            total.index_add_(0, token, sums.float())
        if own is not out:
            total.add_(own)
        for token, sums in parts[self._node :]:
            total.index_add_(0, token, sums.float())
        if add is not None:
            total.add_(add)
        if own is not out:
            out.copy_(total)

    def _give_back(
        self,
        operation: int,
        forwards: Forwards,
        tensors: Sequence[tuple[torch.Tensor, torch.Tensor]],
        during_wait: Callable[[], None] | None = None,
    ) -> Steps[None]:
        """Return rows of forwarded tokens to their sources, and receive those of the tokens sent."""
        sizes, numbers = forwards.sends[self._forwarders].tolist(), forwards.receives[self._sources].tolist()
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for outgoing, incoming in tensors:
            sends += zip(self._sources, outgoing.split(numbers), strict=True)
            receives += zip(self._forwarders, incoming.split(sizes), strict=True)
        yield from self._exchange(operation + _TOKENS, sends, receives, during_wait)

    def _exchange(
        self, operation: int, sends: Messages, receives: Messages, during_wait: Callable[[], None] | None = None
    ) -> Steps[None]:
        """Send contiguous tensors to ranks of other nodes, and receive into such."""
        outgoing, incoming = (
            tuple((self.ranks[r], flat_bytes(x)) for r, x in messages if x.numel()) for messages in (sends, receives)
        )
        yield Transfer(
            outgoing, incoming, self.fingerprint + operation, group=self._group, during_wait=during_wait
        )  # fmt: skip

    def _synchronise(self, operation: int) -> Steps[None]:
        if self.peers:
            yield self._barrier(operation)

    def _addressable(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        return super()._addressable(values, record) if self.peers else values.contiguous()


def _forwarded(record: DispatchRecord) -> tuple[Forwards, TokenRows]:
    """Return the record's `forwards`, and the rows of the forwarded tokens."""
    forwards = record.forwards
    assert forwards is not None
    n = int(forwards.receives.sum())
    return forwards, TokenRows(forwards.key[:n], forwards.row[:n], record.forwarded_pairs)


def _merged(own: torch.Tensor, forwards: Forwards, others: torch.Tensor) -> torch.Tensor:
    """Add the numbers of pairs on other nodes to those on this one, as bits: each pair is on one node, and others have
    zeros for it."""
    own.view(torch.int32).index_add_(0, forwards.token[: len(others)], others.view(torch.int32))
    return own
