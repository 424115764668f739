"""Buffers that the ranks of a group keep ready for each other's next pushes."""

from __future__ import annotations

import torch

from .meeting import Address

LARGEST_KEPT = 16 << 20
"""Bytes; a step with a larger buffer on any rank meets before it pushes, which then costs little beside the copies."""
MOST_KEPT = 64 << 20
"""Bytes a group keeps at most, counting each step's largest buffer."""


class Landings:
    """Where the next run of each step will land: this rank's buffer, and the addresses of its peers'.

    The meeting that ends a run offers the buffers of the next one, so that one meeting a run is enough. What is kept
    follows from sizes and from the group's own sequence of steps, hence alike on all of its ranks, and nobody is asked:
    a rank that finds buffers here knows that its peers find theirs.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, Address, list[Address], int]] = {}
        self._bytes = 0

    def take(self, token: int) -> tuple[torch.Tensor, Address, list[Address]] | None:
        """The buffers of the step that `token` names, if they are kept; they are no longer.

        Returns this rank's buffer, its address, and those of the peers' buffers.
        """
        found = self._kept.pop(token, None)
        if found is None:
            return None
        self._bytes -= found[3]
        return found[:3]

    def keep(self, token: int, buffer: torch.Tensor, own: Address, peers: list[Address], nbytes: int) -> None:
        """Keep buffers for the next run; `nbytes` is the size of the largest. The longest unused make room."""
        self._kept[token] = buffer, own, peers, nbytes
        self._bytes += nbytes
        while self._bytes > MOST_KEPT:
            oldest = next(iter(self._kept))
            self._bytes -= self._kept.pop(oldest)[3]
