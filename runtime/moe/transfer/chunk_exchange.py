"""ChunkExchange: every rank of a dispatcher sends a chunk of rows to every other, in an all-to-all or in messages."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...transports.backend_limits import BACKENDS
from ...transports.base import TwoSidedTransport
from ...transports.comm_requests import HEADER, AllToAll, Transfer
from .base import Steps

Bytes = npt.NDArray[np.uint8]


class Rows(NamedTuple):
    """Contiguous rows to send and to receive, those of rank 0 of the dispatcher first.

    Attributes:
        sends: [sum of send_sizes, ...]
        send_sizes: the number of rows to each rank.
        receives: [sum of receive_sizes, ...]
        receive_sizes: the number of rows from each rank.
    """

    sends: torch.Tensor
    send_sizes: list[int]
    receives: torch.Tensor
    receive_sizes: list[int]


class _Memory:
    """Bytes on the CPU as a tensor and as an array, of which slices cost less."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.array: Bytes = self.tensor.numpy()

    def grow(self, nbytes: int) -> None:
        """Have so many bytes at least. What was there is lost."""
        if len(self.array) < nbytes:
            with torch.inference_mode(False):
                self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self.array = self.tensor.numpy()

    def first(self, nbytes: int) -> torch.Tensor:
        """The first bytes."""
        return torch.from_numpy(self.array[:nbytes])


class _MessageMemory(NamedTuple):
    """Memory for the messages of one exchange. Kept, because fresh pages cost more than copying into them; only what
    messages have filled has pages."""

    sends: _Memory
    """Of those to the other ranks, followed by that to this rank itself."""
    receives: _Memory
    """Of those from the others."""


# By transport, ranks and the index of this one: all its exchanges among these ranks use the same, one after another.
_memories: weakref.WeakKeyDictionary[TwoSidedTransport, dict[tuple[tuple[int, ...], int], _MessageMemory]] = (
    weakref.WeakKeyDictionary()
)


