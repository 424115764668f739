"""A name that the ranks of a group agree on through a store, which none of them has used before."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

import torch.distributed as dist

from ..errors import MeetingTimeoutError
from .shared_memory import read_when_posted


def agree_on_session(store: dist.Store, rank: int, ranks: Sequence[int], timeout: float) -> str:
    """The same new name on all ranks of a group, all of which call.

    What a store holds may be of an earlier life of the same processes, or of others. So each posts a word of its own,
    and which words of the others it has read; who finds its own word in a peer's post knows that the post is new.

    Raises:
        MeetingTimeoutError, PeerError: a rank did not come.
    """
    where, deadline = f"sessions/{tuple(ranks)}", time.monotonic() + timeout
    mine, posted = secrets.token_hex(8), ""
    seen: dict[int, str] = {}
    peers = [r for r in ranks if r != rank]
    pause = 1e-4
    while True:
        text = " ".join([f"{rank}:{mine}", *(f"{r}:{word}" for r, word in sorted(seen.items()))])
        if text != posted:
            store.set(f"{where}/{rank}", text)
            posted = text
        late = None
        for peer in peers:
            said = read_when_posted(store, f"{where}/{peer}", peer, timeout)
            words = dict(word.split(":") for word in said.split())
            seen[peer] = words[str(peer)]
            if words.get(str(rank)) != mine:
                late = peer
        words_seen = [mine if r == rank else seen[r] for r in ranks]
        if late is None and all(f"{r}:{seen[r]}" in posted.split() for r in peers):
            return hashlib.blake2b(" ".join(words_seen).encode(), digest_size=12).hexdigest()
        if late is not None and time.monotonic() > deadline:
            raise MeetingTimeoutError(f"rank {late} did not come within {timeout:g} s; rank {rank} was waiting for it")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
