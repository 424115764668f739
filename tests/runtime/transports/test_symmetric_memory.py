"""The part of symmetric memory that needs no GPU: torch's rendezvous for any groups."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pretended_gpus import PretendedGpus

from shardweave.errors import UnsupportedError
from shardweave.runtime.bounded_store import BoundedStore
from shardweave.runtime.transports.symmetric_memory.memory import (
    _RenumberedStore,
    why_no_symmetric_memory,
)
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.plan


class Counting:
    """Exchanges values as torch's rendezvous does, under keys numbered by a counter of the process for each prefix."""

    def __init__(self, *counters: int) -> None:
        self.numbers = dict(zip(("CUDASymmetricMemory", "Other"), counters, strict=True))

    def _next(self, prefix: str) -> str:
        self.numbers[prefix] += 1
        return f"{prefix}/{self.numbers[prefix] - 1}"

    def all_gather(self, store: dist.Store, rank: int, size: int, prefix: str, value: str) -> list[str]:
        number = self._next(prefix)
        keys = [f"{number}/{r}" for r in range(size)]
        store.set(keys[rank], value)
        store.wait(keys)
        return [text.decode() for text in store.multi_get(keys)]  # as torch 2.13 and later

    def barrier(self, store: dist.Store, rank: int, size: int, prefix: str) -> None:
        if hasattr(store, "barrier"):  # torch 2.12 and later
            store.barrier(self._next(prefix), size, timedelta(seconds=20))
        else:
            self.all_gather(store, rank, size, prefix, "")


COUNTERS = [((0, 0), (3, 0), (40, 41)), ((3, 3), (3, 7), (7, 3)), ((5, 4), (4, 5), (5, 5)), ((0, 9), (9, 0), (1, 1))]


@pytest.mark.parametrize("counters", COUNTERS, ids=str)
def test_rendezvous_with_different_counters(counters: tuple[tuple[int, int], ...]) -> None:
    memory = dist.HashStore()
    memory.set_timeout(timedelta(seconds=20))

    def rendezvous(rank: int) -> list[list[str]]:
        exchange, found = Counting(*counters[rank]), []
        # As torch's C++ code calls it.
        own = _RenumberedStore(BoundedStore(memory), "one", 20.0)
        store = dist.PrefixStore("torch", own)
        for number, prefix in enumerate(["CUDASymmetricMemory", "Other", "CUDASymmetricMemory", "Other", "Other"]):
            found.append(exchange.all_gather(store, rank, 3, prefix, f"{rank} says {number}"))
            exchange.barrier(store, rank, 3, prefix)
        return found

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(rendezvous, range(3)))
    assert results == [[[f"{r} says {number}" for r in range(3)] for number in range(5)]] * 3


def test_rendezvous_ends_in_time() -> None:
    """A peer that never writes, and a store that never answers."""

    class Silent(dist.Store):
        def check(self, keys: list[str]) -> bool:
            return ended.wait(20)

    ended = threading.Event()
    for inner, why in ((dist.HashStore(), "not written within 0.1 s: of/n/0/1"), (Silent(), "did not answer within")):
        own = _RenumberedStore(BoundedStore(inner), "of", 0.1)
        store = dist.PrefixStore("n", own)  # calls it as torch's C++ does
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=why):
            store.get("3/1")
        assert time.monotonic() - start < 10
    ended.set()


def test_no_memory_in_a_capture() -> None:
    class Provider:
        device = torch.device("cuda", 1)

        def make(self, nbytes: int) -> None:
            raise AssertionError("allocates and waits for the device")

    provider, rendezvous = cast(Any, Provider()), cast(Any, None)
    with PretendedGpus(1) as gpus:
        transport = SymmetricMemoryTransport(0, 2, 5.0, provider, rendezvous)
        gpus.captures = True
        for make in (lambda: transport.window((0, 1), 100), lambda: transport.buffer_pool((0, 1), 100, 2)):
            with pytest.raises(UnsupportedError, match="symmetric buffer of .* while a CUDA graph is captured"):
                make()
        with pytest.raises(UnsupportedError, match="transport symmetric_memory would be made while"):
            SymmetricMemoryTransport(0, 2, 5.0, provider, rendezvous)
    assert transport.error is None


def test_gpus_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {(i, j) for i in range(3) for j in range(3)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) in reached)
    assert why_no_symmetric_memory(torch.device("cuda", 0)) is None
    reached -= {(1, 2), (2, 1)}
    for index in range(3):  # the same on all ranks
        reason = why_no_symmetric_memory(torch.device("cuda", index))
        assert reason is not None and "GPUs 1 and 2 do not reach each other's memory" in reason
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert why_no_symmetric_memory(torch.device("cuda", 0)) is None
