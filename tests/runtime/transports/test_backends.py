"""Which process group backends carry programs, by the names that torch's classes give themselves; their timeouts."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardweave.errors import UnsupportedError
from shardweave.runtime.transports.select import current_transports, timeout_on
from shardweave.runtime.transports.shared_memory import transport

pytestmark = pytest.mark.plan


class OneBackend:
    """A process group with one backend for all devices."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._name)


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
        transports.group = OneBackend(name)
        assert transports.why_not_backend(device, None) == obstacle
        if obstacle is None:
            chosen, _ = transports.choose((0, 1, 2, 3), torch.device(device), "process_group")
            assert chosen.name == "process_group" and chosen.backend == name[:4]
    finally:
        dist.destroy_process_group()


class Group:
    """A process group with a backend of its own timeout, in minutes, for each of some device types."""

    def __init__(self, **minutes: float) -> None:
        self._device_types = [torch.device(device_type) for device_type in minutes]
        self._minutes = minutes

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 4

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._minutes:
            raise RuntimeError(f"No backend type associated with device type {device.type}")  # as torch
        timeout = timedelta(minutes=self._minutes[device.type])
        return SimpleNamespace(name=lambda: "nccl", options=SimpleNamespace(_timeout=timeout))


def test_timeout_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWEAVE_TIMEOUT", raising=False)
    only_nccl, both = Group(cuda=3), Group(cpu=7, cuda=3)
    assert [timeout_on(d, g) / 60 for g in (only_nccl, both) for d in ("cuda", "cpu")] == [3, 30, 3, 7]
    monkeypatch.setenv("SHARDWEAVE_TIMEOUT", "5")
    assert timeout_on("cuda", both) == timeout_on("cpu", both) == 5


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ppc64le"])
def test_memory_of_peers_is_refused_where_stores_may_be_reordered(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.platform, "machine", lambda: machine)
    why = transport.why_unsupported()
    assert why == f"the barrier needs stores seen in order (x86-64); this is {machine}"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        transports, ranks = current_transports(), (0, 1, 2, 3)
        transports.group = OneBackend("gloo")
        chosen, reason = transports.choose(ranks, torch.device("cpu"), None)
        assert chosen.name == "process_group" and reason == why
        for name in ("shared_memory", "hierarchical", "symmetric_memory"):
            with pytest.raises(UnsupportedError, match=f"{name} cannot carry ranks .*; this is {machine}; allowed"):
                transports.choose(ranks, torch.device("cpu"), name)
    finally:
        dist.destroy_process_group()
