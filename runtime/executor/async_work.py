"""Asynchronous calls: their last exchange has started, and the first use of the output waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ...errors import UnsupportedError
from .. import flight_recorder
from ..statistics import Redistribution
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyHierarchical, AnyTransport
from ..transports.shared_memory.transport import SharedMemoryTransport
from ..transports.streams import current_stream
from .ranges import call_range, wants_ranges
from .run import ResumedCall

HostTransport = SharedMemoryTransport | ProcessGroupTransport | AnyHierarchical
"""A transport whose requests are started and finished by the host."""

_register_work: Any = torch._C._distributed_c10d._register_work  # type: ignore[attr-defined]


class AsyncRun:
    """A run whose last exchange has started: peers have been notified but not awaited.

    It is finished by the first use of the output or by the transport's next call, so that all ranks finish it at the
    same place in their sequence of exchanges. On a GPU it continues on the stream on which it started, and a stream
    that uses the output waits for that one.

    Args:
        complete: waits for the peers and returns the result of the last request.

    Attributes:
        record: of the flight recorder, if there is one.
    """

    record: flight_recorder.Record | None = None
    _error: BaseException | None = None

    def __init__(
        self,
        run: Any,
        transport: HostTransport,
        complete: Callable[[], Any],
        statistics: Redistribution,
        output: torch.Tensor,
    ) -> None:
        self._run, self._statistics = run, statistics
        self._transport: HostTransport | None = transport
        self._complete: Callable[[], Any] | None = complete
        self._output = weakref.ref(output)  # an output that is gone needs no wait
        self._lock = transport.rendezvous.lock
        self._call = transport.rendezvous.calls.current
        self._stream = current_stream(output.device)
        self._done: torch.cuda.Event | None = None

    def as_tensor(self, output: torch.Tensor) -> AsyncCollectiveTensor:
        """Wrap `output` in a tensor that waits for this run on first use."""
        self._work = _AsyncWork(self, output)
        _register_work(output, self._work)
        return AsyncCollectiveTensor(output)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a tensor that is saved is the output of a call with async_op=True that nothing has waited for; allowed: "
            "after its first use"
        )

    def finish(self) -> None:
        """Finish the run. Further calls do nothing, or raise the same error. May be called on any thread.

        Raises:
            TransportError: a peer failed, timed out or made a different request.
        """
        with self._lock:  # another thread may be finishing it
            if self._error is not None:
                raise self._error
            self._finish()

    def _finish(self) -> None:
        transport, run = self._transport, self._run
        if run is None or transport is None:
            return
        complete: Any = self._complete
        rendezvous, current_call = transport.rendezvous, transport.rendezvous.calls.current
        # Release the transport first: nothing keeps it alive if no one ever waits.
        transport.pending = self._run = self._complete = self._transport = None
        profiled = call_range("shardweave::finish") if wants_ranges() else nullcontext()
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        rendezvous.calls.current = self._call  # other transports may have been called since
        if flight_recorder.current is not None:
            flight_recorder.current.resume(self.record)
        try:
            with ResumedCall(transport, self._statistics), profiled, on_stream:
                try:
                    result = complete()
                    while True:
                        result = transport.answer(run.send(result))
                except StopIteration:
                    self._done = None if self._stream is None else self._stream.record_event()
        except BaseException as error:
            self._error = error
            raise
        finally:
            rendezvous.calls.current = current_call

    def join(self) -> None:
        """Make the current stream wait for a finished run."""
        output = self._output()
        if self._done is None or self._stream is None or output is None:
            return
        current = torch.cuda.current_stream(output.device)
        if current != self._stream:
            current.wait_event(self._done)
            output.record_stream(current)


class SideStreamRun(AsyncRun):
    """A run that is enqueued on a stream of its own; `join` makes the current stream wait for it."""

    def __init__(self, transport: AnyTransport, join: Callable[[], None]) -> None:
        self._any_transport: AnyTransport | None = transport
        self._lock, self._join = transport.rendezvous.lock, join

    def _finish(self) -> None:
        transport, self._any_transport = self._any_transport, None
        if transport is not None and transport.pending is self:
            transport.pending = None
            self._join()

    def join(self) -> None:
        self._join()  # the output may be used on another stream than that of the next call


class _AsyncWork(dist.Work):
    """The work that `wait_tensor` waits for, for the output of an asynchronous run.

    torch never releases such a work, so it holds only weak references: the output holds the run, which holds this.
    """

    def __init__(self, run: AsyncRun, output: torch.Tensor) -> None:
        super().__init__()
        self._run, self._output = weakref.ref(run), weakref.ref(output)
        output._shardweave_pending = run  # type: ignore[attr-defined]

    def wait(self, timeout: timedelta | None = None) -> bool:
        run, output = self._run(), self._output()
        if run is None or output is None:
            return True  # the output is gone
        try:
            run.finish()
            run.join()
        except BaseException:
            # torch removes a work when it begins to wait: register it again, so that the next use raises as well.
            _register_work(output, self)
            raise
        output.__dict__.pop("_shardweave_pending", None)
        return True
