"""OneExchangeTransfer: a rank on gloo whose dispatch is one exchange, of messages with counts, weights and rows.

A rank knows its own counts before those of its peers. If no pair can be dropped, these determine what it sends, and an
exchange of counts ahead of the rows would only cost its wait. A message may have fewer bytes than its receiver has room
for. Rows of combine and of backward are packed straight into such messages, too. Results are those of SendRecvTransfer.

Indices and messages are numpy arrays: calls on a few rows cost less in numpy than in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....kernels import Groups, RowsInParts, TokenRows, host_array, host_tensor, locate_rows, push_rows
from ..config import DispatchConfig
from ..dispatch_record import Chunks, DispatchRecord, Tokens, chunk_sizes
from .base import DISPATCH, Delivery, Read, Steps, copied
from .chunk_exchange import Bytes, row_nbytes
from .sendrecv import SendRecvTransfer

MOST_ROOM = 1 << 28
"""Bytes of room for messages of all ranks; only those that messages have filled take memory."""

Array = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """Rows of all messages, to be read or written."""

    rows: Array
    """[R, ...]."""
    places: Ints
    """For each row of the messages, one after another, the row among `rows`."""


class OneExchangeTransfer(SendRecvTransfer):
    """Ranks send rows before they know their peers' counts."""

    algorithm = "one chunk of exact size per pair of ranks, in one message with its counts and weights"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._largest_message = _largest_message(self.config)
        with torch.inference_mode(False):
            self._nowhere = torch.empty(0, dtype=torch.int32, device="cpu")
            """In place of fields of `Groups` that nobody reads."""

    def dispatch(
        self, tokens: Tokens, outs: Sequence[torch.Tensor] | None = None, record: DispatchRecord | None = None
    ) -> Steps[tuple[torch.Tensor, DispatchRecord]]:
        config = self.config
        if record is not None or config.active_ranks is not None:
            return (yield from super().dispatch(tokens, outs, record))
        counted = self._count(tokens.ids)
        counts = counted.counts.numpy()
        # Messages have rows in order of physical expert, token and k; none is dropped.
        begins = np.zeros(len(counts), np.int32)
        counts[:-1].cumsum(out=begins[1:])
        rows_of_experts = Groups(host_tensor(begins[:-1]), counted.counts[:-1], *[self._nowhere] * 5)
        of_pairs = locate_rows(counted.physical_expert, counted.place, rows_of_experts, self.physical_experts)
        ends = begins.take(config.bounds)
        sends: list[int] = (ends[1:] - ends[:-1]).tolist()
        sent = self._pushed_messages(sends, of_pairs, rows_of_experts, tokens.x, tokens.weights, counts)
        arrived = yield from self._exchange_messages(DISPATCH, sent, self._largest_message)
        matrix = np.concatenate([message[: counts.nbytes] for message in arrived])
        matrix = matrix.view(np.int32).reshape(config.ranks, -1)
        self._check_refused(matrix[:, -1].tolist())
        groups, receives, padded, places = self._arrivals_of_all(matrix)
        own = rows, row_weights = self._rows_to_receive(), self._new_numbers()
        self._fill_unused(groups, *(outs or own))
        targets = [_Rows(host_array(x), places) for x in (row_weights, rows)]
        _unpack(arrived, receives, padded, targets, counts.nbytes)
        sizes = self._read(torch.from_numpy(np.array([*sends, *receives, padded, config.most_pairs])))
        chunks = Chunks(sizes, torch.from_numpy(places))
        record = DispatchRecord((outs or own)[1], groups, of_pairs, torch.from_numpy(matrix), chunks)
        return copied(own, outs, groups)[0], record

    def _deliver(self, delivery: Delivery) -> Steps[None]:
        operation, record, x, into, weights, take = delivery
        assert record.chunks is not None
        if self.config.active_ranks is not None:
            yield from super()._deliver(delivery)
            return
        sends, receives, padded, most = chunk_sizes(record.chunks)
        sent = self._pushed_messages(sends, record.rows, record.groups, x, weights)
        nbytes = row_nbytes(x) + 4 * (weights is not None)
        arrived = yield from self._exchange_messages(operation, sent, most * nbytes)
        targets = [_Rows(host_array(buffer), record.chunks.places.numpy()) for buffer in into[::-1]]
        _unpack(arrived, receives, padded, targets)
        if take is not None:
            take(into[0])

    def _fetch(
        self, operation: int, record: DispatchRecord, given: Sequence[torch.Tensor], read: Read
    ) -> Steps[list[torch.Tensor]]:
        assert record.chunks is not None
        sends, receives, _, most = chunk_sizes(record.chunks)
        most *= sum(map(row_nbytes, given))
        if self.config.active_ranks is not None or not (
            self.collectives and self._chunks.takes_at_once(most, packed=True)
        ):
            # Sizes are known, so that large messages arrive where their rows are read.
            return (yield from super()._fetch(operation, record, given, read))
        places = record.chunks.places.numpy()
        sources = [_Rows(host_array(x), places) for x in given[::-1]]
        arrived = yield from self._exchange_messages(operation, self._taken_messages(receives, sources), most)
        parts = _parts(arrived, sends, [rows for rows, _ in sources])
        return read([RowsInParts(rows, x.dtype) for rows, x in zip(parts[::-1], given, strict=True)])

    def _exchange_messages(self, operation: int, messages: Sequence[Bytes], most: int) -> Steps[list[Bytes]]:
        fingerprint = self.fingerprint + operation
        return (yield from self._chunks.exchange_messages(fingerprint, messages, most, self.collectives))

    def _pushed_messages(
        self,
        sends: Sequence[int],
        rows: TokenRows,
        groups: Groups,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        counts: Int32s | None = None,
    ) -> list[Bytes]:
        """Return a message to each rank: counts, then the weights of its `sends[r]` pairs and their rows of `x`.

        Args:
            rows: the rows of all messages.
            groups: not read; messages have no padding.
        """
        # Without rows: of which shape and dtype they are.
        given = [x[:0]] if weights is None else [weights[:0].reshape(-1), x[:0]]
        head = 0 if counts is None else counts.nbytes
        messages, parts = self._new_messages(sends, [host_array(rows) for rows in given], head)
        if counts is not None:
            of_counts = counts.view(np.uint8)
            for message in messages:
                message[:head] = of_counts
        *numbers, of_x = (RowsInParts(part, rows.dtype) for part, rows in zip(parts, given, strict=True))
        push_rows(x, rows, of_x, groups, self.me, weights, numbers[0] if numbers else None, most_padding=0)
        return messages

    def _taken_messages(self, sends: Sequence[int], sources: Sequence[_Rows]) -> list[Bytes]:
        """Return a message to each rank: `sends[r]` rows of each source."""
        messages, parts_of_sources = self._new_messages(sends, [rows for rows, _ in sources])
        for (rows, places), parts in zip(sources, parts_of_sources, strict=True):
            begin = 0
            for part in parts:
                end = begin + len(part)
                rows.take(places[begin:end], 0, part, "clip")  # what is not clipped goes through a buffer
                begin = end
        return messages

    def _new_messages(
        self, sends: Sequence[int], like: Sequence[Array], head: int = 0
    ) -> tuple[list[Bytes], list[list[Array]]]:
        """Return memory for a message to each rank, of `head` bytes and `sends[r]` rows as those of each array; and
        these rows, as `_parts` does."""
        nbytes = sum([_row_nbytes(array) for array in like])
        messages = self._chunks.new_messages([head + n * nbytes for n in sends])
        return messages, _parts(messages, sends, like, head)

    def _arrivals_of_all(self, matrix: Int32s) -> tuple[Groups, list[int], int, Ints]:
        """Return the groups of this rank, the rows from each source, the number of padding rows, and `Chunks.places`,
        where no row is dropped.

        Args:
            matrix: int32 [W, S + 1].
        """
        config, (low, high) = self.config, self.config.bounds[self.me : self.me + 2]
        add, align = np.add.reduce, config.align  # at less cost than `sum`
        received = matrix[:, low:high].astype(np.int64)
        counts = padded = add(received)
        if config.batched:
            padded = np.full_like(counts, config.expert_capacity)
        elif align > 1:
            padded = -(-counts // align) * align
        offsets = padded.cumsum()
        first = offsets - padded
        # Rows arrive in runs of one source and expert; the padding of each group follows as one run more.
        begins, lengths = (first + received.cumsum(0) - received).reshape(-1), received.reshape(-1)
        if padded is not counts:
            begins, lengths = np.concatenate((begins, first + counts)), np.concatenate((lengths, padded - counts))
        places = np.arange(int(add(lengths)))
        places += (begins - (lengths.cumsum() - lengths)).repeat(lengths)
        group_ends, overflow = offsets.astype(np.int32), np.array([0, add(matrix[:, -1])])
        num_rows = np.maximum.reduce(group_ends, initial=0, keepdims=True)
        fields = group_ends, counts, padded, num_rows, overflow
        groups = Groups(self._nowhere, self._nowhere, *map(host_tensor, fields))
        receives: list[int] = add(received, 1).tolist()
        return groups, receives, len(places) - sum(receives), places


def _parts(messages: Sequence[Bytes], sizes: Sequence[int], like: Sequence[Array], head: int = 0) -> list[list[Array]]:
    """Return for each array of `like` the rows of its shape and dtype that messages have from byte `head` on:
    `sizes[r]` rows of each."""
    parts = []
    begins = [head] * len(messages)
    for array in like:
        shape, dtype, nbytes = array.shape[1:], array.dtype, _row_nbytes(array)
        given = zip(messages, sizes, begins, strict=True)
        parts.append([np.ndarray((n, *shape), dtype, message, begin) for message, n, begin in given])
        begins = [begin + n * nbytes for begin, n in zip(begins, sizes, strict=True)]
    return parts


def _unpack(
    messages: Sequence[Bytes], receives: Sequence[int], padded: int, targets: Sequence[_Rows], head: int = 0
) -> None:
    """Store the rows that messages have from byte `head` on, `receives[r]` for each target; zero the rows after
    those."""
    for (rows, places), parts in zip(targets, _parts(messages, receives, [x for x, _ in targets], head), strict=True):
        begin = 0
        for part in parts:
            end = begin + len(part)
            rows[places[begin:end]] = part
            begin = end
        if padded:
            rows[places[begin : begin + padded]] = 0


def _row_nbytes(rows: Array) -> int:
    return math.prod(rows.shape[1:]) * rows.itemsize


def goes_at_once(config: DispatchConfig) -> bool:
    """Whether a rank may send rows before it knows its peers' counts, and has room for as many as they may send."""
    ranks = config.node_ranks
    if ranks is not None and ranks.order != sorted(ranks.order):
        return False  # rows are sorted by expert, and destinations by node
    return config.has_room_for_all and config.ranks * _largest_message(config) <= MOST_ROOM


def _largest_message(config: DispatchConfig) -> int:
    """Return the most bytes of counts, weights and rows from one rank to another."""
    return (config.bounds[-1] + 1) * 4 + config.most_pairs * (4 + config.dispatched_nbytes)
