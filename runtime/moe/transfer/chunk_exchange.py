"""ChunkExchange: every rank of a dispatcher sends a chunk of rows to every other, in an all-to-all or in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        if collectives and self.takes_at_once(most * sum(_row_nbytes(part.sends) for part in parts)):
            yield from self._all_to_all(fingerprint, outgoing, incoming)
            return
        others = self._others if active is None else [r for r in active if r != self._me]
        yield Transfer(
            tuple((self._ranks[r], part[r]) for r in others for part in outgoing if part[r].numel()),
            tuple((self._ranks[r], part[r]) for r in others for part in incoming if part[r].numel()),
            fingerprint,
            group=self._group,
        )

    def takes_at_once(self, nbytes: int) -> bool:
        """Whether an all-to-all has room for `nbytes` from each rank to each other one."""
        return 0 < nbytes <= self._limit

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
        assert self._group is not None
        room, device = HEADER + self._limit, sends[self._others[0]][0].device
        header = torch.empty(HEADER, dtype=torch.uint8, device=device)
        others = [r for r in self._order if r != self._me]
        received = torch.empty(len(others) * room, dtype=torch.uint8, device=device)
        yield AllToAll(
            self._group,
            torch.cat([piece for r in others for piece in (header, *sends[r])]),
            received,
            [0 if r == self._me else HEADER + sum(part.numel() for part in sends[r]) for r in self._order],
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
