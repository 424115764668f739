"""Streams of devices: calls in one order, and calls beside what their process computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class StreamOrder:
    """Calls of one process on one device in one order, whichever streams they are made on: windows, counts and tables
    on the device are shared."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._last: torch.cuda.Stream | None = None
        self._raw = 0

    def join(self) -> bool:
        """Have the current stream wait for the last call's, if that was another. Whether it is being captured: then
        nothing is waited for, since who replays a graph orders it."""
        if torch.cuda.is_current_stream_capturing():
            return True
        raw = torch._C._cuda_getCurrentRawStream(self._index)  # what `current_stream` wraps, at a tenth of the cost
        if raw != self._raw or self._last is None:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._raw = current, raw
        return False


_orders: dict[torch.device, StreamOrder] = {}


def order_on(device: torch.device) -> StreamOrder | None:
    """The one of a device; None of CPUs."""
    if device.type != "cuda":
        return None
    return _orders.setdefault(device, StreamOrder(device))


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current one; None on CPUs."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class SideStream:
    """A stream of its own for calls that are waited for later.

    What a call reads and writes is known to both streams, so that its memory is not given away before both are done.
    Calls of one world are in one order: who begins the next one joins this stream first.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._on_device = device.type != "cpu"
        self._stream = self._module.Stream(device) if self._on_device else self._module.Stream()

    def run(self, x: torch.Tensor, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """What `call` makes of `x`, and what makes the current stream of who calls it wait for that."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            out = call()
            done = self._stream.record_event()
        if self._on_device:
            x.record_stream(self._stream)
        return out, partial(self._join, out, done)

    def _join(self, out: torch.Tensor, done: Any) -> None:
        current = self._module.current_stream()
        current.wait_event(done)
        if self._on_device:
            out.record_stream(current)
