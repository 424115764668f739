"""The part of symmetric memory that needs no GPU: torch's rendezvous for any groups."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pretended_gpus import PretendedGpus
from torch._C._distributed_c10d import _resolve_process_group, _SymmetricMemory

import shardweave
from shardweave.runtime.transports.symmetric_memory.memory import TorchSymmetricMemory, _RenumberedStore
from shardweave.runtime.transports.symmetric_memory.transport import SymmetricMemoryTransport

pytestmark = pytest.mark.plan


class Counting:
    """Exchanges values as torch's rendezvous does, under keys numbered by a counter of the process."""

    def __init__(self, had: int) -> None:
        self.number = had

    def all_gather(self, store: dist.Store, rank: int, size: int, value: str) -> list[str]:
        keys = [f"CUDASymmetricMemory/{self.number}/{r}" for r in range(size)]
        self.number += 1
        store.set(keys[rank], value)
        store.wait(keys)
        return [store.get(key).decode() for key in keys]


def test_rendezvous_with_different_counters() -> None:
    memory = dist.HashStore()
    exchanges = [Counting(had) for had in (0, 3, 40)]

    def rendezvous(rank: int) -> list[list[str]]:
        # As torch's C++ code calls it.
        own = _RenumberedStore(dist.PrefixStore("one", memory))
        store = dist.PrefixStore("torch", own)
        return [exchanges[rank].all_gather(store, rank, 3, f"{rank} says {what}") for what in ("a", "b")]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(rendezvous, range(3)))
    assert results == [[[f"{r} says {what}" for r in range(3)] for what in ("a", "b")]] * 3


def test_other_keys_are_unchanged() -> None:
    inner = dist.HashStore()
    store = _RenumberedStore(inner)
    for key in ("plain", "two/parts", "a/b/c"):
        store.set(key, "1")
        assert inner.get(key) == store.get(key) == b"1" and store.check([key])
    assert store.add("n/7/x", 2) == 2 and store.add("n/7/x", 2) == inner.add("n/0/x", 0) == 4
    assert store.delete_key("n/7/x") and not inner.check(["n/0/x"])


def test_group_is_registered_for_both_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[Any, ...]] = []
    own = torch.zeros(16, dtype=torch.uint8)

    class Handle:
        def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
            return peer, shape

    def rendezvous(memory: torch.Tensor, name: str) -> Handle:
        group = _resolve_process_group(name)
        stored.append((group.rank(), group.size(), name))
        return Handle()

    fake = SimpleNamespace(set_group_info=_SymmetricMemory.set_group_info, rendezvous=rendezvous)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", fake)
    provider = TorchSymmetricMemory(dist.HashStore(), 5, torch.device("cuda", 0))
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
            with pytest.raises(
                shardweave.UnsupportedError, match="symmetric buffer of .* while a CUDA graph is captured"
            ):
                make()
        with pytest.raises(shardweave.UnsupportedError, match="transport symmetric_memory would be made while"):
            SymmetricMemoryTransport(0, 2, 5.0, provider, rendezvous)
    assert transport.error is None


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

    fake = SimpleNamespace(set_group_info=_SymmetricMemory.set_group_info, rendezvous=rendezvous)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", fake)
    provider = TorchSymmetricMemory(dist.HashStore(), 0, torch.device("cuda", 0))
    with pytest.raises(shardweave.TransportError, match=r"ranks \(0, 1\): of torch"):
        provider.join(torch.zeros(16, dtype=torch.uint8), {0: "", 1: ""}, f"multicast {given}")
    assert seen == ["1"] and os.environ.get(name) == given
