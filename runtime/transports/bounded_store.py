"""A store of torch.distributed whose operations have a time limit."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_Job = tuple["concurrent.futures.Future[T]", Callable[[dist.Store], T]]


class BoundedStore:
    """Runs operations on a store in a thread of its own, in order, and waits for each at most for a given time.

    A client of torch's TCPStore waits for the answer without a limit. If the host of the store vanishes from the
    network without closing the connection, this takes until the kernel gives up, many minutes later.

    An operation that is not waited for any longer stays in progress: if the host comes back, it is completed, and
    the store can be used again.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: concurrent.futures.Future | None = None
        weakref.finalize(self, self._jobs.put, None)

    def run(self, operation: Callable[[dist.Store], T], within: float) -> T:
        """`operation(store)`.

        Raises:
            dist.DistError: the store cannot be reached, did not answer within `within` seconds, or has not yet answered
                an earlier operation that was late.
        """
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


def _work(store: dist.Store, jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, operation = job
        try:
            future.set_result(operation(store))
        except BaseException as error:
            future.set_exception(error)
        del future, operation, job
