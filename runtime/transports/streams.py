"""Streams of devices: calls in one order, and calls beside what their process computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

captured: set[object] = set()
"""What graphs read when they are replayed, whatever is forgotten meanwhile: nothing tells when a graph is gone."""


class StreamOrder:
    """Calls of one process on one device in one order, whichever streams they are made on: windows, counts and tables
    on the device are shared."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._last: torch.cuda.Stream | None = None
        self._raw = 0

    def join(self, owner: object = None) -> None:
        """Have the current stream wait for the last call's, if that was another.

        Where it is being captured nothing is waited for, since who replays a graph orders it; and `owner`, who has what
        the call reads, lives on.
        """
        if torch.cuda.is_current_stream_capturing():
            captured.add(owner)
            return
        raw = torch._C._cuda_getCurrentRawStream(self._index)  # what `current_stream` wraps in an object
        if raw != self._raw or self._last is None:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._raw = current, raw

    def went_on(self, stream: Any) -> None:
        """The last call was carried out on another stream than it was made on."""
        if not torch.cuda.is_current_stream_capturing():
            self._last, self._raw = stream, stream.cuda_stream


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
    Calls of one transport are in one order: who begins the next one joins this stream first.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._on_device = device.type != "cpu"
        self.stream = self._module.Stream(device) if self._on_device else self._module.Stream()

    def run(self, x: torch.Tensor, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """What `call` makes of `x`, and what makes the current stream of who calls it wait for that."""
        current = self._module.current_stream()
        self.stream.wait_stream(current)
        if self._on_device:
            x.record_stream(self.stream)
        try:
            with self._module.stream(self.stream):
                out = call()
                done = self.stream.record_event()
        except BaseException:
            current.wait_stream(self.stream)
            raise
        return out, partial(self._join, weakref.ref(out), done)  # nobody waits for what is gone

    def _join(self, out: weakref.ref[torch.Tensor], done: Any) -> None:
        current = self._module.current_stream()
        current.wait_event(done)
        if self._on_device and (tensor := out()) is not None:
            tensor.record_stream(current)