class ChunkExchange:
    """The exchanges of rank `ranks[me]` on a two-sided transport.

    On gloo a message costs more than copying small chunks: they travel in one all-to-all of the process group, with
    room for the largest message of any request, as the executor's do (`step_sendrecv`). Larger ones are messages, but
    for those that are packed in any case and that there is room for.
    """

    def __init__(self, transport: TwoSidedTransport, ranks: tuple[int, ...], me: int) -> None:
        self._ranks, self._me = ranks, me
        self._others = [r for r in range(len(ranks)) if r != me]
        self._group = transport.group_order(ranks)
        # Bytes of a chunk in an all-to-all, and of a packed message; 0: no process group has exactly these ranks.
        self._limit = self._packed_limit = 0
        if self._group is not None and self._others:
            limits = BACKENDS[transport.backend]
            self._limit, self._packed_limit = limits.all_to_all, limits.room(len(ranks))
        self._order = [ranks.index(rank) for rank in self._group or ()]
        self._in_group_order = [r for r in self._order if r != me]
        self._memory_order = (*(self._in_group_order or self._others), me)
        self._room = HEADER + self._packed_limit
        self._memory = _memories.setdefault(transport, {}).setdefault((ranks, me), _MessageMemory(_Memory(), _Memory()))

    def run(
        self,
        fingerprint: int,
        parts: Sequence[Rows],
        most: int,
        active: Sequence[int] | None = None,
        collectives: bool = True,
    ) -> Steps[None]:
        """Exchange the rows of all parts.

        Args:
            fingerprint: of the request; no rank receives rows of another one.
            parts: rows that go to the same ranks.
            most: the largest number of rows from any rank to another one, or a bound that is equal on all ranks.
            active: the ranks of the dispatcher that take part; None: all.
            collectives: whether an all-to-all may be used.
        """
        outgoing = [_split(part.sends, part.send_sizes) for part in parts]
        incoming = [_split(part.receives, part.receive_sizes) for part in parts]
        for sent, received in zip(outgoing, incoming, strict=True):
            received[self._me].copy_(sent[self._me])
        collectives = collectives and active is None
        if collectives and self.takes_at_once(most * sum(row_nbytes(part.sends) for part in parts)):
            yield from self._all_to_all(fingerprint, outgoing, incoming)
            return
        others = self._others if active is None else [r for r in active if r != self._me]
        yield Transfer(
            tuple((self._ranks[r], part[r]) for r in others for part in outgoing if part[r].numel()),
            tuple((self._ranks[r], part[r]) for r in others for part in incoming if part[r].numel()),
            fingerprint,
            group=self._group,
        )

    def takes_at_once(self, nbytes: int, packed: bool = False) -> bool:
        """Whether `nbytes` from each rank to each other one travel in an all-to-all; `packed`: as one message each."""
        return 0 < nbytes <= (self._packed_limit if packed else self._limit)

    def _all_to_all(
        self, fingerprint: int, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]
    ) -> Steps[None]:
        sends = {r: [part[r] for part in outgoing] for r in self._others}
        arrived = yield from self.bytes_of_others(fingerprint, sends)
        for r, message in arrived.items():
            begin = 0
            for part in incoming:
                end = begin + part[r].numel()
                part[r].copy_(message[begin:end])
                begin = end

    def bytes_of_others(
        self, fingerprint: int, sends: Mapping[int, Sequence[torch.Tensor]]
    ) -> Steps[dict[int, torch.Tensor]]:
        """Send uint8 tensors, one after another, to each other rank in one all-to-all, which takes them at once. Return
        for each memory that begins with what it sent: sizes need not be known."""
        device = sends[self._others[0]][0].device
        header = torch.empty(HEADER, dtype=torch.uint8, device=device)
        sizes = {r: HEADER + sum(part.numel() for part in sends[r]) for r in self._others}
        memory = torch.cat([piece for r in self._in_group_order for piece in (header, *sends[r])])
        received = torch.empty(len(self._others) * self._room, dtype=torch.uint8, device=device)
        yield self._request(fingerprint, memory, sizes, received)
        arrived = zip(self._in_group_order, received.split(self._room), strict=True)
        return {r: message[HEADER:] for r, message in arrived}

    def new_messages(self, nbytes: Sequence[int]) -> list[Bytes]:
        """Return memory for messages that `exchange_messages` sends, by rank, on the CPU. It may be written until then.

        Args:
            nbytes: of the message to each rank.
        """
        rooms = [HEADER + _whole_headers(n) for n in nbytes]
        memory = self._memory.sends
        memory.grow(sum(rooms))
        messages, begin, array = [memory.array] * len(rooms), 0, memory.array
        for r in self._memory_order:
            messages[r] = array[begin + HEADER : begin + rooms[r]]
            begin += rooms[r]
        return messages

    def exchange_messages(
        self, fingerprint: int, messages: Sequence[Bytes], most: int, collectives: bool
    ) -> Steps[list[Bytes]]:
        """Send `new_messages` to the other ranks. Return for each rank memory that begins with the message from it, to
        be read before the next exchange: sizes need not be known.

        Args:
            most: the bytes of the largest message, or a bound that is equal on all ranks.
            collectives: whether an all-to-all may be used.
        """
        arrived = list(messages)
        if not most:  # rows of no bytes
            return arrived
        at_once = collectives and self.takes_at_once(most, packed=True)
        order = self._in_group_order if at_once else self._others
        room, head = (self._room, HEADER) if at_once else (_whole_headers(most), 0)
        sent, received = self._memory
        received.grow(len(order) * room)
        if at_once:
            sizes = {r: HEADER + len(messages[r]) for r in order}
            yield self._request(fingerprint, sent.first(sum(sizes.values())), sizes, received.first(len(order) * room))
        else:
            sends = tuple((self._ranks[r], torch.from_numpy(messages[r])) for r in order)
            receives = zip(order, received.first(len(order) * room).split(room), strict=True)
            into = tuple((self._ranks[r], x) for r, x in receives)
            yield Transfer(sends, into, fingerprint, group=self._group, receives_are_bounds=True)
        for i, r in enumerate(order):
            arrived[r] = received.array[i * room + head : (i + 1) * room]
        return arrived

    def _request(
        self, fingerprint: int, sends: torch.Tensor, sizes: Mapping[int, int], receives: torch.Tensor
    ) -> AllToAll:
        assert self._group is not None
        return AllToAll(
            self._group,
            sends,
            receives,
            [sizes.get(r, 0) for r in self._order],
            [self._room * (r != self._me) for r in self._order],
            fingerprint,
        )


def _whole_headers(nbytes: int) -> int:
    """Round up to a multiple of the bytes of a header, so that what follows is aligned."""
    return -(-nbytes // HEADER) * HEADER


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each rank as uint8 [bytes]."""
    row = row_nbytes(x)
    return flat_bytes(x).split([size * row for size in sizes])


def row_nbytes(x: torch.Tensor) -> int:
    """Return the bytes of a row of `x`."""
    return math.prod(x.shape[1:]) * x.itemsize


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)
