"""Calls that run beside what their process computes, where ranks meet on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


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
