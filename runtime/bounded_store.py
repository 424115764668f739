"""A store of torch.distributed whose operations have a time limit."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_Job = tuple["concurrent.futures.Future[T]", Callable[[dist.Store], T]]
_LAST_ANSWER = 1.0  # seconds that an answer may take at the end of a wait, and at the end of the process


class BoundedStore:
    """Runs operations on a store in a thread of its own, in order, and waits for each at most for a given time.

    A client of torch's TCPStore waits for the answer without a limit. If the host of the store vanishes from the
    network without closing the connection, this takes until the kernel gives up, many minutes later.

    An operation that is not waited for any longer stays in progress: if the host comes back, it is completed, and
    the store can be used again. When the process ends, its connection is closed.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._closed = store, False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: concurrent.futures.Future | None = None
        weakref.finalize(self, self._jobs.put, None)
        _open_stores.add(self)

    def run(self, operation: Callable[[dist.Store], T], within: float) -> T:
        """`operation(store)`.

        Raises:
            dist.DistError: the store cannot be reached, did not answer within `within` seconds, or has not yet answered
                an earlier operation that was late.
        """
        if self._closed:
            raise dist.DistStoreError("the process is ending")
        if self._overdue is not None:
            if not self._overdue.done():
                raise dist.DistStoreError("the store has not answered an earlier request")
            self._overdue = None
        if self._thread is None or not self._thread.is_alive():  # it ends in a forked process
            self._thread = threading.Thread(
                target=_work, args=(self._store, self._jobs), name="shardweave-store", daemon=True
            )
            self._thread.start()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._jobs.put((future, operation))
        try:
            return future.result(max(within, 0.0))
        except concurrent.futures.TimeoutError:
            self._overdue = future
            raise dist.DistStoreError(f"the store did not answer within {within:.3g} s") from None

    def wait(self, keys: Sequence[str], within: float) -> None:
        """Wait until all of `keys` are written. Operations of other threads go on meanwhile.

        Raises:
            dist.DistError: as `run`, or they are not written within `within` seconds.
        """
        deadline, pause, asked = time.monotonic() + within, 1e-4, list(keys)
        while not self.run(lambda store: store.check(asked), max(deadline - time.monotonic(), _LAST_ANSWER)):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"not written within {within:.3g} s: {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def with_own_connection(self, within: float) -> BoundedStore:
        """The same store by another connection, where operations do not wait for those of this one; this one if the
        store has no connections, as that of a fake process group, or cannot be reached within `within` seconds."""
        with suppress(RuntimeError):
            several: Any = self._store
            return BoundedStore(self.run(lambda _: several.clone(), within))
        return self

    def close(self) -> None:
        """End the thread, and with it an operation in progress: its connection is closed if it does not answer soon."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_ANSWER)
            if self._thread.is_alive():
                _close_connections(_port_of(self._store))
                self._thread.join(_LAST_ANSWER)


_open_stores: weakref.WeakSet[BoundedStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Up to Python 3.13 a thread that comes back from an operation while the interpreter ends is unwound, which C++ does
    # not allow: the process would abort.
    for store in list(_open_stores):
        store.close()


def _port_of(store: Any) -> int | None:
    """The port of the server of a store; None if it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)


def _close_connections(port: int | None) -> None:
    """Shut down the connections of this process to a port. A store does not tell which of them is its own."""
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.getpeername()[1:2] == (port,):
                    connection.shutdown(socket.SHUT_RDWR)


def _work(store: dist.Store, jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, operation = job
        try:
            future.set_result(operation(store))
        except BaseException as error:
            future.set_exception(error)
        del future, operation, job
