"""The lock that lets one thread of a process at a time make calls of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...errors import MeetingTimeoutError


class CallLock:
    """Held during a call, and while a call is bound; a thread may take it again. Others wait for it.

    All transports of a process group share one, because they share the numbers of calls, and connections. So the calls
    of a process have one order, whatever threads they are made on, and ranks wait for each other in a cycle only if
    their orders differ.

    Args:
        timeout: seconds that a thread waits for it.
        current_call: returns the call that the process is in, for errors.
    """

    def __init__(self, rank: int, timeout: float, current_call: Callable[[], object]) -> None:
        self._rank, self._timeout, self._current_call = rank, timeout, current_call
        self._lock = threading.RLock()
        self.acquire_now: Callable[[bool], bool] = self._lock.acquire
        """With False: take it if no other thread holds it; returns whether it was taken."""
        self.release = self._lock.release

    def acquire(self) -> None:
        """
        Raises:
            MeetingTimeoutError: another thread did not release it within the timeout.
        """
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=min(self._timeout, threading.TIMEOUT_MAX)):
            raise MeetingTimeoutError(
                f"rank {self._rank}: another thread of this process has been in calls for {self._timeout:g} s, at last "
                f"in {self._current_call()}; allowed: one call at a time, in the same order on all ranks"
            )

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
