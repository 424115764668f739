"""Asynchronous calls: their last exchange has started, and the first use of the output waits for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _is_view_op
from torch.profiler import record_function

from ...errors import TransportError
from ..statistics import Redistribution
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyHierarchical, AnyTransport
from ..transports.shared_memory.transport import SharedMemoryTransport
from ..transports.streams import current_stream
from .ranges import wants_ranges
from .run import ResumedCall

HostTransport = SharedMemoryTransport | ProcessGroupTransport | AnyHierarchical
"""A transport whose requests are started and finished by the host."""


class AsyncResult(AsyncCollectiveTensor):
    """The output of an asynchronous run, or a view of it. Whoever reads `elem` waits for the run first; torch reads its
    values by that attribute only, whether eagerly or in a compiled function.

    torch's own class waits by `wait_tensor`, which forgets the work when the wait begins: meanwhile another thread
    finds none and reads memory that is not written.
    """

    _memory: torch.Tensor
    _run: AsyncRun

    @staticmethod
    def __new__(cls, output: torch.Tensor, run: AsyncRun) -> AsyncResult:
        result: AsyncResult = super().__new__(cls, output)  # type: ignore[assignment]
        result._run = run
        return result

    @property
    def elem(self) -> torch.Tensor:  # type: ignore[override]
        """The output, complete on the current stream.

        Raises:
            TransportError: a peer failed, timed out or made a different request.
        """
        self._run.wait(self._memory)
        return self._memory

    @elem.setter
    def elem(self, output: torch.Tensor) -> None:
        self._memory = output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.elem.__reduce_ex__(protocol)  # a plain tensor wherever it is loaded

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return]  # raises, as for any such tensor
        return deepcopy(self.elem, memo).requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if args and isinstance(x := args[0], AsyncResult) and _is_view_op(func):
            out = func(x._memory, *args[1:], **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                return AsyncResult(out, x._run)
            return [AsyncResult(view, x._run) for view in out]
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class AsyncRun:
    """A run whose last exchange has started: peers have been notified but not awaited.

    It is finished by the first use of the output or by the transport's next call, so that all ranks finish it at the
    same place in their sequence of exchanges; other threads that use the output wait until it is. On a GPU it continues
    on the stream on which it started, and each stream that uses the output waits for that one.

    Args:
        complete: waits for the peers and returns the result of the last request.
    """

    _error: BaseException | None = None
    _finished = False

    def __init__(
        self,
        run: Any,
        transport: HostTransport,
        complete: Callable[[], Any],
        statistics: Redistribution,
        device: torch.device,
    ) -> None:
        self._run, self._statistics = run, statistics
        self._transport: HostTransport | None = transport
        self._complete: Callable[[], Any] | None = complete
        self._rank, self._lock = transport.rank, transport.rendezvous.lock
        self._call = transport.rendezvous.calls.current
        self._stream = current_stream(device)
        self._done: torch.cuda.Event | None = None

    def wait(self, output: torch.Tensor) -> None:
        """Finish the run, and make the current stream wait for it, on which `output` or a view of it is used.

        Raises:
            TransportError: a peer failed, timed out or made a different request.
        """
        if not self._finished:
            self.finish()
        self._join(output)

    def finish(self) -> None:
        """Finish the run. Further calls do nothing, or raise the same error. May be called on any thread.

        Raises:
            TransportError: a peer failed, timed out or made a different request.
        """
        with self._lock:  # another thread may be finishing it
            if self._error is not None:
                raise self._error
            if not self._finished:
                self._finish()
                self._finished = True

    def _finish(self) -> None:
        transport, run = self._transport, self._run
        if transport is None:  # as in a signal handler: the lock does not keep out the thread that holds it
            raise TransportError(
                f"rank {self._rank}: the result of {self._call} is used within the wait for it, on the same thread; "
                "allowed: after it has returned"
            )
        complete: Any = self._complete
        rendezvous, current_call = transport.rendezvous, transport.rendezvous.calls.current
        # Release the transport first: nothing keeps it alive if no one ever waits.
        transport.pending = self._run = self._complete = self._transport = None
        profiled = record_function("shardweave::finish") if wants_ranges() else nullcontext()
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        rendezvous.calls.current = self._call  # other transports may have been called since
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

    def _join(self, output: torch.Tensor) -> None:
        if self._done is None or self._stream is None:
            return
        current = torch.cuda.current_stream(output.device)
        if current != self._stream:
            current.wait_event(self._done)
            output.record_stream(current)


class SideStreamRun(AsyncRun):
    """A run that is enqueued on a stream of its own, for whose end `join` makes the current stream wait."""

    def __init__(self, transport: AnyTransport, join: Callable[[torch.Tensor | None], None]) -> None:
        self._any_transport: AnyTransport | None = transport
        self._lock, self._join_side = transport.rendezvous.lock, join
        self._call = transport.rendezvous.calls.current

    def _finish(self) -> None:
        transport, self._any_transport = self._any_transport, None
        if transport is not None and transport.pending is self:
            transport.pending = None
            self._join_side(None)
            transport.rendezvous.end(call=self._call)

    def _join(self, output: torch.Tensor) -> None:
        self._join_side(output)  # it may be used on another stream than that of the next call
