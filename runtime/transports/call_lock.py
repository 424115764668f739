"""The lock that lets one thread of a process at a time make calls of a process group."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ...errors import MeetingTimeoutError, TransportError


class CallLock:
    """Held during a call, and while a call is bound; a thread may take it again. Others wait for it.

    All transports of a process group share one, because they share the numbers of calls, and connections. So the calls
    of a process have one order, whatever threads they are made on, and ranks wait for each other in a cycle only if
    their orders differ. A forked child of the process can take none, and so makes no calls: the connections, the memory
    and the numbers of calls are the parent's, whose peers would take the child's messages for the parent's.

    Args:
        timeout: seconds that a thread waits for it.
        current_call: returns the call that the process is in, for errors.

    Attributes:
        current_call: as given; may be replaced.
        depth: how many blocks of the thread that holds it are in it.
    """

    def __init__(self, rank: int, timeout: float, current_call: Callable[[], object]) -> None:
        self._rank, self._timeout, self.current_call = rank, timeout, current_call
        self._lock = threading.RLock()
        self.depth = 0
        self.acquire_now: Callable[[bool], bool] = self._lock.acquire
        """With False: take it if no other thread holds it; returns whether it was taken. `depth` is the caller's."""
        self.release_now = self._lock.release
        _locks.add(self)

    def acquire(self, within: float | None = None) -> None:
        """Take it; `depth` is the caller's.

        Args:
            within: seconds to wait for it; None: the timeout.

        Raises:
            MeetingTimeoutError: another thread did not release it in time.
        """
        seconds = self._timeout if within is None else within
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise MeetingTimeoutError(
                f"rank {self._rank}: another thread of this process has been in calls for {seconds:g} s, at last "
                f"in {self.current_call()}; allowed: one call at a time, in the same order on all ranks"
            )

    def settle(self) -> None:
        """Release what this thread took without counting it: an interrupt came in between."""
        while not self.depth and self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def leave_to_parent(self) -> None:
        """Refuse every call, in a forked child, with a TransportError that no peer notices."""

        def refuse(within: object = None) -> Any:
            raise TransportError(
                f"rank {self._rank}: process {os.getpid()} is a forked child of this rank's; allowed: calls of the "
                f"rank's own process"
            )

        self.acquire_now = refuse
        self.acquire = refuse  # type: ignore[method-assign]

    def __enter__(self) -> None:
        try:
            self.acquire()
            self.depth += 1
        except BaseException:
            self.settle()
            raise

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.release_now()
        self.settle()


_locks: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in _locks:
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
