"""Which process group backends carry programs, by the names that torch's classes give themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.runtime.transports.select import current_transports

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    ("name", "device", "obstacle"),
    [
        ("nccl", "cuda", None),
        ("nccl2", "cuda", None),  # torch 2.15's default for "nccl"
        ("nccl-lazy", "cuda", None),
        ("gloo", "cpu", None),
        ("gloo", "cuda", "process group backend 'gloo' sends no tensors on cuda"),
        ("mpi", "cpu", "process group backend 'mpi'"),
    ],
)
def test_backend_by_name_of_its_class(name: str, device: str, obstacle: str | None) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        transports = current_transports()
        transports.group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: name))
        assert transports.why_not_backend(device, None) == obstacle
        if obstacle is None:
            transport, _ = transports.choose((0, 1, 2, 3), torch.device(device), "process_group")
            assert transport.name == "process_group" and transport.backend == name[:4]
    finally:
        dist.destroy_process_group()
