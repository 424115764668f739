"""TokenTransfer: one rank of a token dispatcher; its operations are generators of communication requests.

How rows travel is the subclass's. It implements three steps: `_share` exchanges counts and makes receive buffers known,
`_deliver` brings rows of tokens to their destinations, `_fetch` brings rows back from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from ....errors import DisagreementError
from ....kernels import (
    AddressTables,
    Buffers,
    CountedPairs,
    CountShare,
    Groups,
    PhysicalExperts,
    QuantizedRows,
    RowLaunch,
    WindowSignals,
    combine_rows,
    contiguous_rows,
    copy_rows,
    count_pairs,
    fill_rows,
    gather_values,
    group_rows,
    quantize_rows,
    route_rows,
    uploaded,
    weigh_rows,
)
from ...transports.base import Transport
from ...transports.comm_requests import CommRequest
from ..config import DispatchConfig, fill_value
from ..dispatch_record import DispatchRecord, Tokens

T = TypeVar("T")
Steps = Generator[CommRequest, Any, T]
"""A run of one rank: yields communication requests, receives their answers and returns T."""
Read = Callable[..., list[torch.Tensor]]
"""(buffers, release=None): reads the destinations' buffers and returns tensors of this rank's pairs. `release`, only
for one buffer of each destination: the window to release."""
Take = Callable[[torch.Tensor], None]
"""Processes the receive buffer once rows have arrived, possibly in place."""
# Operations, added to the dispatcher's fingerprint. The requests of an operation count up from there.
DISPATCH, COMBINE, BACKWARD, PAIR_NUMBERS, UNDISPATCH = 0, 8, 16, 24, 32
OPERATIONS = {
    DISPATCH: "dispatch",
    COMBINE: "combine",
    BACKWARD: "backward of combine",
    UNDISPATCH: "backward of dispatch",
}
REFUSED = -1
"""Among a rank's counts in place of its number of bad ids: it takes part only to tell that it refuses its arguments."""
ROUTING = "routing of one dispatch, held until backward"
"""A key of `TokenTransfer.nbytes`."""


class Shared(NamedTuple):
    """The result of `TokenTransfer._share`."""

    into: Any
    """The receive buffers of all ranks, for `_deliver`."""
    counted: CountedPairs | None = None
    """Of the ids, if they were given."""
    matrix: torch.Tensor | None = None
    """Likewise: all ranks' counts, int32 [W, S + 1] or with more columns. Peers may write it again once the rows are
    delivered."""


class Delivery(NamedTuple):
    """The arguments of `TokenTransfer._deliver`."""

    operation: int
    record: DispatchRecord
    x: torch.Tensor
    """[T, H], the rows of this rank's tokens; packed, if there are payloads, or if they have been quantized."""
    into: Any
    """The receive buffers, as returned by `_share`."""
    weights: torch.Tensor | None = None
    """float32 [T, K], delivered beside the rows."""
    take: Take | None = None
    """Default: received rows stay in the first receive buffer."""


