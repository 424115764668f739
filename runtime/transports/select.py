"""Which transport a set of ranks uses: by what they share, or by what is asked for."""

from __future__ import annotations

import os
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ..environment import pretended_node_size, requested_timeout, requested_transport
from ..process_group_cache import forget_dead_groups, on_group_destroyed
from ..statistics import stats
from .capabilities import BACKENDS
from .hierarchical import HierarchicalTransport, InsideNodes
from .process_group import ProcessGroupTransport
from .rendezvous import Rendezvous, settings
from .selection_rule import check_name, choose_transport
from .shared_memory import SharedMemoryTransport, machine_name, why_not_here
from .symmetric import SymmetricMemoryTransport
from .symmetric_memory import SharedSegments, TorchSymmetricMemory, why_no_symmetric_memory

AnyTransport = SharedMemoryTransport | ProcessGroupTransport | HierarchicalTransport | SymmetricMemoryTransport
_GRACE = 2.0  # seconds, for peers that have not begun yet what this rank has when it destroys the group


class Transports:
    """The transports of one default process group, started when first needed."""

    def __init__(self) -> None:
        c10d: Any = dist.distributed_c10d
        self.group = c10d.GroupMember.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = _timeout(self.group)
        store = dist.PrefixStore("shardweave", c10d._get_default_store())
        self._node_size = pretended_node_size()
        here = weakref.ref(self)  # what the transports hold as well must not hold them

        def is_gone(rank: int) -> bool:
            transports = here()
            return transports is not None and transports._is_gone(rank)

        self.rendezvous = Rendezvous(store, self.rank, self.timeout, is_gone)
        if platform.system() == "Linux":
            # So that peers can tell who shares memory. The store of a fake group keeps nothing.
            with suppress(RuntimeError):
                store.set(_machine_key(self.rank), f"{machine_name()} {self._node_size or 0}")
        self._shared: SharedMemoryTransport | None = None
        self._collectives: dict[str, ProcessGroupTransport] = {}
        self._symmetric: dict[str, SymmetricMemoryTransport] = {}
        self._mixed: dict[tuple[object, str], HierarchicalTransport] = {}
        self._nodes: dict[int, Hashable] = {}
        self._obstacles: dict[str, str | None] = {}
        self._chosen: dict[tuple[tuple[int, ...], str, str | None], tuple[AnyTransport, str]] = {}
        self._dispatchers: Counter[tuple[int, ...]] = Counter()

    def finish(self) -> None:
        """Finish what has begun, which nobody may ever wait for: the group has ended, and peers come now or never."""
        for transport in (self._shared, *self._symmetric.values()):
            if transport is not None and transport.pending is not None:
                transport.timeout = min(transport.timeout, _GRACE)
                with suppress(Exception):  # it is kept for who uses the tensor; messages fail as torch says
                    transport.pending.finish()

    def number_dispatcher(self, ranks: tuple[int, ...]) -> int:
        """Of a new token dispatcher of these ranks: its number among theirs, alike on all that make them alike."""
        self._dispatchers[ranks] += 1
        return self._dispatchers[ranks]

    def why_not_backend(self, device_type: str, asked: str | None) -> str | None:
        """Why the group cannot carry programs on devices of a type in the transport asked for, or None."""
        if (asked or requested_transport()) == "symmetric_memory":
            # Not through the group's backend, unless there are nodes: that is seen when the transport is chosen.
            return "world size 1" if self.size == 1 else None
        if device_type not in self._obstacles:
            self._obstacles[device_type] = self._find_obstacle(device_type)
        return self._obstacles[device_type]

    def _find_obstacle(self, device_type: str) -> str | None:
        if self.size == 1:
            return "world size 1"
        try:
            backend = self._backend(device_type)
        except RuntimeError:
            return f"the process group has no backend for {device_type}"
        if backend not in BACKENDS:
            return f"process group backend {backend!r}"
        if backend == "gloo" and device_type != "cpu":
            return f"process group backend 'gloo' sends no tensors on {device_type}"
        return None

    def _backend(self, device_type: str) -> str:
        # Asked of the device: a group that was made without naming a backend has one for each.
        return self.group._get_backend(torch.device(device_type)).name()

    def choose(self, ranks: tuple[int, ...], device: torch.device, asked: str | None) -> tuple[AnyTransport, str]:
        """The transport for `ranks` and why. All of `ranks` come to the same answer, from what each posted when it
        started.

        Raises:
            ArgumentError: an unknown transport.
            UnsupportedError: the transport asked for cannot carry these ranks.
        """
        asked = asked or requested_transport()
        check_name(asked)
        key = (ranks, str(device) if asked == "symmetric_memory" else device.type, asked)
        found = self._chosen.get(key)
        if found is None:
            name, why = choose_transport(
                asked, ranks, self.rank, self._node_of, no_memory=why_no_memory(device, asked),
                no_messages=self._find_obstacle(device.type), node_size=self._node_size,
            )  # fmt: skip
            found = self._chosen[key] = self._transport(name, device), why
            stats().transports[ranks] = f"{name}: {why}"
        return found

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        if self._shared is not None and self._shared.has_died(rank):
            return True
        return self._find_obstacle("cpu") is None and self._collective("cpu").is_gone(rank)

    def nodes_of(self, ranks: Sequence[int]) -> list[Hashable]:
        """The node of each rank. All of `ranks` ask."""
        return [self._node_of(rank) for rank in ranks]

    def _symmetric_on(self, device: torch.device) -> SymmetricMemoryTransport:
        found = self._symmetric.get(device.type)
        if found is None:
            store = dist.PrefixStore(f"symmetric/{device.type}", self.rendezvous.store)
            on_cpu = device.type == "cpu"
            provider = SharedSegments(self.rank) if on_cpu else TorchSymmetricMemory(store, self.rank, device)
            found = SymmetricMemoryTransport(self.rank, self.size, self.timeout, provider, self.rendezvous)
            self._symmetric[device.type] = found
        if found.provider.device != device:
            raise UnsupportedError(
                f"transport: symmetric has the memory of rank {self.rank} on {found.provider.device}; tensors are on "
                f"{device}; allowed: one device for each rank"
            )
        return found

    def _mixing(self, inside: InsideNodes, device_type: str) -> HierarchicalTransport:
        across = self._collective(device_type)
        key = inside, across.backend
        if key not in self._mixed:
            self._mixed[key] = HierarchicalTransport(inside, across, self._nodes)
        return self._mixed[key]

    def _transport(self, name: str, device: torch.device) -> AnyTransport:
        if name == "shared_memory":
            return self._shared_memory()
        if name == "process_group":
            return self._collective(device.type)
        if name == "symmetric_memory":
            return self._symmetric_on(device)
        return self._mixing(
            self._shared_memory() if name == "hierarchical" else self._symmetric_on(device), device.type
        )

    def _shared_memory(self) -> SharedMemoryTransport:
        if self._shared is None:
            self._shared = SharedMemoryTransport(self.rank, self.size, self.timeout, self.rendezvous)
        return self._shared

    def _collective(self, device_type: str) -> ProcessGroupTransport:
        backend = self._backend(device_type)
        if backend not in self._collectives:
            self._collectives[backend] = ProcessGroupTransport(
                self.rank, self.size, self.timeout, backend, self.rendezvous
            )
        return self._collectives[backend]

    def _node_of(self, rank: int) -> Hashable:
        """
        Raises:
            ArgumentError: the rank takes nodes to be of another size.
        """
        if rank not in self._nodes:
            machine, size = self.rendezvous.read(_machine_key(rank), rank).split()
            if int(size) != (self._node_size or 0):
                here, there = (f"{n}" if n else "not set" for n in (self._node_size, int(size)))
                raise ArgumentError(
                    f"SHARDWEAVE_NODE_SIZE: {here} on rank {self.rank}, {there} on rank {rank}; allowed: one for all"
                )
            self._nodes[rank] = machine, rank // self._node_size if self._node_size else 0
        return self._nodes[rank]


