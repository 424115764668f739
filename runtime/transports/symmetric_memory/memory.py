"""Allocation of memory that all ranks of a group can address: torch's symmetric memory on GPUs, shared memory on CPUs.

This is the only file that uses torch.distributed._symmetric_memory, which is alpha.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import permutations
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

from ....errors import PeerError, TransportError
from ...bounded_store import BoundedStore
from ..rendezvous.store_texts import malformed
from ..shared_memory.segments import Segment, SegmentKey, bytes_of, open_segment, uses_names

T = TypeVar("T")
_DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Provider(Protocol):
    """Allocates memory and maps that of the other ranks of a group."""

    device: torch.device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """uint8 [nbytes], zeros; and a text by which other ranks map this memory."""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], name: str) -> dict[int, torch.Tensor]:
        """Map the memory of all ranks of a group, which is of equal size. Collective.

        Args:
            own: from `make`.
            handles: the texts of all ranks from `make`, by ascending rank.
            name: a new name, equal on all ranks of the group.

        Returns:
            The memory by ascending rank, including `own`.
        """


class SharedSegments:
    """Memory of processes of one machine."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self._named = uses_names()
        self._segments: list[Segment] = []  # kept with the transport: peers address them

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        segment = Segment("shardweave-window", nbytes, self._named)
        self._segments.append(segment)
        return segment.bytes[:nbytes], str(segment.key)

    def join(self, own: torch.Tensor, handles: Mapping[int, str], name: str) -> dict[int, torch.Tensor]:
        memory = {}
        for rank, text in handles.items():
            if rank == self.rank:
                memory[rank] = own
                continue
            key = SegmentKey.parse(text)
            if key is None:
                raise malformed(rank, text)
            try:
                mapped = open_segment(key, f"rank {rank}")
            except FileNotFoundError as error:
                raise PeerError(f"rank {rank} is gone, and its memory with it: {error}") from error
            except PermissionError as error:
                raise TransportError(f"rank {self.rank} may not map the memory of rank {rank}: {error}") from error
            memory[rank] = bytes_of(mapped)[: own.numel()]
        return memory


class _RenumberedStore(dist.Store):
    """A store for one rendezvous, with keys that do not depend on the number of earlier ones in this process.

    Up to torch 2.14 exchanges ("<prefix>/<number>/<rank>", and others below "<prefix>/<number>") are numbered by a
    counter of the process for each prefix. Ranks that have been in different groups have different counters and would
    wait for different keys. Here the numbers of each prefix begin at 0.

    Args:
        prefix: of all keys.
        timeout: seconds that the store may take to answer, and peers to write what is waited for.
    """

    def __init__(self, store: BoundedStore, prefix: str, timeout: float) -> None:
        super().__init__()
        self._store, self._prefix, self._timeout = store, prefix, timeout
        self._numbers: dict[str, dict[str, int]] = {}

    def _key(self, key: str) -> str:
        parts = key.rsplit("/", 2)
        if len(parts) == 3 and parts[1].isdecimal():
            numbers = self._numbers.setdefault(parts[0], {})
            key = f"{parts[0]}/{numbers.setdefault(parts[1], len(numbers))}/{parts[2]}"
        return f"{self._prefix}/{key}"

    def _run(self, operation: Callable[[dist.Store], T]) -> T:
        return self._store.run(operation, self._timeout)

    def set(self, key: str, value: str) -> None:  # bytes, from torch's C++
        self._run(lambda store: store.set(self._key(key), value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._run(lambda store: store.get(self._key(key)))

    def add(self, key: str, amount: int) -> int:
        return self._run(lambda store: store.add(self._key(key), amount))

    def check(self, keys: list[str]) -> bool:
        return self._run(lambda store: store.check([self._key(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        seconds = timeout[0].total_seconds() if timeout else self._timeout
        self._store.wait([self._key(key) for key in keys], seconds)

    def delete_key(self, key: str) -> bool:
        return self._run(lambda store: store.delete_key(self._key(key)))


class TorchSymmetricMemory:
    """Memory of GPUs that reach each other.

    Groups are registered with torch by their ranks, each with a store of its own, so that no process group is created.
    """

    def __init__(self, store: BoundedStore, rank: int, device: torch.device, timeout: float) -> None:
        self.rank, self.device, self._store, self._timeout = rank, device, store, timeout
        self._handles: list[Any] = []  # they own the memory

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        from torch.distributed._symmetric_memory import empty

        own = empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        return own, ""

    def join(self, own: torch.Tensor, handles: Mapping[int, str], name: str) -> dict[int, torch.Tensor]:
        from torch._C._distributed_c10d import _SymmetricMemory

        ranks = tuple(handles)
        group_name: Any = f"shardweave/{name}"  # registered until the process ends
        store = _RenumberedStore(self._store, f"symmetric/{self.device.type}/{group_name}", self._timeout)
        at = ranks.index(self.rank), len(ranks)
        # Not `_SymmetricMemory.set_group_info`: no rendezvous of torch 2.11 to 2.15 reads it, and where a group has it
        # later ones compare how many allocations each rank made before. Here these differ.
        group = dist.ProcessGroup(store, *at)
        group._set_group_name(group_name)
        _register_process_group(group_name, group)
        try:
            with _no_multicast():
                handle = _SymmetricMemory.rendezvous(own, group_name)
        except RuntimeError as error:
            raise TransportError(f"symmetric memory among ranks {ranks}: {error}") from error
        self._handles.append((handle, store))
        return {
            rank: own if rank == self.rank else handle.get_buffer(i, (own.numel(),), torch.uint8)
            for i, rank in enumerate(ranks)
        }


@contextmanager
def _no_multicast() -> Iterator[None]:
    """A context in which rendezvous makes no multicast objects, which windows do not use: they are few in a system, and
    binding memory to one waits for all GPUs. torch reads the variable at each rendezvous."""
    before = os.environ.get(_DISABLE_MULTICAST)
    os.environ[_DISABLE_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE_MULTICAST]
        else:
            os.environ[_DISABLE_MULTICAST] = before


def why_no_symmetric_memory(device: torch.device) -> str | None:
    """The reason why torch has no symmetric memory for a device; None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"torch's symmetric memory is for CUDA devices; tensors are on {device.type}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this build of torch has no symmetric memory: {error}"
    if pairs := unreachable_gpus():
        # All pairs, so that all ranks that see the same GPUs decide alike.
        return "GPUs {} and {} do not reach each other's memory; CUDA_VISIBLE_DEVICES may hide one".format(*pairs[0])
    return None


def unreachable_gpus() -> list[tuple[int, int]]:
    """The pairs of visible GPUs of which the first cannot address the memory of the second."""
    pairs = permutations(range(torch.cuda.device_count()), 2)
    return [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
