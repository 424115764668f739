"""The transports of process groups, and of a set of ranks the one that `choose_transport` chooses.

There is one set of transports for the default process group and all groups of it, so that ranks have one order of calls
and one pool of memory whatever groups they name. A failure invalidates them. Groups that are made after a failure of
one of their ranks have a new set, so that a program goes on with new groups: `transports_of` finds the set of a call.

What a group has, its connections among them, lasts as long as anything holds it, and what a set of transports has
likewise. Where calls are bound, groups that were destroyed are let go of, and sets that no further call can find.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...errors import TransportError, UnsupportedError
from ...planner import Topology
from .. import flight_recorder
from ..environment import pretended_node_size, requested_timeout, requested_transport
from ..process_group_cache import ProcessGroupCache, forget_dead_groups, living_groups, on_group_destroyed, watch
from ..statistics import stats
from .backend_limits import BACKENDS
from .choose_transport import check_name, choose_transport, why_no_memory
from .hierarchical import HierarchicalSharedMemoryTransport, HierarchicalSymmetricMemoryTransport
from .machines import Machines
from .process_group import GroupRanks, ProcessGroupTransport
from .rendezvous.failures import Failure
from .rendezvous.peer_reports import settings
from .rendezvous.rendezvous import Rendezvous
from .shared_memory.transport import SharedMemoryTransport
from .symmetric_memory.memory import SharedSegments, TorchSymmetricMemory
from .symmetric_memory.transport import SymmetricMemoryTransport

_logger = logging.getLogger(__name__)
AnyHierarchical = HierarchicalSharedMemoryTransport | HierarchicalSymmetricMemoryTransport
AnyTransport = SharedMemoryTransport | ProcessGroupTransport | SymmetricMemoryTransport | AnyHierarchical
_NCCL_CLASSES = {"nccl2": "nccl", "nccl-lazy": "nccl"}
"""The names of the classes that torch 2.15 has for NCCL groups, of which the first is its default."""
_CPU = torch.device("cpu")
_GRACE = 2.0
"""Seconds, when this rank destroys the group, for peers that have not started a pending call and for other threads."""


class Transports:
    """A set of transports, each created on first use.

    Args:
        first: the set of the default process group; None: this is the one.
        after: the failure that the groups of this set were made after; None: it is that of the default process group.
    """

    def __init__(self, first: Transports | None = None, after: Failure | None = None) -> None:
        c10d: Any = dist.distributed_c10d
        self.group = c10d.GroupMember.WORLD
        self._after = after
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Of the rendezvous, which serves all devices; a transport has that of its device's backend.
        self.timeout = max(timeout_on(device.type, self.group) for device in self.group._device_types or [_CPU])
        store = dist.PrefixStore("shardweave", c10d._get_default_store())
        if after is not None:
            store = dist.PrefixStore(f"after failure {after.number}", store)
        self._node_size = pretended_node_size()
        this = weakref.ref(self)  # the rendezvous, which the transports hold, must not hold them

        def is_gone(rank: int) -> bool:
            transports = this()
            return transports is not None and transports._is_gone(rank)

        earlier = None if first is None else first.rendezvous
        self.rendezvous: Rendezvous = Rendezvous(store, self.rank, self.timeout, is_gone, earlier)
        self._shared_memory_transport: SharedMemoryTransport | None = None
        self._process_groups: dict[tuple[str, dist.ProcessGroup], ProcessGroupTransport] = {}
        self._symmetric_memory_transports: dict[str, SymmetricMemoryTransport] = {}
        self._hierarchical: dict[tuple[str, str, ProcessGroupTransport], AnyHierarchical] = {}
        self._obstacles: dict[str, str | None] = {}
        self._dispatchers: Counter[tuple[int, ...]] = Counter()

        def shared_memory() -> SharedMemoryTransport | None:
            transports = this()
            return None if transports is None else transports._shared_memory_transport

        if first is None:
            flight_recorder.start(self.rank, self.size, self.rendezvous.texts.bounded, shared_memory)

    @cached_property
    def machines(self) -> Machines:
        """The machines of the ranks. This rank publishes its own here, which is why it is read when the set is made."""
        with self.rendezvous.starting():
            return Machines(self.rendezvous, self._node_size)

    def finish(self) -> None:
        """Finish asynchronous calls that may never be waited for, because the group has ended, and wait for those in
        the background, which end after `_GRACE`. If another thread is in a call for longer, they are left to the first
        use of their outputs, with a warning."""
        pending = self._with_pending_calls()
        has_background = "background" in vars(self.rendezvous)
        if has_background:
            for each in (self._shared_memory_transport, *self._process_groups.values()):
                if each is not None:
                    each.timeout = min(each.timeout, _GRACE)
        elif not pending:
            return
        lock = self.rendezvous.lock
        try:
            lock.acquire(_GRACE * (1 + has_background))
            lock.depth += 1
        except TransportError as error:
            _logger.warning("asynchronous calls are not finished with their process group: %s", error)
            return
        try:
            for transport in pending:
                transport.timeout = min(transport.timeout, _GRACE)
                with suppress(Exception):  # the error is raised when the tensor is used
                    if transport.pending is not None:
                        transport.pending.finish()
        finally:
            lock.depth -= 1
            lock.release_now()

    def _with_pending_calls(self) -> list[SharedMemoryTransport | SymmetricMemoryTransport | ProcessGroupTransport]:
        """The transports with a pending call, but for those of which a stream finishes it."""
        messages = [each for each in self._process_groups.values() if each.has_tags]
        transports = [self._shared_memory_transport, *self._symmetric_memory_transports.values(), *messages]
        return [transport for transport in transports if transport is not None and transport.pending is not None]

    def leave(self) -> None:
        """Tell peers that this rank has left the group, for good."""
        for each in self._process_groups.values():
            each.end()
        self.rendezvous.reports.leave()
        if self._after is None:
            self.rendezvous.failures.leave()

    def number_dispatcher(self, ranks: tuple[int, ...]) -> int:
        """The number of a new token dispatcher of these ranks, equal on all that create theirs in the same order."""
        self._dispatchers[ranks] += 1
        return self._dispatchers[ranks]

    def why_not_backend(self, device_type: str, requested: str | None) -> str | None:
        """The reason why the group cannot exchange data on a device type with the requested transport; or None."""
        if (requested or requested_transport()) == "symmetric_memory":
            # It uses the backend only between nodes, which `choose` checks.
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

    def _backend(self, device_type: str, group: Any = None) -> str:
        # By device: a group that was created without naming a backend has one for each device type.
        name = (group or self.group)._get_backend(torch.device(device_type)).name()
        return _NCCL_CLASSES.get(name, name)

    def choose(
        self,
        ranks: tuple[int, ...],
        device: torch.device,
        requested: str | None,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> tuple[AnyTransport, str]:
        """The transport of `ranks` and the reason. All of `ranks` choose the same, by what each published at its start.

        Args:
            groups: those that the call names, as for `transports_of`.

        Raises:
            ArgumentError: `requested` is not in `NAMES`.
            UnsupportedError: the requested transport cannot carry these ranks.
        """
        requested = requested or requested_transport()
        check_name(requested)
        with self.rendezvous.attempt(self.rendezvous.calls.next_call(ranks, "choosing a transport")):
            name, why = choose_transport(
                requested, ranks, self.rank, self.machines.node_of, no_memory=why_no_memory(device, requested),
                no_messages=self._find_obstacle(device.type), node_size=self._node_size,
            )  # fmt: skip
        text = f"{name}: {why}"
        if stats().transports.get(ranks) != text:
            stats().transports[ranks] = text
            _logger.log(
                logging.INFO if self.rank == min(ranks) else logging.DEBUG, "ranks %s exchange by %s", ranks, text
            )
        return self._transport(name, device, ranks, groups), why

    def has(self, group: dist.ProcessGroup) -> bool:
        """Whether calls of this set may use a process group: those made before a failure may have lost connections."""
        return self._after is None or self._after.is_before(group, dist.get_process_group_ranks(group))

    def forget_groups(self, living: Collection[dist.ProcessGroup]) -> None:
        """Let go of the process groups that are not `living`, but not of those that a pending call may wait for."""
        for (backend, group), transport in list(self._process_groups.items()):
            if transport.pending is None:
                transport.forget_groups(living)
                if group not in living:
                    del self._process_groups[backend, group]
        for name, device_type, across in list(self._hierarchical):
            if across not in self._process_groups.values():
                del self._hierarchical[name, device_type, across]

    def is_needed(self, living: Mapping[dist.ProcessGroup, Collection[int]]) -> bool:
        """Whether further calls may be of this set, or a pending one is. `living`: all process groups of this rank."""
        if self._after is None or self._with_pending_calls():
            return True
        return self.rendezvous.failures.may_be_last(self._after, living.items())

    def _carrier(self, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> GroupRanks:
        """The process group that carries messages among `ranks`: the default one, or of those made after the failure
        the first that has them all, of the groups that the call names or else of all that ranks made together.

        Raises:
            UnsupportedError: there is none.
        """
        if self._after is None:
            return self._world()
        living = living_groups()
        numbered = sorted((g for g in living if g.group_name.isdecimal()), key=lambda g: int(g.group_name))
        for group in (*groups, *numbered):
            if set(ranks) <= set(living.get(group, ())) and self._after.is_before(group, living[group]):
                watch(group)
                return GroupRanks.of(group, living[group], self.rank)
        raise UnsupportedError(
            f"messages among ranks {tuple(ranks)}: rank {self._after.rank} failed in an earlier call, and no process "
            "group that was made since has all of these ranks; allowed: with one made before their mesh, as by "
            "dist.new_group(), or after destroy_process_group and init_process_group"
        )

    def _world(self) -> GroupRanks:
        return GroupRanks.of(self.group, range(self.size), self.rank)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        if self._shared_memory_transport is not None and self._shared_memory_transport.has_died(rank):
            return True
        if self._after is None:
            groups = [self._world()] if self._find_obstacle("cpu") is None else []
        else:
            since = [(g, ranks) for g, ranks in living_groups().items() if self._after.is_before(g, ranks)]
            groups = [GroupRanks.of(group, ranks, self.rank) for group, ranks in since]
        for group in groups:
            with suppress(RuntimeError):  # it has no backend for the CPU
                if rank in group and self._process_group("cpu", group).is_gone(rank):
                    return True
        return False

    def _transport(
        self, name: str, device: torch.device, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup]
    ) -> AnyTransport:
        if name == "shared_memory":
            return self._shared_memory()
        if name == "symmetric_memory":
            return self._symmetric_memory(device)
        across = self._process_group(device.type, self._carrier(ranks, groups))
        if name == "process_group":
            return across
        inside = self._shared_memory() if name == "hierarchical" else self._symmetric_memory(device)
        key = name, device.type, across
        if key not in self._hierarchical:
            self._hierarchical[key] = (
                HierarchicalSharedMemoryTransport(inside, across, self.machines.nodes)
                if isinstance(inside, SharedMemoryTransport)
                else HierarchicalSymmetricMemoryTransport(inside, across, self.machines.nodes)
            )
        return self._hierarchical[key]

    def _shared_memory(self) -> SharedMemoryTransport:
        if self._shared_memory_transport is None:
            timeout = timeout_on("cpu", self.group)
            with self.rendezvous.starting():
                self._shared_memory_transport = SharedMemoryTransport(self.rank, self.size, timeout, self.rendezvous)
        return self._shared_memory_transport

    def _symmetric_memory(self, device: torch.device) -> SymmetricMemoryTransport:
        transport = self._symmetric_memory_transports.get(device.type)
        if transport is None:
            timeout, store = timeout_on(device.type, self.group), self.rendezvous.texts.bounded
            on_cpu = device.type == "cpu"
            provider = SharedSegments(self.rank) if on_cpu else TorchSymmetricMemory(store, self.rank, device, timeout)
            transport = SymmetricMemoryTransport(self.rank, self.size, timeout, provider, self.rendezvous)
            self._symmetric_memory_transports[device.type] = transport
        if transport.provider.device != device:
            raise UnsupportedError(
                f"transport: symmetric_memory has the memory of rank {self.rank} on {transport.provider.device}; "
                f"tensors are on {device}; allowed: one device for each rank"
            )
        return transport

    def _process_group(self, device_type: str, carrier: GroupRanks | None = None) -> ProcessGroupTransport:
        carrier = carrier or self._world()
        group = carrier.process_group
        backend = self._backend(device_type, group)
        transport = self._process_groups.get((backend, group))
        if transport is None:
            timeout = timeout_on(device_type, group)
            transport = self._process_groups[backend, group] = ProcessGroupTransport(
                self.rank, self.size, timeout, backend, self.rendezvous, carrier
            )
        return transport


def timeout_on(device_type: str, group: Any) -> float:
    """Seconds that a wait for tensors on a device type may take: SHARDWEAVE_TIMEOUT, or the timeout of the group's
    backend for them."""
    seconds = requested_timeout()
    if seconds is not None:
        return seconds
    try:
        return group._get_backend(torch.device(device_type)).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # no backend, or one without options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _from_environment(name: str) -> Callable[[], str]:
    return lambda: os.environ.get(name) or "not set"


settings["SHARDWEAVE_TRANSPORT"] = _from_environment("SHARDWEAVE_TRANSPORT")
settings["SHARDWEAVE_NODE_SIZE"] = _from_environment("SHARDWEAVE_NODE_SIZE")


_transports: dict[int, Transports] = {}
"""Of the current default process group, if any: at 0; and at the number of a failure, those made after it."""
_creating = threading.Lock()


def _end_transports() -> None:
    ended = list(_transports.values())
    _transports.clear()
    for transports in ended:
        transports.finish()
    for transports in ended:
        transports.leave()
    flight_recorder.stop()


on_group_destroyed(_end_transports)


def current_transports() -> Transports:
    """The transports of the current default process group, and of the groups that were made before any failure.

    Raises:
        UnsupportedError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UnsupportedError("torch.distributed is not initialised; call init_process_group first")
    forget_dead_groups()
    if not _transports:
        with _creating:
            if not _transports:
                _transports[0] = Transports()
                _ = _transports[0].machines
    return _transports[0]


