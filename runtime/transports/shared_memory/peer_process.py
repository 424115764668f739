"""A peer on this machine: its control page and memory, and whether its process has died."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

import numpy as np
import torch

from ....errors import PeerError, TransportError
from .control_page import DIRECTORY, SLOT_WORDS, SLOTS
from .segments import SegmentKey, bytes_of, is_running, open_segment


class PeerProcess:
    """A peer's control page and segments, mapped into this process, and a descriptor that is readable after its death.

    Attributes:
        barriers: the number of barriers with this peer so far.
        awaited: whether this rank has waited at the last of them; False after it refused.
        kept: memory that the peer may write until then.
    """

    def __init__(self, rank: int, key: SegmentKey) -> None:
        self.rank, self.pid, self.named, self._key = rank, key.pid, key.named, key
        try:
            self.pidfd: int | None = os.pidfd_open(key.pid)
        except (OSError, AttributeError):
            self.pidfd = None
        mapped = open_segment(key, str(self))
        self.page = memoryview(mapped).cast("Q")
        self.address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        self.barriers = 0
        self.awaited = True
        self.kept: object = None
        self.slots = tuple(SLOTS + (2 * rank + parity) * SLOT_WORDS for parity in (0, 1))
        self._segments: dict[int, torch.Tensor] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # globals may be gone when the interpreter ends
        descriptor = getattr(self, "pidfd", None)
        if descriptor is not None:
            try:
                close(descriptor)
            except OSError:
                pass

    def has_died(self) -> bool:
        if self.pidfd is None:
            return not is_running(self.pid)
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def segment(self, index: int) -> torch.Tensor:
        segment = self._segments.get(index)
        if segment is None:
            key = self._key._replace(handle=self.page[DIRECTORY + index])
            try:
                mapped = open_segment(key, str(self))
            except (FileNotFoundError, PermissionError) as error:
                if isinstance(error, PermissionError) and is_running(self.pid):
                    raise TransportError(f"the memory of {self} may no longer be mapped: {error}") from error
                what = f"{self} is gone, and its memory with it" if self.has_died() else f"the memory of {self} is gone"
                raise PeerError(f"{what}: {error}") from error
            segment = self._segments[index] = bytes_of(mapped)
        return segment
