"""Buffers that the ranks of a group keep ready for each other's next pushes."""

from __future__ import annotations

import torch

from ..requests import Address
from .allocator import Allocator

LARGEST_KEPT = 1 << 20
"""Bytes; a step with a larger buffer on any rank meets before it pushes, which then costs little beside the copies."""
MOST_KEPT = 16 << 20
"""Bytes a group keeps at most, counting each step's largest buffer."""


class ReceiveBuffers:
    """Where the next run of each step will land: this rank's buffer, and the addresses of its peers'.

    The meeting that ends a run offers the buffers of the next one, so that one meeting a run is enough. A rank offers
    none where it runs a step for the first time, which may be the last, or where its limit has no room. All ranks of
    the group see all offers, and keep buffers if everyone offered one. What goes again follows from sizes and from the
    group's own sequence of steps. So what is kept is alike on all ranks: one that finds buffers here knows that its
    peers find theirs.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator  # whose limit bounds what is kept in all groups
        self._kept: dict[int, tuple[torch.Tensor, Address, list[Address], int, int]] = {}
        self._bytes = 0

    def take(self, fingerprint: int) -> tuple[torch.Tensor, Address, list[Address], int, int] | None:
        """The buffers of the step that `fingerprint` names, if they are kept: this rank's, its address, and those of
        the peers' buffers. What follows is `keep` or `let_go`: until then they count as kept."""
        return self._kept.pop(fingerprint, None)

    def have_room(self, nbytes: int) -> bool:
        """Whether this rank may offer a buffer whose block is of so many bytes besides what counts as kept."""
        return self._allocator.may_be_ready(nbytes)

    def keep(
        self,
        fingerprint: int,
        buffer: torch.Tensor,
        own: Address,
        peers: list[Address],
        nbytes: int,
        largest: int,
        counted: bool = False,
    ) -> None:
        """Keep buffers, which everyone has offered, for the next run; the longest unused make room.

        Args:
            nbytes: of this rank's block.
            largest: the size of the largest buffer; alike on all ranks.
            counted: those that they follow have just been taken.
        """
        self._kept[fingerprint] = buffer, own, peers, nbytes, largest
        if counted:
            return
        self._bytes += largest
        while self._bytes > MOST_KEPT and self._kept:
            self.let_go(*self._kept.pop(next(iter(self._kept)))[3:])
        self._allocator.add_ready(nbytes)

    def let_go(self, nbytes: int, largest: int) -> None:
        """Buffers that were taken are not kept again."""
        self._bytes -= largest
        self._allocator.ready -= nbytes
