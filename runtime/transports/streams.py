"""CUDA streams: one order for all calls of a process, and a side stream for asynchronous calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ...errors import UnsupportedError
from ...kernels import capturing

T = TypeVar("T")

captured: set[object] = set()
"""Objects that captured graphs read when they are replayed. Kept for good: there is no notice when a graph is freed."""


class StreamOrder:
    """Orders the calls of a process on a device, whichever streams they are made on, because they share windows,
    counters and tables."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._last: torch.cuda.Stream | None = None
        self._raw = 0

    def join(self, owner: object = None) -> None:
        """Make the current stream wait for the stream of the last call.

        During a capture it does not wait, because the replays of a graph are ordered by the user; `owner`, which holds
        what the call reads, is then kept for good.
        """
        if capturing(self._device):
            captured.add(owner)
            return
        raw = torch._C._cuda_getCurrentRawStream(self._index)  # what `torch.cuda.current_stream` wraps in an object
        if raw != self._raw or self._last is None:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._raw = current, raw

    def moved_to(self, stream: Any) -> None:
        """Record that the last call ran on `stream` instead of the stream that it was made on."""
        if not capturing(self._device):
            self._last, self._raw = stream, stream.cuda_stream


_orders: dict[torch.device, StreamOrder] = {}


def order_on(device: torch.device) -> StreamOrder | None:
    """The order of calls on a device; None for CPUs."""
    if device.type != "cuda":
        return None
    return _orders.setdefault(device, StreamOrder(device))


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream of a device; None for CPUs."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def refuse_capture(device: torch.device, what: str) -> None:
    """
    Raises:
        UnsupportedError: the current stream is being captured in a CUDA graph, where `what` would allocate memory and
            wait for the device.
    """
    if capturing(device):
        raise UnsupportedError(
            f"{what} would be made while a CUDA graph is captured; allowed: what was made before, by prepare, "
            "prepare_redistribute or a first call"
        )


class SideStream:
    """A stream for asynchronous calls.

    The tensors of a call are recorded on both streams, so that their memory is not reused before both are done. The
    calls of a transport are in one order: the next call joins this stream first.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._on_device = device.type != "cpu"
        self.stream = self._module.Stream(device) if self._on_device else self._module.Stream()

    def run(
        self, x: torch.Tensor, call: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor | None], None]]:
        """Run `call`, which reads `x`, on the side stream. Returns its output, and a function that makes the current
        stream wait for it; its argument is the output or a view of it, if that stream uses it."""
        out, done = self._run([x], call)
        return out, partial(self._join, done)

    def start(self, given: Iterable[torch.Tensor], call: Callable[[], T]) -> Callable[[], T]:
        """Run `call`, which uses the tensors `given`, on the side stream. Returns a function that makes the current
        stream wait for it and returns its result."""
        result, done = self._run(given, call)

        def join() -> T:
            current = self._module.current_stream(self._device)
            current.wait_event(done)
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.device == self._device:
                    tensor.record_stream(current)
            return result

        return join

    def _run(self, given: Iterable[torch.Tensor], call: Callable[[], T]) -> tuple[T, Any]:
        """Run `call` on the side stream; return its result, and the event at its end."""
        current = self._module.current_stream(self._device)
        self.stream.wait_stream(current)
        if self._on_device:
            for x in given:
                x.record_stream(self.stream)
        try:
            with self._module.stream(self.stream):
                return call(), self.stream.record_event()
        except BaseException:
            current.wait_stream(self.stream)
            raise

    def _join(self, done: Any, out: torch.Tensor | None) -> None:
        current = self._module.current_stream(self._device)
        current.wait_event(done)
        if self._on_device and out is not None:
            out.record_stream(current)
