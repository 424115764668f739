"""Calls in their turns, and calls whose last exchange has begun and is waited for later."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.profiler import record_function

from ...errors import TransportError
from ..statistics import Redistribution
from ..transports.select import AnyTransport
from ..transports.streams import own_stream

_register_work: Any = torch._C._distributed_c10d._register_work  # type: ignore[attr-defined]


class Turn:
    """One call at a time in a transport, timed; a call that fails is the transport's last."""

    def __init__(self, transport: AnyTransport, kind: Redistribution) -> None:
        self.transport, self.kind = transport, kind

    def __enter__(self) -> None:
        transport = self.transport
        if transport.busy:
            error = TransportError(
                f"rank {transport.rank}: two threads redistribute at once; allowed: one call at a time, alike on "
                "all ranks"
            )
            transport.fail(error)
            raise error
        transport.busy = True
        self.began = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        transport = self.transport
        transport.busy = False
        self.kind.milliseconds += (time.perf_counter() - self.began) * 1e3
        if error is not None:
            # Peers wait for this rank's next meeting: tell them that it will not come.
            text = f"rank {transport.rank} failed in an earlier call: {type(error).__name__}: {error}"
            transport.fail(error if isinstance(error, TransportError) else TransportError(text))


class Pending:
    """A run that has come to its last exchange: told to all peers, but not waited for.

    It is finished by who uses the tensor first, or by the transport's next call: ranks that meet do so in one order. On
    a device all of it runs on the stream on which it began, which has its buffers; who waits has theirs wait for that.
    """

    def __init__(
        self, run: Any, transport: AnyTransport, complete: Callable[[], Any], kind: Redistribution, output: torch.Tensor
    ) -> None:
        self._run, self._kind = run, kind
        self._transport: AnyTransport | None = transport
        self._complete: Callable[[], Any] | None = complete
        self._output = weakref.ref(output)  # nobody waits for what is gone
        self._error: BaseException | None = None
        self._call = transport.rendezvous.call
        self._stream = own_stream(output.device)
        self._done: torch.cuda.Event | None = None

    def as_tensor(self, output: torch.Tensor) -> AsyncCollectiveTensor:
        """`output`, which is complete once it is waited for."""
        self._waiting = _Waiting(self, output)
        _register_work(output, self._waiting)
        return AsyncCollectiveTensor(output)

    def finish(self) -> None:
        """
        Raises:
            TransportError: a peer died, did not come, or asked for something else.
        """
        if self._error is not None:
            raise self._error
        transport, run = self._transport, self._run
        if run is None or transport is None:
            return
        complete: Any = self._complete
        rendezvous, later = transport.rendezvous, transport.rendezvous.call
        # The transport is not held: nobody may ever wait.
        transport.pending = self._run = self._complete = self._transport = None
        ranged = record_function("shardweave::finish") if _profiler_enabled() else nullcontext()
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        rendezvous.call = self._call  # other transports may have been called since
        try:
            with Turn(transport, self._kind), ranged, on_stream:
                try:
                    reply = complete()
                    while True:
                        reply = transport.answer(run.send(reply))
                except StopIteration:
                    self._done = None if self._stream is None else self._stream.record_event()
        except BaseException as error:
            self._error = error
            raise
        finally:
            rendezvous.call = later

    def join(self) -> None:
        """Have the current stream wait for a run that is finished."""
        output = self._output()
        if self._done is None or self._stream is None or output is None:
            return
        current = torch.cuda.current_stream(output.device)
        if current != self._stream:
            current.wait_event(self._done)
            output.record_stream(current)


class Joined(Pending):
    """A run that is on its way on a stream of its own: `join` makes the current one wait for it."""

    def __init__(self, transport: AnyTransport, join: Callable[[], None]) -> None:
        self._transport, self._join = transport, join

    def finish(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None and transport.pending is self:
            transport.pending = None
            self._join()

    def join(self) -> None:
        self._join()  # who uses the tensor may be on another stream than who has begun the next call


class _Waiting(dist.Work):
    """What `wait_tensor` calls for a tensor of a pending run.

    torch never lets go of such a work, so it holds nothing: the tensor holds the run, and the run holds this.
    """

    def __init__(self, pending: Pending, output: torch.Tensor) -> None:
        super().__init__()
        self._pending, self._output = weakref.ref(pending), weakref.ref(output)
        output._shardweave_pending = pending  # type: ignore[attr-defined]

    def wait(self, timeout: timedelta | None = None) -> bool:
        pending, output = self._pending(), self._output()
        if pending is None or output is None:
            return True  # nobody holds the tensor
        try:
            pending.finish()
            pending.join()
        except BaseException:
            # torch forgets a work when it begins to wait for it: whoever uses the tensor next has to be told as well.
            _register_work(output, self)
            raise
        output.__dict__.pop("_shardweave_pending", None)
        return True
