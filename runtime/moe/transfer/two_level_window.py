"""TwoLevelWindowTransfer: two levels among GPUs; messages of fixed size between nodes, windows inside them.

Ranks of a node write their counts into each other's windows, and send them in messages to the ranks of other nodes.
From these all devices know alike, as in `TwoLevelFixedTransfer`, which rows have a place, and where. While the tokens
from other nodes are on the way, a rank pushes the rows of its own tokens into the buffers of the ranks of its node;
then those of the tokens that it forwards, in the launch that has the barrier. To combine, ranks offer their rows in
their windows, sum those of the tokens that they forward, and sum those of their own while these sums are on the way. So
no message goes between ranks of a node, and the host neither waits for peers of the node nor reads device values.

A rank that is alone on its node has the same memory, but nobody to signal to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ....kernels import Buffers, CountedPairs, WindowBarrier, WindowSignals, locate_rows
from ...transports.buffer_pool import BufferPoolTransport
from ...transports.hierarchical import HierarchicalSymmetricMemoryTransport
from ..dispatch_record import DispatchRecord, Forwards, Tokens
from .base import DISPATCH, Delivery, Steps
from .fixed import with_counts
from .two_level import COUNTS, LAST, Sent
from .two_level_counts import Forwarding, TokenPlaces
from .window import WindowTransfer


class TwoLevelWindowTransfer(TokenPlaces, WindowTransfer):
    """Ranks of a node write into each other's memory and read each other's windows."""

    algorithm = (
        "each token once per node that has experts of it, and one sum back, in messages of fixed size; inside a node "
        "rows are pushed into pooled buffers or windows; no host read"
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tells_refusals = False  # ranks of a node synchronise on the device
        self._elsewhere = [r for r in range(self.config.ranks) if r not in self._members]
        with torch.inference_mode(False):
            self._set_inside(self._members_as_destinations())
            self._rows_of_members = self._uploaded(self._members)

    def _sharing(self) -> tuple[BufferPoolTransport, tuple[int, ...]]:
        transport, ranks = cast("HierarchicalSymmetricMemoryTransport", self.transport), self.config.node_ranks
        assert ranks is not None
        members = ranks.members[ranks.nodes[self.me]]
        return transport.inside, tuple(self.ranks[r] for r in members)

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        if record is not None:
            return (yield from super().dispatch(tokens, outs, record))
        own = outs or (self._rows_to_receive(), self._new_numbers(), *self._new_scales())
        into, counted, _ = yield from self._share(DISPATCH, own, tokens.ids)
        self._windows.check()  # other nodes would wait for rows that are not sent
        assert counted is not None
        matrix = yield from self._counts_of_all(counted)
        record, sent, receives, forwarding = self._route(tokens, counted, matrix, own[1])
        locate = partial(self._locate, forwarding=forwarding, record=record)
        record = yield from self._send(tokens, record, sent, receives, into, locate)
        return own[0], record._replace(scale=own[2] if len(own) > 2 else None)

    def _counts_of_all(self, counted: CountedPairs) -> Steps[torch.Tensor]:
        """Return the counts of all ranks, int32 [W, S + 1]; those of this node are in the window."""
        counts, width = counted.counts, self.physical_experts.count + 1
        matrix = torch.empty((self.config.ranks, width), dtype=torch.int32, device=self.device)

        def copy_from_window() -> None:
            here = self._matrices.tensors[self._at][:, :width] if len(self._among) > 1 else counts[None]
            matrix.index_copy_(0, self._rows_of_members, here)

        sends = [(r, counts) for r in self._elsewhere]
        receives = [(r, matrix[r]) for r in self._elsewhere]
        yield from self._exchange_messages(DISPATCH + COUNTS, sends, receives, copy_from_window)
        # After a failure, counts of another call would be numbers of rows that peers do not have.
        return torch.where(self._window.failure.error.eq(0), matrix.clamp_(min=0), 0)

    def _route(
        self, tokens: Tokens, counted: CountedPairs, matrix: torch.Tensor, row_weights: torch.Tensor
    ) -> tuple[DispatchRecord, Sent, torch.Tensor, Forwarding]:
        """Return the record without `forwards`, what this rank sends to other nodes, `Forwards.receives`, and where the
        forwarded rows lie in the buffers of this node."""
        fitting, groups = self._fitted(matrix)
        of_own = groups._replace(limit=groups.limit * self._here)
        rows = locate_rows(counted.physical_expert, counted.place, of_own, self._on_node)
        kept = self._kept(with_counts(matrix, fitting))[1:]
        before = fitting.cumsum(0) - fitting  # rows of earlier ranks
        start = groups.start - before[self.me] + before[self._brought[1:]]
        record = DispatchRecord(row_weights, groups, rows, matrix)
        return record, *self._sent(tokens, counted, groups), Forwarding(self._places_of_sources, start, kept)

    def _last_push(self, operation: int) -> WindowBarrier | None:
        return self._barrier(operation)

    def _pushed_into(self, delivery: Delivery) -> tuple[Buffers, Buffers | None]:
        buffers, _ = delivery.into
        return buffers, self._numbers

    def _arrive(self, delivery: Delivery) -> Steps[None]:
        yield from ()
        if self._signals is None:
            self._signal("barrier", delivery.operation + LAST)
        self._take_out(delivery)

    def _opened(
        self, operation: int, given: Sequence[torch.Tensor], record: DispatchRecord
    ) -> Steps[Sequence[Buffers]]:
        yield from ()
        return self._offer(operation, record, given)

    @property
    def _last_read(self) -> WindowSignals | None:
        return self._signals

    def _end_reading(self, operation: int, read: Sequence[torch.Tensor]) -> Steps[None]:
        yield from ()
        if self._signals is None:
            self._release(read)

    def _sum(self, *given: Any) -> Steps[list[torch.Tensor]]:
        return self._checked((yield from super()._sum(*given)))

    def _fetch_numbers(self, record: DispatchRecord, numbers: torch.Tensor) -> Steps[torch.Tensor]:
        (of_pairs,) = self._checked([(yield from super()._fetch_numbers(record, numbers))])
        return of_pairs

    def _give_back(
        self,
        operation: int,
        forwards: Forwards,
        tensors: Sequence[tuple[torch.Tensor, torch.Tensor]],
        during_wait: Callable[[], None] | None = None,
    ) -> Steps[None]:
        self._overwrite_if_failed([outgoing for outgoing, _ in tensors])
        yield from super()._give_back(operation, forwards, tensors, during_wait)

    def _checked(self, of_pairs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return numbers, overwritten if this rank has failed: those of other nodes have been added since."""
        self._overwrite_if_failed(of_pairs)
        self._windows.check()
        return of_pairs

    def _overwrite_if_failed(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._windows.signal(self._window, "poison", poison=tensor)
