"""The run loop: executes the steps of a bound program and has a transport answer the requests they yield."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import record_function

from ...errors import DisagreementError, TransportError
from ..statistics import Redistribution
from ..transports.comm_requests import CommRequest
from ..transports.select import AnyTransport

T = TypeVar("T")
Run = Generator[CommRequest, Any, Any]
"""A running step, program or batch: yields requests, is sent their results, and returns the output."""


class RunnableStep(Protocol):
    """A step that is bound to a transport."""

    def run(self, x: Any, fingerprint: int) -> Run: ...


def run_steps(steps: Sequence[RunnableStep], x: torch.Tensor, fingerprint: int) -> Run:
    """Run steps one after the other, each on the output of the previous one. The i-th uses `fingerprint + 2 * i`."""
    for i, step in enumerate(steps):
        x = yield from step.run(x, fingerprint + 2 * i)
    return x


def run_to_end(run: Run, answer: Callable[[CommRequest], Any] | None) -> Any:
    """Run to the end and return the output. `answer` carries out the requests; None if the run yields none."""
    result: Any = None
    try:
        while True:
            result = answer(run.send(result))  # type: ignore[misc]
    except StopIteration as end:
        return end.value


def run_profiled(run: Run, answer: Callable[[CommRequest], Any] | None, name: str = "shardweave::redistribute") -> Any:
    """Same as `run_to_end`, with a profiler range called `name` around a range for each phase, which take time
    themselves."""
    result: Any = None
    with record_function(name):
        try:
            while True:
                with record_function("shardweave::copy"):
                    request = run.send(result)
                with record_function("shardweave::exchange"):
                    result = answer(request)  # type: ignore[misc]
        except StopIteration as end:
            return end.value


def finish_pending(transport: AnyTransport) -> None:
    """Finish the pending call: its exchanges come before those of the next one. If a peer refused it, the next one is
    made nevertheless, as by all ranks; the first use of the output raises.

    Raises:
        TransportError: it failed.
    """
    while transport.pending is not None:
        try:
            transport.pending.finish()
        except TransportError as error:
            if not is_recoverable(error):
                raise


def is_recoverable(error: BaseException) -> bool:
    """Whether all ranks have ended a call alike, because one refused its arguments."""
    return isinstance(error, DisagreementError) and error.recoverable


class ExclusiveCall:
    """Holds the transports of a process group for the duration of one call and measures its time. A call of another
    thread is waited for, and a pending call is finished before. A failure invalidates the transport, but for a refusal
    that all ranks have learned of.

    Raises:
        TransportError: an earlier call failed; or this call is made within another one, on the same thread.
        MeetingTimeoutError: another thread was in calls for longer than the timeout. The transport stays valid.
    """

    def __init__(self, transport: AnyTransport, statistics: Redistribution) -> None:
        self.transport, self.statistics = transport, statistics
        self.lock = transport.rendezvous.lock

    def __enter__(self) -> None:
        # An interrupt (Ctrl-C) is raised after any call of a function. It must not leave the lock or `busy` behind.
        transport, lock = self.transport, self.lock
        taken = 0
        try:
            if not lock.acquire_now(False):
                lock.acquire()
            lock.depth += 1
            taken = 1
            if transport.busy or transport.pending is not None or transport.error is not None:
                self._make_ready()
            self.start = time.perf_counter()
        except BaseException:
            lock.depth -= taken
            if taken:
                lock.release_now()
            lock.settle()
            raise
        transport.busy = True

    def _make_ready(self) -> None:
        transport = self.transport
        refuse_within_call(transport)
        finish_pending(transport)
        if (error := transport.error) is not None:
            # Raise before anything is pushed: receive buffers that peers kept may be in use for something else. If only
            # one part of a hierarchical transport has failed, the peers of the other part are notified here.
            transport.fail(error)
            transport.rendezvous.end(error)
            raise type(error)(f"{error}; allowed after that: calls on process groups made since") from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        transport, lock = self.transport, self.lock
        transport.busy = False
        try:
            self.statistics.milliseconds += (time.perf_counter() - self.start) * 1e3
            if error is not None and not is_recoverable(error):
                # Peers may be waiting for this rank's next exchange: notify them.
                text = f"rank {transport.rank} failed in an earlier call: {type(error).__name__}: {error}"
                transport.fail(error if isinstance(error, TransportError) else TransportError(text))
            if error is not None or transport.pending is None:  # a pending call ends when it is finished
                transport.rendezvous.end(error)
        finally:
            lock.depth -= 1
            lock.release_now()


class ResumedCall(ExclusiveCall):
    """Holds the transports while the rest of a call is carried out that was pending."""

    def _make_ready(self) -> None:
        refuse_within_call(self.transport)


def start_in_background(transport: AnyTransport, call: Callable[[], T]) -> Future[T]:
    """Have the background thread of the process group make `call`; return its future result.

    Raises:
        TransportError: this is within another call, on the same thread.
        MeetingTimeoutError: another thread was in calls for longer than the timeout.
    """
    lock = transport.rendezvous.lock
    if lock.acquire_now(False):  # no other thread is in a call
        try:
            refuse_within_call(transport)
        finally:
            lock.release_now()
    return transport.rendezvous.background.start(call)


def refuse_within_call(transport: AnyTransport) -> None:
    """Refuse a call within another one of this thread.

    Raises:
        TransportError: this thread, which holds the lock, is in a call.
    """
    if transport.busy:  # as in a signal handler: the call that it interrupted goes on afterwards
        raise TransportError(
            f"rank {transport.rank}: a call within {transport.rendezvous.calls.current}, on the same thread; "
            "allowed: after it has returned"
        )
