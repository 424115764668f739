"""A thread that looks after waits inside of torch.distributed, which the waiting thread cannot leave by itself."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable

from ...errors import TransportError
from .rendezvous import FIRST_LOOK, LongWait, Rendezvous

_PERIOD = FIRST_LOOK / 2
_IDLE_AFTER = 20  # periods without a wait


class WaitWatcher:
    """Between `began` and `ended` the thread looks for peers that will not come, and then ends the wait from outside.

    While no calls are made the thread sleeps; while waits are short it only wakes up now and then.

    Args:
        end_waits: makes every wait of this process raise.

    Attributes:
        error: why the wait was ended.
    """

    def __init__(self, rendezvous: Rendezvous, end_waits: Callable[[], None]) -> None:
        self._rendezvous, self._end_waits = rendezvous, weakref.WeakMethod(end_waits)
        self._awaited: Callable[[], Iterable[int]] | None = None
        self._serial = 0
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: TransportError | None = None

    def began(self, late: Callable[[], Iterable[int]]) -> None:
        """This rank waits from now on, for the peers that `late` gives whenever it is asked, by the thread. Peers that
        have come may be in a later call, and are not among them."""
        self._serial += 1
        self._awaited = late
        if not self._busy.is_set():
            self._busy.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._busy), name="shardweave-waits", daemon=True
                )
                self._thread.start()

    def awaits(self, late: Callable[[], Iterable[int]]) -> None:
        """The same wait goes on, for these."""
        self._awaited = late

    def ended(self) -> None:
        self._awaited = None

    def look(self, serial: int, wait: LongWait | None) -> tuple[int, LongWait | None]:
        """One round of the thread: the number of the wait that it saw, and what it knows of it."""
        late, now = self._awaited, self._serial
        if late is None or now != serial or wait is None:
            if wait is not None:
                wait.over()
            return now, None if late is None else LongWait(self._rendezvous)
        try:
            wait.look(late())
        except TransportError as error:
            if self._awaited is not None and self._serial == now:
                self.error = error
                end_waits = self._end_waits()
                if end_waits is not None:
                    end_waits()
            return now, None
        return now, wait


def _watch(watcher: weakref.ref[WaitWatcher], busy: threading.Event) -> None:
    try:
        _watch_on(watcher, busy)
    finally:
        busy.clear()  # the next wait starts another thread


def _watch_on(watcher: weakref.ref[WaitWatcher], busy: threading.Event) -> None:
    serial, idle = 0, 0
    wait: LongWait | None = None
    while True:
        of = watcher()
        if of is None:
            return
        seen, wait = of.look(serial, wait)
        idle = idle + 1 if wait is None and seen == serial else 0
        serial = seen
        if idle > _IDLE_AFTER:
            busy.clear()
            if of._awaited is not None or of._serial != serial:  # it began in between
                busy.set()
            idle = 0
        del of
        if busy.is_set():
            time.sleep(_PERIOD)
        else:
            busy.wait(5.0)
