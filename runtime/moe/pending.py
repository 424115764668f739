"""PendingTokens: a dispatch or combine that has started; and those of one dispatcher, in order."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch

from ...errors import ArgumentError
from .overflow import Overflow

T = TypeVar("T")


class StartedCalls:
    """The dispatches and combines of a dispatcher that have started, in this order.

    Attributes:
        overflows: for each dispatch whose overflow has not been noted, the function that waits for it.
    """

    def __init__(self) -> None:
        self._pending: deque[weakref.ref[PendingTokens]] = deque()
        self.overflows: deque[Callable[[], torch.Tensor]] = deque()
        self._number = 0
        self._lock = threading.Lock()

    def add(self, pending: PendingTokens) -> int:
        """Add a call that has started; return its number."""
        with self._lock:
            while self._pending and self._pending[0]() is None:
                self._pending.popleft()
            self._pending.append(weakref.ref(pending))
            self._number += 1
            return self._number

    def add_overflow(self, overflow: Callable[[], torch.Tensor]) -> None:
        """Add a started dispatch, whose `Groups.overflow` this function waits for."""
        with self._lock:
            self.overflows.append(overflow)

    def note(self, noted: Overflow, last: object = None) -> None:
        """Note the overflow of started dispatches, up to the one that added `last`, if it is given. Waits for them. One
        that failed has none: its `finish` raises."""
        while True:
            with self._lock:
                if not self.overflows or (last is not None and last not in self.overflows):
                    return  # `last` was noted by a later call, or just now
                overflow = self.overflows.popleft()
            with suppress(Exception):
                noted.add(overflow())

    def begin_finish(self, pending: PendingTokens) -> None:
        """
        Raises:
            ArgumentError: an earlier call is not finished. Those that nothing refers to any more do not count.
        """
        with self._lock:
            while self._pending[0]() is None:
                self._pending.popleft()
            first = self._pending[0]()
        if first is not pending:
            raise ArgumentError(
                f"finish: of {pending}, before {first}; allowed: the order in which they were started, which "
                "is that of their backward on all ranks"
            )

    def end_finish(self) -> None:
        """The first call, which has begun to finish, is finished."""
        with self._lock:
            self._pending.popleft()


class PendingTokens(Generic[T]):
    """A dispatch or combine that has started, from `TokenDispatcher.dispatch_start` or `combine_start`.

    What was passed to it must not be written until `finish` has returned. Calls of a dispatcher are finished in the
    order in which they were started. One that is dropped unfinished still takes place, as its peers need.
    """

    def __init__(self, started: StartedCalls, kind: str, complete: Callable[[], T]) -> None:
        self._started, self._kind = started, kind
        self._complete: Callable[[], T] | None = complete
        self._error: Exception | None = None
        self._lock = threading.RLock()
        self._with_gradients = torch.is_grad_enabled()
        self._number = started.add(self)

    def __str__(self) -> str:
        return f"{self._kind} (started call {self._number} of its dispatcher)"

    def finish(self) -> T:
        """Wait for the call and return its result: `RoutedTokens` of a dispatch, the sums of a combine.

        On a GPU the current stream waits, not the host. Further calls return the same, or raise the same error.

        Raises:
            ArgumentError: an earlier dispatch or combine of the dispatcher is not finished.
            TransportError: a peer died, timed out, or made another call.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._complete is not None:
                self._started.begin_finish(self)
                try:
                    with torch.set_grad_enabled(self._with_gradients):
                        self._result = self._complete()
                except Exception as error:  # after an interrupt it can be finished again
                    self._error = error
                    raise
                finally:
                    if self._error is not None or hasattr(self, "_result"):
                        self._complete = None
                        self._started.end_finish()
            return self._result
