"""Overflow of dispatches, raised on the host once the device has passed them."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ...errors import CapacityError
from ...kernels import capturing, runs_on
from .config import DispatchConfig

LATEST = 2
"""Dispatches after which an overflow is raised at the latest."""


class Overflow:
    """Dropped rows and bad ids of recent dispatches, copied to the host without synchronising.

    Args:
        call, limits: for errors: what overflowed, and the arguments that limit rows, with their values.
    """

    def __init__(self, config: DispatchConfig, device: torch.device, call: str, limits: str) -> None:
        self._config, self._device, self._call, self._limits = config, device, call, limits
        self._waiting: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._calls = 0
        self._lock = threading.Lock()

    def add(self, overflow: torch.Tensor) -> None:
        """Note the `Groups.overflow` of a dispatch; nothing with overflow="drop" or in a CUDA graph capture."""
        if self._config.overflow != "raise" or capturing(self._device):
            return
        noted: torch.Tensor | None = None
        event = None
        if overflow.device.type == "cuda":
            noted = torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")
            noted.copy_(overflow, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        elif overflow.device.type != "cpu" or runs_on(overflow.device) or any(overflow.tolist()):
            # On CPU paths the numbers are there: zeros need not be noted.
            noted = overflow.clone()  # the caller of an operator owns its outputs
        with self._lock:
            if noted is not None:
                self._waiting.append((self._calls, noted, event))
            self._calls += 1

    def check(self, later: int) -> None:
        """Raise for dispatches at least `later` calls ago; waits for them.

        Raises:
            CapacityError: one of them dropped rows or had bad ids.
        """
        if not self._waiting or capturing(self._device):
            return
        while True:
            with self._lock:
                if not self._waiting or self._waiting[0][0] + later > self._calls:
                    return
                call, overflow, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            dropped, bad = overflow.tolist()
            happened = [f"{dropped} rows exceeded the capacity ({self._limits})"] if dropped else []
            if bad:
                happened.append(f"{bad} ids were outside -1 to {self._config.num_experts - 1}")
            if happened:
                raise CapacityError(
                    f'{self._call} {call}: {" and ".join(happened)}, all ranks together; overflow="drop" drops them'
                )
