"""Tokens that dispatches lost, raised on the host once the device has passed them."""

from __future__ import annotations

from collections import deque

import torch

from ...errors import CapacityError
from .config import DispatchLayout

LATEST = 2
"""Dispatches after which lost tokens are raised at the latest."""


class Losses:
    """Lost tokens of the dispatches so far, on their way to the host; read once the device has passed them."""

    def __init__(self, layout: DispatchLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._waiting: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._calls = 0

    def add(self, lost: torch.Tensor) -> None:
        if self._layout.overflow != "raise" or capturing(self._device):
            return
        event = None
        if lost.device.type == "cuda":
            host = torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")
            host.copy_(lost, non_blocking=True)
            lost, event = host, torch.cuda.Event()
            event.record()
        else:
            lost = lost.clone()  # the operator's belongs to its caller
        self._waiting.append((self._calls, lost, event))
        self._calls += 1

    def check(self, later: int) -> None:
        """Raise for dispatches that are at least `later` calls ago."""
        if capturing(self._device):
            return
        while self._waiting and self._waiting[0][0] + later <= self._calls:
            call, lost, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            dropped, bad = lost.tolist()
            if dropped or bad:
                of = self._layout
                raise CapacityError(
                    f"dispatch {call}: {dropped} rows had no room (capacity: {of.rows} rows for each rank, "
                    f"expert_capacity: {of.expert_capacity}, slab_capacity: {of.slab_capacity}) and {bad} ids were not "
                    f'in -1 to {of.num_experts - 1}, all ranks together; overflow="drop" goes on without them'
                )


def capturing(device: torch.device) -> bool:
    """Whether what is enqueued now becomes part of a CUDA graph, of which the host learns nothing."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
