"""A number from each rank to each other over gloo, before messages whose sizes follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

REFUSED = 0  # in place of a number
_TAG = 0x5EEF  # not that of other messages


class Agreement:
    """Of each pair of ranks, the numbers that they tell each other, in one order on both sides."""

    def __init__(self) -> None:
        # Of peers: numbers that came while this rank refused, and those sent then, which live until they are read.
        self._unread: Counter[int] = Counter()
        self._refusals: dict[int, list[object]] = {}

    def refuse(self, peers: Sequence[int]) -> None:
        """Tell peers that this rank will not come to the next `exchange`; wait for nobody."""
        word = torch.tensor([REFUSED], device="cpu")
        for peer in peers:
            with suppress(RuntimeError):  # peers that are gone need not be told
                self._refusals.setdefault(peer, []).append((word, dist.isend(word, peer, tag=_TAG)))
            self._unread[peer] += 1

    def exchange(
        self, peers: Sequence[int], number: int, start: Callable[[list[dist.P2POp]], Callable[[], None]]
    ) -> dict[int, int]:
        """What each peer tells; `start` begins operations, and what it returns waits for them."""
        word = torch.tensor([number], device="cpu")
        came = {
            peer: [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self._unread[peer] + 1)]
            for peer in peers
        }
        received = start([dist.P2POp(dist.irecv, w, peer, tag=_TAG) for peer, words in came.items() for w in words])
        sent = start([dist.P2POp(dist.isend, word, peer, tag=_TAG) for peer in peers])
        received()
        told = {peer: int(words[-1]) for peer, words in came.items()}
        for peer in peers:
            del self._unread[peer]
            self._refusals.pop(peer, None)
        if REFUSED not in told.values():  # who refuses does not receive
            sent()
        return told
