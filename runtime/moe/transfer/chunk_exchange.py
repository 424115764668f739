"""Every rank of a dispatcher sends a chunk of rows to every other, in messages of exact size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...transports.base import TwoSidedTransport
from ...transports.comm_requests import Transfer
from .base import Steps


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


class ChunkExchange:
    """The exchanges of rank `ranks[me]` on a two-sided transport."""

    def __init__(self, transport: TwoSidedTransport, ranks: tuple[int, ...], me: int) -> None:
        self._ranks, self._me = ranks, me
        self._group = transport.group_order(ranks)

    def run(self, fingerprint: int, parts: Sequence[Rows], active: Sequence[int] | None = None) -> Steps[None]:
        """Exchange the rows of all parts.

        Args:
            fingerprint: of the request; no rank receives rows of another one.
            parts: rows that go to the same ranks.
            active: the ranks of the dispatcher that take part; None: all.
        """
        outgoing = [_split(part.sends, part.send_sizes) for part in parts]
        incoming = [_split(part.receives, part.receive_sizes) for part in parts]
        for sent, received in zip(outgoing, incoming, strict=True):
            received[self._me].copy_(sent[self._me])
        others = [r for r in (range(len(self._ranks)) if active is None else active) if r != self._me]
        yield Transfer(
            tuple((self._ranks[r], part[r]) for r in others for part in outgoing if part[r].numel()),
            tuple((self._ranks[r], part[r]) for r in others for part in incoming if part[r].numel()),
            fingerprint,
            group=self._group,
        )


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each rank as uint8 [bytes]."""
    row = math.prod(x.shape[1:]) * x.itemsize
    return flat_bytes(x).split([size * row for size in sizes])


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)
