"""Receive buffers that the ranks of a group keep for each other's next pushes."""

from __future__ import annotations

import torch

from ..comm_requests import Address
from .allocator import Allocator

LARGEST_KEPT = 1 << 20
"""Bytes. A step with a larger buffer on any rank has a barrier before its pushes, which costs little beside them."""
MOST_KEPT = 16 << 20
"""Bytes that a group keeps at most, counting the largest buffer of each step."""


class ReceiveBuffers:
    """For each step, the buffer of this rank that peers write into in the next run, and the addresses of the peers'.

    The barrier that ends a run offers the buffers of the next one, so that a run needs only one barrier. A rank offers
    none in the first run of a step, which may be its last, or if its limit has no room. All ranks of the group see all
    offers, and keep the buffers if every rank offered one. Which buffers are dropped follows from sizes and from the
    group's own sequence of steps, so all ranks keep the same: a rank that finds a buffer knows that its peers do.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator  # its limit bounds what is kept for all groups
        self._kept: dict[int, tuple[torch.Tensor, Address, list[Address], int, int]] = {}
        self._bytes = self._ready = 0

    def take(self, fingerprint: int) -> tuple[torch.Tensor, Address, list[Address], int, int] | None:
        """Take the buffers of a step: this rank's buffer, its address, the addresses of the peers, bytes of this rank's
        block, bytes of the largest buffer. None if none are kept. They count as kept until `keep` or `let_go`."""
        return self._kept.pop(fingerprint, None)

    def have_room(self, nbytes: int) -> bool:
        """Whether this rank may keep a further block of `nbytes`."""
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
        """Keep buffers that all ranks have offered for the next run; the least recently used ones are dropped for them.

        Args:
            nbytes: of this rank's block.
            largest: of the largest buffer of the group; equal on all ranks.
            counted: they replace buffers that were taken and still count.
        """
        self._kept[fingerprint] = buffer, own, peers, nbytes, largest
        if counted:
            return
        self._bytes += largest
        while self._bytes > MOST_KEPT and self._kept:
            self.let_go(*self._kept.pop(next(iter(self._kept)))[3:])
        self._ready += nbytes
        self._allocator.add_ready(nbytes)

    def let_go(self, nbytes: int, largest: int) -> None:
        """No longer count buffers that were taken and are not kept again."""
        self._bytes -= largest
        self._ready -= nbytes
        self._allocator.ready -= nbytes

    def drop_all(self) -> object:
        """Keep nothing any longer, and no longer count what was taken; return the buffers. All ranks do so at the same
        place in their sequence of steps."""
        kept, self._kept = self._kept, {}
        self._allocator.ready -= self._ready
        self._bytes = self._ready = 0
        return kept
