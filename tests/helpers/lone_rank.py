"""Rank 0 among peers that are not there: what it launches and what its host does, without waiting for anyone.

What it signals to a peer arrives in its own pad, as if from that peer, so that no wait takes time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardweave.kernels.channel import SLOT
from shardweave.runtime.dtensor import drop_in
from shardweave.runtime.executor import call as call_module
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

RANKS, TIMEOUT = 4, 10.0


class Alone(Rendezvous):
    """The rendezvous of a rank that takes all others to be there."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, TIMEOUT, lambda rank: False)

    def _new_session(self, ranks: tuple[int, ...]) -> str:
        return ""


def alone_among(transports: Mapping[str | None, Any]) -> None:
    """Make this process rank 0 of torch's fake process group, and its programs find these transports, by the name that
    is requested; for good."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = mock.Mock(
        choose=lambda ranks, device, requested, groups: (transports[requested], "the only one"),
        machines=mock.Mock(find_topology=lambda ranks, device: None),
        rendezvous=Alone(),
    )
    call_module.current_transports = lambda: found
    call_module.transports_of = lambda *_: found
    for module in (call_module, drop_in):
        module.why_not_backend = lambda *arguments: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)


class Mirror:
    """Memory of rank 0 in which the others' lies as well."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device), ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], *rest: Any) -> dict[int, torch.Tensor]:
        row = SLOT * 8
        longer = torch.zeros(own.numel() + row * len(handles), dtype=torch.uint8, device=self.device)
        # Rank 0 is everyone's first peer; the row of peer i in its pad is the one before the i-th.
        return {rank: longer[row * max(i - 1, 0) :][: own.numel()] for i, rank in enumerate(handles)}


class MirrorTransport(SymmetricMemoryTransport):
    """Rank 0 through windows of `Mirror`, among peers that are itself."""

    def exchange_text(self, key: str, ranks: tuple[int, ...], text: str) -> dict[int, str]:
        return dict.fromkeys(ranks, text)
