"""The part of symmetric memory that needs no GPU: torch's rendezvous for any groups."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pretended_gpus import PretendedGpus
from torch._C._distributed_c10d import _resolve_process_group

from shardweave.errors import ArgumentError, TransportError, UnsupportedError
from shardweave.kernels import Failure
from shardweave.kernels.tiling import PROCESSORS
from shardweave.kernels.window_use import waiting_programs
from shardweave.runtime.bounded_store import BoundedStore
from shardweave.runtime.environment import num_sms, requested_sms
from shardweave.runtime.transports.symmetric_memory.memory import (
    TorchSymmetricMemory,
    _RenumberedStore,
    why_no_symmetric_memory,
)
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport
from shardweave.runtime.transports.symmetric_memory.window import Window, pad_bytes

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


def test_other_keys_are_unchanged() -> None:
    inner = dist.HashStore()
    store = _RenumberedStore(BoundedStore(inner), "of", 5.0)
    for key in ("plain", "two/parts", "a/b/c"):
        store.set(key, "1")
        assert inner.get(f"of/{key}") == store.get(key) == b"1" and store.check([key])
    assert store.add("n/7/x", 2) == 2 and store.add("n/7/x", 2) == inner.add("of/n/0/x", 0) == 4
    assert store.delete_key("n/7/x") and not inner.check(["of/n/0/x"])


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


def test_group_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[Any, ...]] = []
    own = torch.zeros(16, dtype=torch.uint8)

    class Handle:
        def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
            return peer, shape

    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        group = _resolve_process_group(name)
        stored.append((group.rank(), group.size(), name))
        return Handle()

    fake = SimpleNamespace(rendezvous=rendezvous)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", fake)
    provider = TorchSymmetricMemory(BoundedStore(dist.HashStore()), 5, torch.device("cuda", 0), 5.0)
    for name in ("one", "two"):
        results = provider.join(own, {2: "", 5: "", 6: ""}, name)
        assert list(results) == [2, 5, 6] and results[5] is own and results[6] == (2, (16,))
    assert stored == [(1, 3, "shardweave/one"), (1, 3, "shardweave/two")]


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


@pytest.mark.parametrize(("given", "programs"), [(None, waiting_programs(PROCESSORS)), ("3", 3)])
def test_programs_of_windows(given: str | None, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is not None:
        monkeypatch.setenv("SHARDWEAVE_NUM_SMS", given)
    memory = {rank: torch.zeros(4096, dtype=torch.uint8) for rank in range(2)}
    window = Window(0, memory, 0, Failure(torch.device("cpu")), 2, programs=requested_sms())
    assert window.writing.programs == window.reading(torch.float32, True).programs == programs
    assert window.writing.stride == window.nbytes == (4096 - pad_bytes(2)) // 2


def test_number_of_sms_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument comes before the variable; a GPU has to have as many."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("shardweave.runtime.environment.processors_of", lambda device: 132)
    assert num_sms(gpu) is None and num_sms(gpu, 132) == 132 and num_sms(torch.device("cpu"), 133) == 133
    with pytest.raises(ArgumentError, match="num_sms: 133; allowed: 1 to 132, the SMs of cuda:0"):
        num_sms(gpu, 133)
    monkeypatch.setenv("SHARDWEAVE_NUM_SMS", "200")
    assert num_sms(gpu, 7) == 7 and num_sms(torch.device("cpu")) == 200
    with pytest.raises(ArgumentError, match="SHARDWEAVE_NUM_SMS: 200; allowed: 1 to 132"):
        num_sms(gpu)


@pytest.mark.parametrize("given", ["0", "-1", "half", "1.5"])
def test_wrong_number_of_sms(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_NUM_SMS", given)
    with pytest.raises(ArgumentError, match=rf"SHARDWEAVE_NUM_SMS: '{given}'; allowed: .* above 0"):
        requested_sms()


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_no_multicast_objects(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "TORCH_SYMM_MEM_DISABLE_MULTICAST", list[str | None]()
    if given is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, given)

    def rendezvous(memory: torch.Tensor, group: str) -> None:
        seen.append(os.environ.get(name))
        raise RuntimeError("of torch")

    fake = SimpleNamespace(rendezvous=rendezvous)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", fake)
    provider = TorchSymmetricMemory(BoundedStore(dist.HashStore()), 0, torch.device("cuda", 0), 5.0)
    with pytest.raises(TransportError, match=r"ranks \(0, 1\): of torch"):
        provider.join(torch.zeros(16, dtype=torch.uint8), {0: "", 1: ""}, f"multicast {given}")
    assert seen == ["1"] and os.environ.get(name) == given


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
