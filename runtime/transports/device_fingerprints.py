"""Comparison of fingerprints on the device, for backends without message tags (NCCL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels import Failure, WordComparison, pack


class DeviceFingerprints:
    """Fingerprints that are sent with each message and compared on the receiver's device.

    The host does not wait: it learns of a mismatch when it calls `mismatch`. On the device, the data that was received
    with a different fingerprint, and all data received later, is overwritten at once.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._failure = Failure(device)
        codes = torch.tensor([pack(rank, peer, 0) for peer in range(size)], device=device)
        self._compare = WordComparison(codes, self._failure)
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def new(self, expected: int) -> torch.Tensor:
        """int64 [world size], filled with the expected fingerprint: a rank sends the element of its own rank, and
        receives those of its peers into theirs."""
        return torch.full((self.size,), expected, dtype=torch.int64, device=self.device)

    def compare(self, fingerprints: torch.Tensor, expected: int, received: Sequence[torch.Tensor]) -> None:
        """Enqueue a comparison, which overwrites `received` (flat bytes) after the first mismatch."""
        for out in _merged(received) or [self._none]:
            self._compare(fingerprints, expected, out)
            fingerprints = self._none

    def mismatch(self) -> int | None:
        """The peer with another fingerprint, as far as the host knows; None if there is none."""
        code = self._failure.read()
        return None if code is None else code.peer


def _merged(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat byte tensors, with adjacent ones of one storage merged."""
    merged: list[torch.Tensor] = []
    for buffer in sorted((b for b in buffers if b.numel()), key=torch.Tensor.data_ptr):
        last = merged[-1] if merged else None
        if last is not None and last.data_ptr() + last.numel() == buffer.data_ptr() and _share(last, buffer):
            merged[-1] = last.as_strided((last.numel() + buffer.numel(),), (1,))
        else:
            merged.append(buffer)
    return merged


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
