"""ChunkExchange: every rank of a dispatcher sends a chunk of rows to every other, in an all-to-all or in messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...transports.backend_limits import BACKENDS
from ...transports.base import TwoSidedTransport
from ...transports.comm_requests import HEADER, AllToAll, Transfer
from .base import Steps


class Rows(NamedTuple):
    """Contiguous rows to send and to receive, by rank of the dispatcher."""

    sends: torch.Tensor
    send_sizes: list[int]
    """The number of rows to each rank."""
    receives: torch.Tensor
    receive_sizes: list[int]


class ChunkExchange:
    """The exchanges of rank `ranks[me]` on a two-sided transport.

    On gloo a message costs more than copying small chunks: they travel in one all-to-all of the process group, with
    room for the largest message of any request, as the executor's do (`step_sendrecv`). Larger ones are not copied.
    """

    def __init__(self, transport: TwoSidedTransport, ranks: tuple[int, ...], me: int) -> None:
        self._ranks, self._me = ranks, me
        self._others = [r for r in range(len(ranks)) if r != me]
        self._group = transport.group_order(ranks)
        self._limit = 0  # bytes of a chunk in an all-to-all; 0: no process group has exactly these ranks
        if self._group is not None and self._others:
            self._limit = BACKENDS[transport.backend].all_to_all
        self._order = [ranks.index(rank) for rank in self._group or ()]

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
            active: the ranks of the dispatcher that take part; None: all.
            collectives: whether an all-to-all may be used.
            fingerprint: of the request; no rank receives rows of another one.
            most: the largest number of rows from any rank to another one, or a bound that is equal on all ranks.
        """
        outgoing = [_split(part.sends, part.send_sizes) for part in parts]
        incoming = [_split(part.receives, part.receive_sizes) for part in parts]
        for sent, received in zip(outgoing, incoming, strict=True):
            received[self._me].copy_(sent[self._me])
        collectives = collectives and active is None
        if collectives and 0 < most * sum(_row_nbytes(part.sends) for part in parts) <= self._limit:
            yield from self._all_to_all(fingerprint, outgoing, incoming)
            return
        others = self._others if active is None else [r for r in active if r != self._me]
        yield Transfer(
            tuple((self._ranks[r], part[r]) for r in others for part in outgoing if part[r].numel()),
            tuple((self._ranks[r], part[r]) for r in others for part in incoming if part[r].numel()),
            fingerprint,
            group=self._group,
        )

    def run_bounded(
        self,
        fingerprint: int,
        sends: Sequence[tuple[torch.Tensor, torch.Tensor]],
        bounds: tuple[int, int],
        length: Callable[[torch.Tensor], int],
        new: Callable[[int], torch.Tensor],
        collectives: bool = True,
    ) -> Steps[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Exchange two parts of which the receivers know only a bound, and return those of each rank: uint8 tensors,
        the second of which other bytes may follow. Only where the transport takes messages shorter than their memory.

        Args:
            sends: uint8 [bytes], for each rank; not empty.
            bounds: the largest bytes of either part, equal on all ranks.
            length: returns the bytes of the first part, given memory that begins with it.
            new: returns memory of so many bytes.
        """
        results: list[Any] = list(sends)
        if collectives and 0 < sum(bounds) <= self._limit:
            arrived = yield from self._bytes_of_others(fingerprint, dict(enumerate(sends)))
            for r, message in arrived.items():
                n = length(message)
                results[r] = message[:n], message[n:]
            return results
        for r in self._others:
            results[r] = tuple(new(bound) for bound in bounds)
        yield Transfer(
            tuple((self._ranks[r], part) for r in self._others for part in sends[r]),
            tuple((self._ranks[r], part) for r in self._others for part in results[r]),
            fingerprint,
            group=self._group,
            bounded=True,
        )
        for r in self._others:
            first, second = results[r]
            results[r] = first[: length(first)], second
        return results

    def _all_to_all(
        self, fingerprint: int, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]
    ) -> Steps[None]:
        sends = {r: [part[r] for part in outgoing] for r in self._others}
        arrived = yield from self._bytes_of_others(fingerprint, sends)
        for r, message in arrived.items():
            begin = 0
            for part in incoming:
                end = begin + len(part[r])
                part[r].copy_(message[begin:end])
                begin = end

    def _bytes_of_others(
        self, fingerprint: int, sends: Mapping[int, Sequence[torch.Tensor]]
    ) -> Steps[dict[int, torch.Tensor]]:
        """Send bytes to all other ranks in one all-to-all; return memory that begins with those of each."""
        assert self._group is not None
        room, device = HEADER + self._limit, sends[self._others[0]][0].device
        header = torch.empty(HEADER, dtype=torch.uint8, device=device)
        others = [r for r in self._order if r != self._me]
        received = torch.empty(len(others) * room, dtype=torch.uint8, device=device)
        yield AllToAll(
            self._group,
            torch.cat([piece for r in others for piece in (header, *sends[r])]),
            received,
            [0 if r == self._me else HEADER + sum(map(len, sends[r])) for r in self._order],
            [room * (r != self._me) for r in self._order],
            fingerprint,
        )
        return {r: received[i * room + HEADER : (i + 1) * room] for i, r in enumerate(others)}


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each rank as uint8 [bytes]."""
    row = _row_nbytes(x)
    return flat_bytes(x).split([size * row for size in sizes])


def _row_nbytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.itemsize


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)