class TokenTransfer:
    """Rank `ranks[me]` of a dispatcher of `ranks`.

    Args:
        fingerprint: of the dispatcher, equal on all ranks; the last 8 bits are zero.

    Attributes:
        in_chunks: rows travel in chunks, which DispatchRecord describes.
        in_windows: rows travel through windows, which dispatchers share.
        fixed_size: chunks have a fixed size.
        two_level: tokens cross the network once for each node, as DispatchRecord.forwards describes.
        deduped: tokens cross once for each rank, as DispatchRecord.deduped describes.
        algorithm: how rows travel, in words.
        extra_words: words that a rank sends to each other rank with its counts.
        tells_refusals: whether all ranks read the counts of a dispatch on the host, so that a rank can tell there that
            it refuses its arguments.
        quantizes_rows: whether rows may be quantized as they are pushed. See `pushed_quantized`.
        peers: the other active ranks, starting with the one after this rank.
    """

    in_chunks: ClassVar[bool] = False
    in_windows: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = False
    two_level: ClassVar[bool] = False
    deduped: ClassVar[bool] = False
    algorithm: ClassVar[str] = ""
    extra_words: ClassVar[int] = 0
    quantizes_rows: ClassVar[bool] = False
    tells_refusals: bool = False

    @classmethod
    def nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> dict[str, int]:
        """Return the maximum bytes of memory of one rank by purpose.

        Args:
            chunk_capacity: rows of a chunk; None: exact sizes, or no chunks.
        """
        row = config.hidden * config.dtype.itemsize + 4  # with its weight
        dispatched = config.dispatched_nbytes + 4
        # Physical experts, places and rows of pairs, and the counts of all ranks.
        routing = config.most_pairs * 16 + config.ranks * (config.bounds[-1] + 1) * 8
        return {
            cls.received(config): config.rows * dispatched,
            "gradients received, in the backward of combine": config.rows * row,
            ROUTING: routing,
        }

    @classmethod
    def layers_nbytes(cls, config: DispatchConfig, chunk_capacity: int | None) -> tuple[int, int]:
        """Return the maximum bytes of one rank in the training of a model whose layers have such dispatchers: those
        that all layers share, or need one after another, and those that each layer holds until its backward."""
        purposes = cls.nbytes(config, chunk_capacity)
        held = {ROUTING} | ({cls.received(config)} if config.save != "redispatch" else set())
        each = sum(nbytes for purpose, nbytes in purposes.items() if purpose in held)
        return sum(purposes.values()) - each, each

    @classmethod
    def received(cls, config: DispatchConfig) -> str:
        """Return how long memory for received rows is held, in words."""
        return {
            "buffer": "rows received, held until backward",
            "copy": "rows received, twice while they are copied, then once until backward",
            "redispatch": "rows received, held until the experts are done, and again during their backward",
        }[config.save]

    def __init__(
        self,
        config: DispatchConfig,
        transport: Transport,
        ranks: tuple[int, ...],
        me: int,
        device: torch.device,
        fingerprint: int,
    ) -> None:
        self.config, self.transport, self.ranks, self.me = config, transport, ranks, me
        self.device, self.fingerprint = device, fingerprint
        self._refuses = False
        self._unused_rows = fill_value(config.zero_rows)
        self.physical_experts = PhysicalExperts.divided(config.bounds, device)
        self._set_physical_experts()
        self._nodes: torch.Tensor | None = None
        """int32 [W]: the node of each destination of `DispatchRecord.rows`, ascending; None: they share one."""
        self.peers = self._active_peers()
        self.tables = AddressTables(device)
        self.launch = RowLaunch.for_rows(config.hidden, config.dtype.itemsize)
        self._error: torch.Tensor | None = None
        """int64 [1]: not 0 if the counts of the matrix may not be those of this dispatch."""

    def use_config(self, config: DispatchConfig) -> None:
        """Use another config from now on, which differs in the experts of physical experts or the active ranks only."""
        # The fingerprint is that of a config and of the dispatcher's number.
        self.fingerprint = config.fingerprint(self.config.number_of(self.fingerprint))
        if config.active_ranks != self.config.active_ranks:
            self.config = config
            self.peers = self._active_peers()
        self.config = config
        self._set_physical_experts()

    def _active_peers(self) -> tuple[int, ...]:
        ranks = self.config.ranks
        return tuple(self.ranks[r] for r in (*range(self.me + 1, ranks), *range(self.me)) if self.config.is_active(r))

    def _set_physical_experts(self) -> None:
        """Upload the physical expert to which this rank sends each expert's tokens, unless they are equal."""
        table = self.config.physical_expert_of
        self._physical_expert_of = uploaded(np.array(table[self.me], np.int32), self.device) if table else None

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        """Send tokens to their destinations; return the received rows, [rows, H], and the record of this dispatch.

        Args:
            outs: memory for copies of rows and weights, and `new_scale`, if there is one; default: the result is the
                transport's memory.
            record: of an earlier dispatch of the same ids, so that ranks need not exchange counts.
        """
        # What arrives in a window is copied once, straight to where it is wanted.
        own = outs if outs and self.in_windows else None
        if record is None:
            own = own or (self._rows_to_receive(), self._new_numbers())
            into, counted, matrix = yield from self._share(DISPATCH, own, tokens.ids)
            assert counted is not None and matrix is not None
            counts, matrix = active_counts(self.config, matrix)
            record = self._located(counted, counts, (outs or own)[1])
            if self.config.active_ranks is not None:
                record = record._replace(matrix=matrix)
        else:
            # Which pooled buffer is wanted travels with counts.
            own = own or (self._new_rows(*self.config.dispatched), self._new_numbers())
            into, *_ = yield from self._share(DISPATCH, own)
            record = record._replace(weights=(outs or own)[1])
        self._fill_unused(record.groups, *(outs or own))
        yield from self._deliver(Delivery(DISPATCH, record, tokens.x, into, tokens.weights))
        return copied(own, outs, record.groups)[0], record

    def refuse_dispatch(self, message: str) -> Steps[None]:
        """Take part in a dispatch whose arguments this rank refuses, without tokens. Only with `tells_refusals`.

        Args:
            message: why, for the errors of peers.

        Raises:
            DisagreementError: as on all ranks, once they have exchanged their counts.
        """
        transport: Any = self.transport
        transport.rendezvous.tell_refusal(message)  # before peers look for it
        config = self.config
        x = self._empty((0, config.dispatched[0]), config.dispatched[1])
        ids, weights = self._empty((0, config.top_k), torch.int64), self._empty((0, config.top_k), torch.float32)
        self._refuses = True
        try:
            yield from self.dispatch(Tokens(x, ids, weights))
        finally:
            self._refuses = False

    def _check_refused(self, bad_ids: Sequence[int]) -> None:
        """
        Args:
            bad_ids: of each rank, as all ranks know them.

        Raises:
            DisagreementError: a rank refuses its arguments.
        """
        if REFUSED not in bad_ids:
            return
        transport: Any = self.transport
        if self._refuses:
            error = DisagreementError("this rank refuses its arguments")
            error.recoverable = True
            raise error
        raise transport.rendezvous.errors.refused(self.ranks[bad_ids.index(REFUSED)], recoverable=True)

    def combine(
        self,
        record: DispatchRecord,
        values: torch.Tensor,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        add: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> Steps[torch.Tensor | None]:
        """Write each token's sum to `out`. With `numbers`, float32 [rows], return those of each pair, [T, K]."""
        if numbers is None:
            given = (self._output(values, record),)
            yield from self._sum(COMBINE, record, given, out, weights, add, self.config.quantized_output)
            return None
        (of_pairs,) = yield from self._sum(UNDISPATCH, record, (values, numbers), out, weights, add)
        return of_pairs

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
        """Write each token's sum of the first of `given` to `out`; return the numbers of each pair of the others."""

        def read(buffers: Sequence[Buffers], release: WindowSignals | None = None) -> list[torch.Tensor]:
            combine_rows(record.rows, buffers[0], out, weights, add, self.launch, release, self._nodes, quantized)
            return [out, *[gather_values(record.rows, numbers) for numbers in buffers[1:]]]

        return (yield from self._fetch(operation, record, given, read))[1:]

    def combine_backward(
        self,
        record: DispatchRecord,
        gradient: torch.Tensor,
        values: torch.Tensor | None,
        out: torch.Tensor | None = None,
        weights_out: torch.Tensor | None = None,
    ) -> Steps[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the gradient of this rank's values, [rows, H], and, if they were weighted, of its rows' weights,
        float32 [rows], which the backward of dispatch returns to the pairs.

        Args:
            values: the combined values; None: they were not weighted.
            out: memory for a copy of the first gradient.
            weights_out: memory for the second.
        """
        outs, of_weights = None if out is None else (out,), None
        own = outs if outs and self.in_windows else (self._new_rows(),)
        into, *_ = yield from self._share(BACKWARD, own)
        self._fill_unused(record.groups, *(outs or own))
        delivery = Delivery(BACKWARD, record, gradient, into)
        if values is None:
            yield from self._deliver(delivery)
        else:
            of_weights, num_rows = self._new_numbers() if weights_out is None else weights_out, record.groups.num_rows
            if self._unused_rows is not None:
                fill_rows(of_weights, num_rows, self._unused_rows)

            def weigh(received: torch.Tensor) -> None:
                weigh_rows(received, values, record.weights, num_rows, own[0], of_weights)

            yield from self._deliver(delivery._replace(take=weigh))
        return copied(own, outs, record.groups)[0], of_weights

    def new_scale(self) -> torch.Tensor | None:
        """Return memory for the second payload of received rows, `DispatchRecord.scale`; None: the rows are unpacked
        when they are here."""
        return None

    def _output(self, values: torch.Tensor, record: DispatchRecord) -> torch.Tensor:
        """Return the rows that a combine of `values`, [rows, H], offers to peers, or sends."""
        quantized, packed = self.config.quantized_output, self.config.packed_output
        if quantized is None or packed is None:
            return values
        rows = self._empty((len(values), packed.words), torch.int32)
        quantize_rows(contiguous_rows(values), rows, quantized.scales_at, quantized.how, record.groups.num_rows)
        return rows

    def _launch_of(self, rows: torch.Tensor) -> RowLaunch:
        """Return how rows are pushed: packed ones differ from those of the experts' output."""
        return RowLaunch.for_rows(rows.shape[1], rows.itemsize)

    @property
    def pushed_quantized(self) -> QuantizedRows | None:
        """How dispatch quantizes rows as it pushes them; None: it is given rows as they are sent."""
        return self.config.quantized if self.quantizes_rows else None

    def _quantized(self, operation: int) -> QuantizedRows | None:
        return self.pushed_quantized if operation == DISPATCH else None

    def _share(self, operation: int, own: Sequence[torch.Tensor], ids: torch.Tensor | None = None) -> Steps[Shared]:
        """Make this rank's receive buffers `own` known to peers, count the pairs of `ids` and share the counts."""
        raise NotImplementedError

    def _count(self, ids: torch.Tensor, share: CountShare | None = None) -> CountedPairs:
        experts = self.physical_experts.count
        counted = count_pairs(ids, self.config.num_experts, self._physical_expert_of, experts, share)
        if self._refuses:
            counted.counts[-1] = REFUSED
            for matrix in share.matrices.tensors if share is not None else ():
                matrix[self.me, -1] = REFUSED
        return counted

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        """Store rows and weights at their destinations and zero the padding rows."""
        raise NotImplementedError

    def _fetch(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor], read: Read
    ) -> Steps[list[torch.Tensor]]:
        """Return `read` of all ranks' `given` buffers, which `record.rows` index."""
        raise NotImplementedError

    def _located(self, counted: CountedPairs, matrix: torch.Tensor, weights: torch.Tensor) -> DispatchRecord:
        """Return the record of a dispatch; `matrix` is not kept."""
        c = self.config
        groups, rows, counts = route_rows(
            counted, matrix, self.physical_experts, self.me, c.rows, c.align, c.expert_capacity, c.batched, self._error
        )
        return DispatchRecord(weights, groups, rows, counts)

    def _grouped(self, matrix: torch.Tensor, physical_experts: PhysicalExperts) -> Groups:
        c = self.config
        return group_rows(matrix, physical_experts, self.me, c.rows, c.align, c.expert_capacity, c.batched)

    def _fill_unused(self, groups: Groups, *buffers: torch.Tensor) -> None:
        """Fill the rows from `num_rows` on, which nobody writes. Done before delivery, so that the result of a failed
        rank stays overwritten."""
        if self._unused_rows is not None:
            for x in buffers:
                fill_rows(x, groups.num_rows, self._unused_rows)

    def _rows_to_receive(self) -> torch.Tensor:
        """Return memory for the rows of a dispatch, [rows, H]; packed ones, if there are payloads."""
        return self._new_rows(*self.config.dispatched)

    def output_rows(self, received: torch.Tensor) -> torch.Tensor:
        """Return memory for the experts' output, [rows, H], which `combine` copies the least of; `received`: the rows
        of the dispatch, or a view from their first element on."""
        return self._new_rows()

    def _new_rows(self, elements: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for rows, by default of the experts' output."""
        return self._empty((self.config.rows, elements or self.config.hidden), dtype or self.config.dtype)

    def _new_numbers(self) -> torch.Tensor:
        return self._empty((self.config.rows,), torch.float32)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.transport.empty(shape, dtype, self.device)


def active_counts(config: DispatchConfig, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts without pairs of experts on ranks that are not active, and those with them.

    Args:
        matrix: int32 [W, S + 1] or with more columns. Ranks that are not active have written nothing to it.
    """
    if config.active_ranks is None:
        return matrix, matrix
    active, kept = config.active_on(matrix.device)
    counts = torch.where(active, matrix[:, : len(kept)], 0)
    return torch.where(kept, counts, 0), counts


def pair_words(top_k: int) -> int:
    """Return the 4-byte words that travel with a token to the rank that forwards it: for each pair the weight, float32,
    and the physical expert, int16."""
    return top_k + (top_k + 1) // 2


def copied(
    received: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, groups: Groups
) -> Sequence[torch.Tensor]:
    """Copy the received rows to `outs` if there are any, and return the result."""
    if outs is None or outs is received:
        return received
    for rows, out in zip(received, outs, strict=True):
        copy_rows(rows, out, groups.num_rows)
    return outs
