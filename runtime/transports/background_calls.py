"""BackgroundCalls: calls of a process group that one thread carries out in order, while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from .call_lock import CallLock

T = TypeVar("T")


class BackgroundCalls:
    """Carries out calls on a thread of its own, in the order of `start`.

    From the start of a call until all are done the thread holds the lock of calls. So any other call that the process
    makes meanwhile waits for them, and ranks that start and make calls in the same order exchange in the same order.
    """

    def __init__(self, lock: CallLock) -> None:
        self._lock, self._mutex = lock, threading.Lock()
        self._unfinished, self._held = 0, False
        self._thread = ThreadPoolExecutor(1, "shardweave-calls")

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Have the thread make a call; return its future result. Waits only for calls that other threads make now.

        Raises:
            MeetingTimeoutError: another thread was in calls for longer than the timeout.
        """
        with self._mutex:
            self._unfinished += 1
            taken = self._thread.submit(self._take) if self._unfinished == 1 else None
        if taken is not None:
            try:
                taken.result()  # from here on other calls come after this one
            except BaseException:
                self._thread.submit(self._done)
                raise
        return self._thread.submit(self._run, call)

    def _take(self) -> None:
        if not self._held:
            self._lock.__enter__()
            self._held = True

    def _run(self, call: Callable[[], T]) -> T:
        try:
            self._take()
            return call()
        finally:
            self._done()

    def _done(self) -> None:
        with self._mutex:
            self._unfinished -= 1
            if self._held and not self._unfinished:
                self._held = False
                self._lock.__exit__()
