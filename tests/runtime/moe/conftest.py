"""What several files of tests here share."""

from __future__ import annotations

import pytest
import torch

from shardweave.runtime.transports.in_process import InProcessTransport


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill allocations of virtual ranks with NaN, or with -7."""

    def empty(self, shape, dtype, device):
        return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=device)

    monkeypatch.setattr(InProcessTransport, "empty", empty)
