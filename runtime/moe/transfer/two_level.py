"""TwoLevelTransfer: a token crosses the network once for each node that has experts of it, and its sum once back.

Of each other node one rank forwards a rank's tokens. It receives them with the experts and weights of their pairs on
its node, finds their rows as their own rank would, and brings them to the ranks of its node, beside its own tokens. To
combine, it sums the rows of a token on its node in the order of `combine_rows` and returns one row; the token's rank
adds the sums of the nodes in order of node. So results are those of other transfers, to the bit.

What happens between nodes is here. How rows travel inside a node, and how the tokens to send are found, is the
subclass's: `TwoLevelPushTransfer` or `TwoLevelSendRecvTransfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ....kernels import (
    Buffers,
    PhysicalExperts,
    QuantizedRows,
    TokenRows,
    WindowBarrier,
    WindowSignals,
    combine_rows,
    count_pairs,
    gather_values,
    locate_rows,
    push_rows,
)
from ...transports.base import TwoSidedTransport
from ...transports.comm_requests import Transfer
from ..config import DispatchConfig
from ..dispatch_record import DispatchRecord, Forwards, Tokens
from .base import DISPATCH, PAIR_NUMBERS, ROUTING, Delivery, Steps, TokenTransfer, pair_words
from .chunk_exchange import flat_bytes

# Requests of an operation after its first, added to its number.
LAST, COUNTS, NUMBERS, TOKENS = 1, 3, 4, 5
Messages = Sequence[tuple[int, torch.Tensor]]
"""Ranks of the dispatcher, and what is sent to or received from each."""


class Sent(NamedTuple):
    """What a rank sends to those that forward its tokens."""

    token: torch.Tensor
    """int64 [n], by node."""
    pairs: torch.Tensor
    """int32 [n, pair_words(K)]: float32 weights, then int16 physical experts, -1 for pairs elsewhere."""
    sends: torch.Tensor
    """As `Forwards.sends`."""


class TwoLevelTransfer(TokenTransfer):
    """Ranks exchange tokens and sums with one rank of each other node. Together with a transfer of one level, which
    subclasses inherit after this class.

    Subclasses call `_set_inside`, set `_at`, this rank's index among the destinations inside the node, and implement
    `_opened`.
    """

    transport: TwoSidedTransport  # type: ignore[assignment]

    two_level = True
    quantizes_rows = False  # they cross the network quantized
    _on_node: PhysicalExperts
    _at: int

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        purposes = super().nbytes(config, chunk_capacity)
        ranks = config.node_ranks
        assert ranks is not None
        k, row = config.top_k, max(config.hidden * config.dtype.itemsize, config.dispatched_nbytes)
        sent = ranks.most_sent(config.max_tokens, k, chunk_capacity)
        forwarded = ranks.most_forwarded(config.max_tokens, chunk_capacity)
        purposes[ROUTING] += sent * 8 + forwarded * 12 * k
        messages = "tokens and sums sent and received, and sums of this node"
        return {**purposes, messages: (sent + forwarded + config.max_tokens) * row}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = self.config.node_ranks
        assert ranks is not None
        mine, bounds = ranks.nodes[self.me], self.config.bounds
        self._members = ranks.members[mine]
        self._node, self._node_count = mine, len(ranks.members)
        self._forwarders = [ranks.forwarder(self.me, node) for node in range(self._node_count) if node != mine]
        self._sources = ranks.sources(self.me)
        self._group = self.transport.group_order(self.ranks)
        self._rank_of_expert = [rank for rank in range(self.config.ranks) for _ in range(*bounds[rank : rank + 2])]
        with torch.inference_mode(False):
            nodes = torch.tensor([ranks.nodes[rank] for rank in self._rank_of_expert], device="cpu")
            self._node_of_expert = nodes.to(self.device)  # int64 [S]
            self._others = torch.tensor([node for node in range(self._node_count) if node != mine], device="cpu")
            self._others = self._others.to(self.device)

    def _set_inside(self, on_node: PhysicalExperts) -> None:
        """Set the ranks inside the node as destinations of own tokens, and of those of each source."""
        self._on_node = on_node
        destination = on_node.destination.repeat(len(self._sources))
        self._of_sources = replace(on_node, destination=destination)

    def _members_as_destinations(self) -> PhysicalExperts:
        """Return the physical experts with the ranks of this node as destinations, counted from 0."""
        ranks = self.config.node_ranks
        assert ranks is not None
        index = {rank: i for of_node in ranks.members for i, rank in enumerate(of_node)}
        indices = torch.tensor([index[rank] for rank in self._rank_of_expert], dtype=torch.int32, device="cpu")
        bounds = tuple(range(len(self._members) + 1))
        return PhysicalExperts(bounds, indices.to(self.device), self.physical_experts.first)

    def _opened(
        self, operation: int, given: Sequence[torch.Tensor], record: DispatchRecord
    ) -> Steps[Sequence[Buffers]]:
        """Return the buffers that the rows of `given` of all ranks of this node are in, as `record` has them, until
        `_end_reading`."""
        raise NotImplementedError

    def _end_reading(self, operation: int, read: Sequence[torch.Tensor]) -> Steps[None]:
        """Let peers write again what `_opened` returned, of which `read` are the results."""
        yield from self._synchronise(operation + LAST)

    def _synchronise(self, operation: int) -> Steps[None]:
        """Wait until the ranks of this node have arrived here, if peers address memory."""
        yield from ()

    @property
    def _last_read(self) -> WindowSignals | None:
        """The window that the last launch that reads rows of this node releases, if there is one."""
        return None

    def _last_push(self, operation: int) -> WindowBarrier | None:
        """The barrier at the end of the last launch that pushes rows inside this node, if there is one."""
        return None

    def _sum(
        self,
        operation: int,
        record: DispatchRecord,
        given: Sequence[torch.Tensor],
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        quantized: QuantizedRows | None = None,
    ) -> Steps[list[torch.Tensor]]:
        forwards, forwarded = _forwarded(record)
        buffers, *numbers = yield from self._opened(operation, given, record)
        n, hidden, dtype = sum(_sizes_by_rank(forwards)[0]), self.config.hidden, self.config.dtype
        returned = self._empty((len(forwarded.key), hidden), dtype)
        their_weights = None if weights is None else forwards.weights[: len(returned)]
        combine_rows(forwarded, buffers, returned, their_weights, None, self.launch, quantized=quantized)
        others = self._empty((n, hidden), dtype)
        # In float32 the first two nodes may be added in any order, and so in the result itself.
        here = dtype is torch.float32 and add is None and self._node < 2
        own = out if here else self._empty((len(record.rows.key), hidden), dtype)
        of_pairs: list[torch.Tensor] = []

        def sum_own() -> None:
            of_pairs.extend([gather_values(record.rows, buffer) for buffer in numbers])
            combine_rows(record.rows, buffers, own, weights, None, self.launch, self._last_read, quantized=quantized)

        back = [(returned, others), *[(gather_values(forwarded, b), self._new_of_pairs(n)) for b in numbers]]
        yield from self._give_back(operation, forwards, back, sum_own)
        yield from self._end_reading(operation, [own, *of_pairs])
        self._sum_nodes(forwards, own, others, out, add)
        return [_merged(x, forwards, received) for x, (_, received) in zip(of_pairs, back[1:], strict=True)]

    def _fetch_numbers(self, record: DispatchRecord, numbers: torch.Tensor) -> Steps[torch.Tensor]:
        forwards, forwarded = _forwarded(record)
        (buffers,) = yield from self._opened(PAIR_NUMBERS, (numbers,), record)
        back = gather_values(forwarded, buffers), self._new_of_pairs(sum(_sizes_by_rank(forwards)[0]))
        own = gather_values(record.rows, buffers, self._last_read)
        yield from self._give_back(PAIR_NUMBERS, forwards, [back])
        yield from self._end_reading(PAIR_NUMBERS, [own])
        return _merged(own, forwards, back[1])

    def _new_of_pairs(self, tokens: int) -> torch.Tensor:
        return self._empty((tokens, self.config.top_k), torch.float32)

    def _tokens_by_node(self, physical_expert: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return which tokens have a kept pair on each other node: bool [nodes - 1, T]."""
        node = torch.where(kept, self._node_of_expert[physical_expert.clamp(min=0).long()], -1)
        return (node == self._others[:, None, None]).any(2)

    def _send(
        self,
        tokens: Tokens,
        record: DispatchRecord,
        sent: Sent,
        receives: torch.Tensor,
        into: Sequence[Buffers],
        locate: Callable[[torch.Tensor], TokenRows],
    ) -> Steps[DispatchRecord]:
        """Deliver the tokens of a new dispatch; return its record.

        Args:
            receives: as `Forwards.receives`.
            locate: returns the rows of the forwarded tokens, from their experts as `_locate_forwarded` takes them.
        """
        # The rows of forwarded tokens are not known before they have arrived.
        unknown = torch.empty((0, self.config.top_k), dtype=torch.int32, device=self.device)
        forwards = Forwards(sent.sends, receives, sent.token, unknown, unknown, unknown)
        n, width = sum(_sizes_by_rank(forwards)[1]), sent.pairs.shape[1]
        pairs = torch.empty((n, width), dtype=torch.int32, device=self.device)
        delivery = Delivery(DISPATCH, record, tokens.x, into, tokens.weights)
        received = yield from self._cross(delivery, forwards, [(sent.pairs, pairs)])
        k = self.config.top_k
        weights = pairs[:, :k].contiguous().view(torch.float32)
        experts = pairs.view(torch.int16)[:, 2 * k : 3 * k].int().contiguous()
        forwarded = locate(experts)
        forwards = forwards._replace(key=forwarded.key, row=forwarded.row, weights=weights)
        record = record._replace(forwards=forwards)
        yield from self._spread(delivery._replace(record=record), received)
        return record

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        forwards, _ = _forwarded(delivery.record)
        received = yield from self._cross(delivery, forwards)
        yield from self._spread(delivery, received)

    def _cross(
        self,
        delivery: Delivery,
        forwards: Forwards,
        beside: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> Steps[torch.Tensor]:
        """Exchange tokens with other nodes, and push the own ones inside this node meanwhile; return those to forward.

        Args:
            forwards: without the rows of forwarded tokens.
            beside: further tensors to send and to receive, with a row for each token.
        """
        operation, record, x, into, weights, _ = delivery
        sizes, numbers = self._sizes(forwards)
        packed = self._empty((sum(sizes), x.shape[1]), x.dtype)
        if len(x):
            torch.index_select(x, 0, forwards.token[: len(packed)], out=packed)
        received = self._empty((sum(numbers), x.shape[1]), x.dtype)

        def push_own() -> None:
            self._push(x, record.rows, delivery, weights, 0 if self.in_chunks else self.config.most_padding)

        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for outgoing, incoming in ((packed, received), *beside):
            sends += zip(self._forwarders, outgoing.split(sizes), strict=True)
            receives += zip(self._sources, incoming.split(numbers), strict=True)
        yield from self._exchange_messages(operation + TOKENS, sends, receives, push_own)
        return received

    def _spread(self, delivery: Delivery, received: torch.Tensor) -> Steps[None]:
        """Push the forwarded tokens inside this node."""
        forwards, forwarded = _forwarded(delivery.record)
        weights = None if delivery.weights is None else forwards.weights[: len(received)]
        self._push(received, forwarded, delivery, weights, 0, self._last_push(delivery.operation + LAST))
        yield from self._arrive(delivery)

    def _arrive(self, delivery: Delivery) -> Steps[None]:
        """Wait for the rows that ranks of this node have pushed, and process them."""
        yield from self._synchronise(delivery.operation + LAST)
        if delivery.take is not None:
            delivery.take(delivery.into[0].tensors[self._at])

    def _push(
        self,
        x: torch.Tensor,
        rows: TokenRows,
        delivery: Delivery,
        weights: torch.Tensor | None,
        padding: int,
        barrier: WindowBarrier | None = None,
    ) -> None:
        buffers, numbers = self._pushed_into(delivery)
        numbers, launch = None if weights is None else numbers, self._launch_of(x)
        push_rows(x, rows, buffers, delivery.record.groups, self._at, weights, numbers, padding, launch, barrier)

    def _pushed_into(self, delivery: Delivery) -> tuple[Buffers, Buffers | None]:
        """Return the buffers of rows and of their weights."""
        buffers, *more = delivery.into
        return buffers, more[0] if more else None

    def _pairs_of(
        self, tokens: Tokens, node: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Return `Sent.pairs` of the tokens `token`.

        Args:
            node: int64 [n], where each of them is sent; -1: it is none, so none of its pairs is there.
            expert, kept: the physical expert of each pair, and whether it has a row; [T, K].
        """
        k = self.config.top_k
        pairs = torch.empty((len(token), pair_words(k)), dtype=torch.int32, device=self.device)
        if not len(expert):
            return pairs.fill_(-1)  # there may be places for tokens
        pairs[:, :k] = tokens.weights.contiguous().view(torch.int32).index_select(0, token)
        of_token = expert.index_select(0, token)
        there = self._node_of_expert[of_token.clamp(min=0).long()] == node[:, None]
        pairs.view(torch.int16)[:, 2 * k : 3 * k] = torch.where(there & kept.index_select(0, token), of_token, -1)
        return pairs

    def _locate_forwarded(
        self,
        experts: torch.Tensor,
        source: torch.Tensor,
        start: torch.Tensor,
        sent: torch.Tensor,
        record: DispatchRecord,
    ) -> TokenRows:
        """Return the rows on this node of the forwarded tokens.

        Args:
            experts: int32 [F, K], physical, -1 for none: all have a row.
            source: int32 [F], the index of each token's source.
            start: [sources, S], the first row of each source's pairs of each physical expert.
            sent: int64 [sources, S], how many these are.
        """
        number = self.physical_experts.count
        place = count_pairs(experts, number).place  # among the pairs of all sources
        ends = sent.cumsum(0)
        begins = (ends - sent).int()
        # Each source has physical experts of its own, whose rows begin where its own rank would begin them.
        expert = experts + number * source[:, None]
        # After a failure ids are any numbers, and so are places.
        known = (experts >= 0) & (experts < number)
        known &= place >= begins.view(-1)[torch.where(known, expert, 0).long()]
        groups = record.groups._replace(start=(start.int() - begins).view(-1), limit=ends.int().view(-1))
        return locate_rows(torch.where(known, expert, -1), place, groups, self._of_sources)

    def _sum_nodes(
        self, forwards: Forwards, own: torch.Tensor, others: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None
    ) -> None:
        """Write the sums over nodes to `out`, in float32, rounded once.

        Args:
            own: the sums of this node, [T, H]; may be `out` itself on one of the first two nodes.
            others: those of other nodes, in order of the tokens sent.
        """
        total = own if own is out else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        sizes, _ = self._sizes(forwards)
        if not len(out):
            return  # there may be places for tokens nevertheless
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

    def _sizes(self, forwards: Forwards) -> tuple[list[int], list[int]]:
        """Return the numbers of tokens to each forwarder, and from each source."""
        sends, receives = _sizes_by_rank(forwards)
        return [sends[r] for r in self._forwarders], [receives[r] for r in self._sources]

    def _give_back(
        self,
        operation: int,
        forwards: Forwards,
        tensors: Sequence[tuple[torch.Tensor, torch.Tensor]],
        during_wait: Callable[[], None] | None = None,
    ) -> Steps[None]:
        """Return rows of forwarded tokens to their sources, and receive those of the tokens sent."""
        sizes, numbers = self._sizes(forwards)
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for outgoing, incoming in tensors:
            sends += zip(self._sources, outgoing.split(numbers), strict=True)
            receives += zip(self._forwarders, incoming.split(sizes), strict=True)
        yield from self._exchange_messages(operation + TOKENS, sends, receives, during_wait)

    def _exchange_messages(
        self,
        operation: int,
        sends: Messages,
        receives: Messages,
        during_wait: Callable[[], None] | None = None,
    ) -> Steps[None]:
        """Send contiguous tensors to ranks of other nodes, and receive into such."""
        outgoing, incoming = (
            tuple((self.ranks[r], flat_bytes(x)) for r, x in messages if x.numel()) for messages in (sends, receives)
        )
        yield Transfer(outgoing, incoming, self.fingerprint + operation, None, self._group, during_wait)


def _sizes_by_rank(forwards: Forwards) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens to each rank, and from each."""
    return forwards.sends.tolist(), forwards.receives.tolist()


def _forwarded(record: DispatchRecord) -> tuple[Forwards, TokenRows]:
    """Return the record's `forwards`, and the rows of the forwarded tokens."""
    forwards = record.forwards
    assert forwards is not None
    n = sum(_sizes_by_rank(forwards)[1])
    return forwards, TokenRows(forwards.key[:n], forwards.row[:n])


def _merged(own: torch.Tensor, forwards: Forwards, others: torch.Tensor) -> torch.Tensor:
    """Add the numbers of pairs on other nodes to those on this one, as bits: each pair is on one node, and others have
    zeros for it."""
    if len(own):
        own.view(torch.int32).index_add_(0, forwards.token[: len(others)], others.view(torch.int32))
    return own