def _machine_key(rank: int) -> str:
    return f"machine/{rank}"


def why_no_memory(device: torch.device, asked: str | None) -> str | None:
    """Why no ranks at all reach each other's memory for tensors on `device`, in the transport asked for, or None."""
    if device.type == "cpu":
        return why_not_here()
    return why_no_symmetric_memory(device) if asked == "symmetric_memory" else f"tensors are on {device.type}"


def _timeout(group: Any) -> float:
    """Seconds that a wait may take: those asked for, else the group's own."""
    seconds = requested_timeout()
    if seconds is not None:
        return seconds
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _from_environment(name: str) -> Callable[[], str]:
    return lambda: os.environ.get(name) or "not set"


settings["SHARDWEAVE_TRANSPORT"] = _from_environment("SHARDWEAVE_TRANSPORT")
settings["SHARDWEAVE_NODE_SIZE"] = _from_environment("SHARDWEAVE_NODE_SIZE")


_transports: list[Transports] = []  # of the default process group that is alive


def _end_transports() -> None:
    while _transports:
        _transports.pop().finish()


on_group_destroyed(_end_transports)


def current_transports() -> Transports:
    """The transports of the default process group that is alive now.

    Raises:
        UnsupportedError: there is none.
    """
    if not dist.is_initialized():
        raise UnsupportedError("torch.distributed is not initialised; call init_process_group first")
    forget_dead_groups()
    if not _transports:
        _transports.append(Transports())
    return _transports[0]


def tell_settings() -> None:
    """Let ranks that wait for this one know its settings, if there is a process group."""
    if dist.is_initialized():
        current_transports().rendezvous.tell_settings()


def why_not_backend(device: torch.device, asked: str | None = None) -> str | None:
    """Why the default process group cannot carry programs on `device` in the transport asked for, or None."""
    return current_transports().why_not_backend(device.type, asked)