def transports_of(ranks: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> Transports:
    """The transports of calls that `ranks` make together, by the last failure of one of them that one of the process
    groups which the call names was made after. The same on all of them, whenever they ask. Does not wait.

    Args:
        groups: process groups of this rank; those of all dims of a mesh that has all of `ranks`, or one group. A call
            between meshes of which none has all of its ranks names none.
    """
    first = current_transports()
    key = tuple(ranks), tuple(groups)
    transports = _found.get(key)
    if transports is None:
        transports = _found[key] = _find(first, key[0], key[1])
    return transports


_found: ProcessGroupCache[tuple[tuple[int, ...], tuple[dist.ProcessGroup, ...]], Transports] = ProcessGroupCache(2048)


def _find(first: Transports, ranks: tuple[int, ...], groups: tuple[dist.ProcessGroup, ...]) -> Transports:
    living = living_groups()
    for number, transports in list(_transports.items()):
        transports.forget_groups(living)
        if not transports.is_needed(living):
            _transports.pop(number, None)
    named = [group for group in groups if group != first.group and group in living]
    for group in named:
        watch(group)  # for the keys of caches
    after = first.rendezvous.failures.last_before(tuple(sorted(ranks)), [(group, living[group]) for group in named])
    if after is None:
        return first
    with _creating:
        if after.number not in _transports:
            _transports[after.number] = Transports(first, after)
            _ = _transports[after.number].machines
    return _transports[after.number]


def has_topologies() -> bool:
    """Whether this rank has found the topology of any ranks on several nodes."""
    return any(transports.machines.has_topologies for transports in list(_transports.values()))


def known_topology(ranks: tuple[int, ...], device_type: str) -> Topology | None:
    """The topology that `ranks` (ascending) have found, once all have made a call together and so know the same;
    None before, or if they found none. Does not wait."""
    for transports in list(_transports.values()):
        if topology := transports.machines.known_topology(ranks, device_type):
            return topology
    return None


def sessions() -> set[str]:
    """The sessions that this rank has agreed on with others in the current default process group (`Rendezvous`)."""
    return {session for transports in list(_transports.values()) for session in transports.rendezvous.sessions}


def publish_settings() -> None:
    """Publish this rank's settings for warnings of its peers, if there is a process group."""
    if dist.is_initialized():
        current_transports()
        for transports in list(_transports.values()):
            transports.rendezvous.reports.publish_settings()


def why_not_backend(device: torch.device, requested: str | None = None) -> str | None:
    """The reason why the default process group cannot exchange tensors on `device` by the requested transport; or
    None."""
    return current_transports().why_not_backend(device.type, requested)
