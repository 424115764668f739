"""A thread that ends waits inside torch.distributed, which the waiting thread cannot leave by itself."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable

from ...errors import TransportError
from .rendezvous.long_wait import FIRST_POLL, LongWait
from .rendezvous.peer_errors import PeerErrors

_PERIOD = FIRST_POLL / 2
_IDLE_AFTER = 20  # periods without a wait


class Watchdog:
    """Between `start` and `stop`, a thread checks whether the awaited peers have failed or make other calls. If so, it
    ends the wait.

    The thread sleeps while there are no calls, and wakes up rarely while waits are short.

    Args:
        end_waits: a method that makes every wait of this process raise.

    Attributes:
        error: why a wait was ended.
    """

    def __init__(self, errors: PeerErrors, end_waits: Callable[[], None]) -> None:
        self._errors, self._end_waits = errors, weakref.WeakMethod(end_waits)
        self._awaited: Callable[[], Iterable[int]] | None = None
        self._serial = 0
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: TransportError | None = None

    def start(self, peers: Callable[[], Iterable[int]]) -> None:
        """A wait begins. The thread calls `peers` for the ranks that are still awaited: those that have arrived, which
        may be in a later call, are not included."""
        self._serial += 1
        self._awaited = peers
        if not self._busy.is_set():
            self._busy.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._busy), name="shardweave-waits", daemon=True
                )
                self._thread.start()

    def update(self, peers: Callable[[], Iterable[int]]) -> None:
        """The current wait continues, for these peers."""
        self._awaited = peers

    def stop(self) -> None:
        """The wait is over."""
        self._awaited = None

    def poll(self, serial: int, wait: LongWait | None) -> tuple[int, LongWait | None]:
        """One round of the thread. Returns the serial number of the current wait and its `LongWait`, if any."""
        peers, now = self._awaited, self._serial
        if peers is None or now != serial or wait is None:
            if wait is not None:
                wait.close()
            return now, None if peers is None else LongWait(self._errors)
        try:
            wait.poll(peers())
        except TransportError as error:
            if self._awaited is not None and self._serial == now:
                self.error = error
                end_waits = self._end_waits()
                if end_waits is not None:
                    end_waits()
            return now, None
        return now, wait


class WatchedWait:
    """A context of waits for the peers that a function returns, one wait after the other."""

    __slots__ = ("_peers", "_watchdog")

    def __init__(self, watchdog: Watchdog, peers: Callable[[], Iterable[int]]) -> None:
        self._watchdog, self._peers = watchdog, peers

    def __enter__(self) -> None:
        self._watchdog.start(self._peers)

    def __exit__(self, *_: object) -> None:
        self._watchdog.stop()


def _watch(watchdog: weakref.ref[Watchdog], busy: threading.Event) -> None:
    try:
        _watch_loop(watchdog, busy)
    finally:
        busy.clear()  # the next wait starts another thread


def _watch_loop(watchdog: weakref.ref[Watchdog], busy: threading.Event) -> None:
    serial, idle = 0, 0
    wait: LongWait | None = None
    while True:
        instance = watchdog()
        if instance is None:
            return
        seen, wait = instance.poll(serial, wait)
        idle = idle + 1 if wait is None and seen == serial else 0
        serial = seen
        if idle > _IDLE_AFTER:
            busy.clear()
            if instance._awaited is not None or instance._serial != serial:  # a wait has begun since
                busy.set()
            idle = 0
        del instance
        if busy.is_set():
            time.sleep(_PERIOD)
        else:
            busy.wait(5.0)
