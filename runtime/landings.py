"""Buffers that the ranks of a group keep ready for each other's next pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .meeting import Address

LARGEST_KEPT = 1 << 20
"""Bytes; a step with a larger buffer on any rank meets before it pushes, which then costs little beside the copies."""
MOST_KEPT = 16 << 20
"""Bytes a group keeps at most, counting each step's largest buffer."""


class Pool(Protocol):
    """The memory that buffers are of, which bounds what is kept in all groups."""

    def may_keep_ready(self, nbytes: int) -> bool: ...

    def add_ready(self, nbytes: int, number: int) -> None: ...


class Landings:
    """Where the next run of each step will land: this rank's buffer, and the addresses of its peers'.

    The meeting that ends a run offers the buffers of the next one, so that one meeting a run is enough. A rank offers
    none where it runs a step for the first time, which may be the last, or where its limit has no room. All ranks of
    the group see all offers, and keep buffers if everyone offered one. What goes again follows from sizes and from the
    group's own sequence of steps. So what is kept is alike on all ranks: one that finds buffers here knows that its
    peers find theirs.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[int, tuple[torch.Tensor, Address, list[Address], int]] = {}
        self._bytes = 0

    def take(self, token: int) -> tuple[torch.Tensor, Address, list[Address]] | None:
        """The buffers of the step that `token` names, if they are kept; they are no longer.

        Returns this rank's buffer, its address, and those of the peers' buffers.
        """
        found = self._kept.pop(token, None)
        if found is None:
            return None
        self._let_go(found)
        return found[:3]

    def have_room(self, nbytes: int) -> bool:
        """Whether this rank may offer a buffer of so many bytes."""
        return self._pool.may_keep_ready(nbytes)

    def keep(self, token: int, buffer: torch.Tensor, own: Address, peers: Sequence[Address], largest: int) -> None:
        """Keep buffers, which everyone has offered, for the next run; `largest` is the size of the largest. The longest
        unused make room."""
        self._kept[token] = buffer, own, list(peers), largest
        self._bytes += largest
        self._pool.add_ready(buffer.nbytes, 1)
        while self._bytes > MOST_KEPT:
            self._let_go(self._kept.pop(next(iter(self._kept))))

    def _let_go(self, kept: tuple[torch.Tensor, Address, list[Address], int]) -> None:
        self._bytes -= kept[3]
        self._pool.add_ready(kept[0].nbytes, -1)
