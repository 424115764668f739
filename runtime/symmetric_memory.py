"""Where memory that all ranks of a group can address comes from: torch's symmetric memory on GPUs, shared memory on
CPUs. All that is used of torch.distributed._symmetric_memory, which is alpha, is used here."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..errors import PeerError, WorldError
from .segments import Segment, open_segment, segment_path, uses_names

_lives = itertools.count()


class Provider(Protocol):
    """Makes memory, and joins it with that of a group's other ranks."""

    device: torch.device

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """Zeros, flat bytes; and what the group's other ranks have to be told to reach them."""

    def join(self, own: torch.Tensor, told: Mapping[int, str]) -> dict[int, torch.Tensor]:
        """By rank, ascending, the memory that each of a group made, of equal sizes, this rank's included.

        Collective: every rank of the group calls it, after all have made theirs; `told` has what each says, by rank in
        ascending order.
        """


class SharedSegments:
    """Memory of processes of one machine."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self._named = uses_names()
        self._segments: list[Segment] = []  # as long as the world lives: peers address them

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        segment = Segment("shardweave-window", nbytes, self._named)
        self._segments.append(segment)
        return segment.bytes[:nbytes], segment_path(os.getpid(), segment.handle, self._named)

    def join(self, own: torch.Tensor, told: Mapping[int, str]) -> dict[int, torch.Tensor]:
        found = {}
        for rank, path in told.items():
            if rank == self.rank:
                found[rank] = own
                continue
            try:
                mapped = open_segment(path)
            except FileNotFoundError as error:
                raise PeerError(f"rank {rank} is gone, and its memory with it: {path}") from error
            except PermissionError as error:
                raise WorldError(f"rank {self.rank} may not map the memory of rank {rank}: {error}") from error
            found[rank] = torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))[: own.numel()]
        return found


class TorchSymmetricMemory:
    """Memory of GPUs that reach each other.

    Groups are made known to torch by their ranks, each with a store of its own, so that no process group is needed.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._store, self._life = store, next(_lives)
        self._names: dict[tuple[int, ...], str] = {}
        self._handles: list[Any] = []

    def make(self, nbytes: int) -> tuple[torch.Tensor, str]:
        from torch.distributed._symmetric_memory import empty

        own = empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)
        return own, ""

    def join(self, own: torch.Tensor, told: Mapping[int, str]) -> dict[int, torch.Tensor]:
        from torch._C._distributed_c10d import _SymmetricMemory

        ranks = tuple(told)
        name = self._names.get(ranks)
        if name is None:
            # torch knows names for as long as the process lives, process groups come and go.
            name = self._names[ranks] = f"shardweave/{self._life}/{ranks}"
            store = dist.PrefixStore(f"torch/{ranks}", self._store)
            _SymmetricMemory.set_group_info(name, ranks.index(self.rank), len(ranks), store)
        try:
            handle = _SymmetricMemory.rendezvous(own, name)
        except RuntimeError as error:
            raise WorldError(f"symmetric memory among ranks {ranks}: {error}") from error
        self._handles.append(handle)
        return {
            rank: own if rank == self.rank else handle.get_buffer(i, (own.numel(),), torch.uint8)
            for i, rank in enumerate(ranks)
        }


def why_no_symmetric_memory(device: torch.device) -> str | None:
    """Why torch has no symmetric memory for a device, or None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"torch's symmetric memory is for CUDA devices; tensors are on {device.type}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this build of torch has no symmetric memory: {error}"
    return None
