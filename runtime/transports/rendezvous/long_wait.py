"""LongWait: what a rank does while it waits for peers longer than a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from ....errors import DisagreementError
from .calls import CallRecord
from .peer_errors import PeerErrors

_logger = logging.getLogger(__name__)

FIRST_POLL = 0.1
"""Seconds of a wait after which a rank writes the call that it waits in, and reads those of its peers."""
WARN_AFTER = 30.0
"""Seconds of a wait after which a rank warns, once."""
_LONGEST_PAUSE = 1.0


class LongWait:
    """A wait for peers. It uses the store only after it has lasted for `FIRST_POLL` seconds."""

    def __init__(self, errors: PeerErrors) -> None:
        self._errors, self._start, self._polls = errors, time.monotonic(), 0
        self._pause = FIRST_POLL
        self._next = self._start + FIRST_POLL
        self._seen: dict[int, tuple[CallRecord, int]] = {}
        self._warned = False

    def poll(self, peers: Iterable[int]) -> None:
        """Write the call that this rank waits in, and check these peers, if enough time has passed since the last time.

        Raises:
            DisagreementError: a peer refused the call, or waits in another.
            PeerError: a peer has failed or ended.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._polls += 1
        peers = list(peers)
        try:
            self._errors.reports.write_waiting(self._polls, peers)
            for peer in peers:
                self._check(peer)
            if not self._warned and now - self._start > WARN_AFTER:
                self._warned = True
                self._warn(sorted(peers), now - self._start)
        except dist.DistError:  # the rank that hosts the store is gone
            for peer in peers:
                if error := self._errors.unreachable(peer):
                    raise error from None
        self._next = time.monotonic() + self._pause

    def _check(self, peer: int) -> None:
        errors = self._errors
        error = (
            errors.refusal(peer) or errors.call_mismatch(peer, self._is_still_waiting(peer)) or errors.peer_gone(peer)
        )
        if error:
            raise error

    def _is_still_waiting(self, peer: int) -> bool:
        """Whether a peer has been waiting in the same call since the last poll."""
        report = self._errors.reports.waiting(peer)
        if report is None:
            self._seen.pop(peer, None)
            return False
        before = self._seen.get(peer)
        if before is None or before[0] != report.call:
            self._seen[peer] = report.call, report.polls
            return False
        return report.polls > before[1]

    def _warn(self, peers: Sequence[int], seconds: float) -> None:
        calls = self._errors.calls
        statuses = "; ".join(self._errors.peer_status(peer) for peer in peers)
        _logger.warning(
            f"rank {calls.rank} has waited {seconds:.0f} s for ranks {list(peers)} in {calls.current}. {statuses}. Do "
            "all ranks make this call, and have all of them called shardweave.install() and adapt_fsdp() alike?"
        )

    def close(self) -> None:
        """The wait is over."""
        if self._polls:
            self._errors.reports.clear_waiting()


@contextmanager
def long_wait(errors: PeerErrors) -> Iterator[LongWait]:
    """A context for a wait for peers; the caller polls the `LongWait` in it."""
    wait = LongWait(errors)
    try:
        yield wait
        wait.close()
    except DisagreementError:
        raise  # the description stays in the store, for the errors of peers
    except BaseException:
        wait.close()
        raise
