"""Selection of the transport of a set of ranks: by what the ranks share, or as requested."""

from __future__ import annotations

import logging
import os
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ...planner import Topology, found_topology
from .. import flight_recorder
from ..environment import pretended_node_size, requested_timeout, requested_transport
from ..process_group_cache import forget_dead_groups, on_group_destroyed
from ..statistics import stats
from .backend_limits import BACKENDS
from .hierarchical import HierarchicalSharedMemoryTransport, HierarchicalSymmetricMemoryTransport
from .machine_figures import from_text, machine_figures, to_text
from .nvlink_domain import nvlink_domain
from .process_group import ProcessGroupTransport
from .rendezvous.peer_reports import settings
from .rendezvous.rendezvous import Rendezvous
from .rendezvous.store_texts import malformed
from .shared_memory.transport import SharedMemoryTransport, machine_name, why_unsupported
from .symmetric_memory.memory import SharedSegments, TorchSymmetricMemory, why_no_symmetric_memory
from .symmetric_memory.transport import SymmetricMemoryTransport

_logger = logging.getLogger(__name__)
AnyHierarchical = HierarchicalSharedMemoryTransport | HierarchicalSymmetricMemoryTransport
AnyTransport = SharedMemoryTransport | ProcessGroupTransport | SymmetricMemoryTransport | AnyHierarchical
NAMES = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
_NCCL_CLASSES = {"nccl2": "nccl", "nccl-lazy": "nccl"}
"""The names of the classes that torch 2.15 has for NCCL groups, of which the first is its default."""
_CPU = torch.device("cpu")
_UNKNOWN = "unknown"
_GRACE = 2.0  # seconds, for peers that have not started a call that is pending when this rank destroys the group


def check_name(requested: object) -> None:
    """
    Raises:
        ArgumentError: `requested` is neither None nor in `NAMES`.
    """
    if requested is not None and (not isinstance(requested, str) or requested not in NAMES):
        raise ArgumentError(f"transport: {requested!r} is not known; allowed: {', '.join(NAMES)}")


def choose_transport(
    requested: str | None,
    ranks: Sequence[int],
    rank: int,
    node_of: Callable[[int], Hashable],
    *,
    no_memory: str | None,
    no_messages: str | None,
    node_size: int | None,
) -> tuple[str, str]:
    """The name of the transport of `ranks`, one of `NAMES` or "hierarchical symmetric_memory", and the reason.

    This starts nothing and communicates with no rank, so that `doctor` uses it as well.

    Args:
        requested: by argument or environment; None: selected by what the ranks share.
        rank: this rank.
        node_of: returns a key that is equal for ranks that reach each other's memory. Called only if it matters.
        no_memory: the reason why no ranks reach each other's memory, for the requested transport; or None.
        no_messages: the reason why nodes cannot exchange messages; or None.
        node_size: the value of SHARDWEAVE_NODE_SIZE, if it is set, for the reason.

    Raises:
        ArgumentError: `requested` is not in `NAMES`.
        UnsupportedError: the transport cannot carry these ranks.
    """
    check_name(requested)
    pretended = f", by SHARDWEAVE_NODE_SIZE={node_size}" if node_size else ""

    def refused(why: str, allowed: str) -> UnsupportedError:
        return UnsupportedError(f"transport: {requested} cannot carry ranks {tuple(ranks)}: {why}; allowed: {allowed}")

    def check_messages(inside: str) -> None:
        if no_messages:
            raise UnsupportedError(f"transport: {inside} is of several nodes, and between them: {no_messages}")

    if requested == "process_group":
        return "process_group", "requested"
    if no_memory:
        if requested:
            raise refused(no_memory, "process_group")
        return "process_group", no_memory
    nodes = [node_of(r) for r in ranks]
    count = len(set(nodes))
    if requested == "symmetric_memory":
        # Only on request. It is meant to become the default for GPUs that reach each other once it is proven there; on
        # CPUs, pushing into the outputs copies less.
        if count == 1:
            return "symmetric_memory", "requested"
        check_messages("symmetric_memory")
        return "hierarchical symmetric_memory", "requested"
    if count == 1:
        name, why = "shared_memory", f"all ranks are on this machine{pretended}"
    elif count < len(ranks):
        name, why = "hierarchical", f"{len(ranks)} ranks are on {count} machines{pretended}"
    else:
        name, why = "process_group", f"each rank is on another machine{pretended}"
    if requested == "shared_memory" and count > 1:
        remote = next(r for r, node in zip(ranks, nodes, strict=True) if node != node_of(rank))
        raise refused(f"rank {remote} is on another machine{pretended}", name)
    if requested:
        name, why = requested, "requested"
    if name == "hierarchical":
        check_messages("shared_memory")
    return name, why


class Transports:
    """The transports of a default process group, each created on first use."""

    def __init__(self) -> None:
        c10d: Any = dist.distributed_c10d
        self.group = c10d.GroupMember.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Of the rendezvous, which serves all devices; a transport has that of its device's backend.
        self.timeout = max(timeout_on(device.type, self.group) for device in self.group._device_types or [_CPU])
        store = dist.PrefixStore("shardweave", c10d._get_default_store())
        self._node_size = pretended_node_size()
        this = weakref.ref(self)  # the rendezvous, which the transports hold, must not hold them

        def is_gone(rank: int) -> bool:
            transports = this()
            return transports is not None and transports._is_gone(rank)

        self.rendezvous = Rendezvous(store, self.rank, self.timeout, is_gone)
        flight_recorder.start(self.rank, self.size, self.rendezvous.texts.bounded)
        machine = machine_name() if platform.system() == "Linux" else _UNKNOWN
        # Peers read this to find ranks that share memory.
        self.rendezvous.texts.publish(_machine_key(self.rank), f"{machine} {self._node_size or 0}")
        self._shared_memory_transport: SharedMemoryTransport | None = None
        self._process_groups: dict[str, ProcessGroupTransport] = {}
        self._symmetric_memory_transports: dict[str, SymmetricMemoryTransport] = {}
        self._hierarchical: dict[tuple[str, str], AnyHierarchical] = {}
        self._nodes: dict[int, tuple[str, int]] = {}
        self._topologies: dict[tuple[tuple[int, ...], str], Topology | None] = {}
        self._published_figures: set[str] = set()
        self._obstacles: dict[str, str | None] = {}
        self._dispatchers: Counter[tuple[int, ...]] = Counter()

    def finish(self) -> None:
        """Finish asynchronous calls that may never be waited for, because the group has ended."""
        if "background" in vars(self.rendezvous):
            for each in (self._shared_memory_transport, *self._process_groups.values()):
                if each is not None:
                    each.timeout = min(each.timeout, _GRACE)
            with suppress(Exception), self.rendezvous.lock:
                pass  # the calls in flight have ended
        for transport in (self._shared_memory_transport, *self._symmetric_memory_transports.values()):
            if transport is not None and transport.pending is not None:
                transport.timeout = min(transport.timeout, _GRACE)
                with suppress(Exception):  # the error is raised when the tensor is used
                    transport.pending.finish()

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

    def _backend(self, device_type: str) -> str:
        # By device: a group that was created without naming a backend has one for each device type.
        name = self.group._get_backend(torch.device(device_type)).name()
        return _NCCL_CLASSES.get(name, name)

    def choose(self, ranks: tuple[int, ...], device: torch.device, requested: str | None) -> tuple[AnyTransport, str]:
        """The transport of `ranks` and the reason. All of `ranks` choose the same, by what each published at its start.

        Raises:
            ArgumentError: `requested` is not in `NAMES`.
            UnsupportedError: the requested transport cannot carry these ranks.
        """
        requested = requested or requested_transport()
        check_name(requested)
        recorder = flight_recorder.current
        call = self.rendezvous.calls.next_call(ranks, "choosing a transport")
        with nullcontext() if recorder is None else recorder.attempt(call):
            name, why = choose_transport(
                requested, ranks, self.rank, self._node_of, no_memory=why_no_memory(device, requested),
                no_messages=self._find_obstacle(device.type), node_size=self._node_size,
            )  # fmt: skip
        text = f"{name}: {why}"
        if stats().transports.get(ranks) != text:
            stats().transports[ranks] = text
            _logger.log(
                logging.INFO if self.rank == min(ranks) else logging.DEBUG, "ranks %s exchange by %s", ranks, text
            )
        return self._transport(name, device), why

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        if self._shared_memory_transport is not None and self._shared_memory_transport.has_died(rank):
            return True
        return self._find_obstacle("cpu") is None and self._process_group("cpu").is_gone(rank)

    def nodes_of(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """The node of each rank. Waits until all of `ranks` have published theirs."""
        self._read_nodes(ranks)
        return [self._node_of(rank) for rank in ranks]

    def find_topology(self, ranks: tuple[int, ...], device: torch.device) -> Topology | None:
        """The topology of `ranks` (ascending) for tensors on a device, equal on all of them: its nodes are the machines
        that ranks publish at their start, or for GPUs the NVLink domains that connect machines; its figures those that
        the first rank of each node publishes when ranks of several machines first need them. None if all share a node,
        or if a machine is not known.

        Raises:
            ArgumentError: as `_node_of`.
            MeetingTimeoutError, PeerError, DisagreementError: a rank did not arrive.
        """
        key = ranks, device.type
        if key not in self._topologies:
            # A rank that refuses its arguments publishes no figures.
            with self.rendezvous.making_ready(ranks, "finding the topology"):
                topology = self._topologies[key] = self._new_topology(ranks, device)
            if topology is not None:
                level = logging.INFO if self.rank == ranks[0] else logging.DEBUG
                _logger.log(level, "ranks %s have the topology %s: %s", ranks, topology.name, topology.origin)
        return self._topologies[key]

    def _new_topology(self, ranks: tuple[int, ...], device: torch.device) -> Topology | None:
        first_ranks: dict[Hashable, int] = {}
        nodes = self.nodes_of(ranks)
        for rank, node in zip(ranks, nodes, strict=True):
            first_ranks.setdefault(node, rank)
        if len(first_ranks) == 1 or any(machine == _UNKNOWN for machine, _ in nodes):
            return None
        if device.type not in self._published_figures:
            if device.type == "cuda":
                self.rendezvous.write(_domain_key(self.rank), nvlink_domain(device) or "")
            self.rendezvous.write(_figures_key(device.type, self.rank), to_text(machine_figures(device)))
            self._published_figures.add(device.type)
        if device.type == "cuda":
            # Machines that NVLink connects are one node.
            domains = self.rendezvous.read_each({rank: _domain_key(rank) for rank in ranks})
            nodes = [(domain, 0) if domain else node for domain, node in zip(domains, nodes, strict=True)]
            first_ranks = {}
            for rank, node in zip(ranks, nodes, strict=True):
                first_ranks.setdefault(node, rank)
        keys = {rank: _figures_key(device.type, rank) for rank in first_ranks.values()}
        figures = [from_text(text) for text in dict.fromkeys(self.rendezvous.read_each(keys))]
        number = {node: i for i, node in enumerate(first_ranks)}
        by_rank = [-1] * (ranks[-1] + 1)
        for rank, node in zip(ranks, nodes, strict=True):
            by_rank[rank] = number[node]
        return found_topology(by_rank, figures)

    def _transport(self, name: str, device: torch.device) -> AnyTransport:
        if name == "shared_memory":
            return self._shared_memory()
        if name == "symmetric_memory":
            return self._symmetric_memory(device)
        across = self._process_group(device.type)
        if name == "process_group":
            return across
        inside = self._shared_memory() if name == "hierarchical" else self._symmetric_memory(device)
        key = name, device.type
        if key not in self._hierarchical:
            self._hierarchical[key] = (
                HierarchicalSharedMemoryTransport(inside, across, self._nodes)
                if isinstance(inside, SharedMemoryTransport)
                else HierarchicalSymmetricMemoryTransport(inside, across, self._nodes)
            )
        return self._hierarchical[key]

    def _shared_memory(self) -> SharedMemoryTransport:
        if self._shared_memory_transport is None:
            timeout = timeout_on("cpu", self.group)
            self._shared_memory_transport = SharedMemoryTransport(self.rank, self.size, timeout, self.rendezvous)
            if flight_recorder.current is not None:
                flight_recorder.current.barriers = self._shared_memory_transport
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

    def _process_group(self, device_type: str) -> ProcessGroupTransport:
        backend = self._backend(device_type)
        if backend not in self._process_groups:
            self._process_groups[backend] = ProcessGroupTransport(
                self.rank, self.size, timeout_on(device_type, self.group), backend, self.rendezvous
            )
        return self._process_groups[backend]

    def _read_nodes(self, ranks: Sequence[int]) -> None:
        """Read the nodes of many ranks at once, if all have published theirs."""
        missing = [rank for rank in ranks if rank not in self._nodes]
        # If it fails, reading them one by one names the rank that is gone.
        if len(missing) > 1 and (texts := self.rendezvous.texts.get_all([_machine_key(rank) for rank in missing])):
            for rank, text in zip(missing, texts, strict=True):
                self._nodes[rank] = self._parsed_node(rank, text)

    def _node_of(self, rank: int) -> tuple[str, int]:
        """The machine and pretended node of a rank.

        Raises:
            ArgumentError: SHARDWEAVE_NODE_SIZE differs on that rank.
        """
        if rank not in self._nodes:
            self._nodes[rank] = self._parsed_node(rank, self.rendezvous.read(_machine_key(rank), rank))
        return self._nodes[rank]

    def _parsed_node(self, rank: int, text: str) -> tuple[str, int]:
        machine, _, size = text.partition(" ")
        if not size.isdecimal():
            raise malformed(rank, text)
        if int(size) != (self._node_size or 0):
            own, other = (f"{n}" if n else "not set" for n in (self._node_size, int(size)))
            raise ArgumentError(
                f"SHARDWEAVE_NODE_SIZE: {own} on rank {self.rank}, {other} on rank {rank}; allowed: one for all"
            )
        return machine, rank // self._node_size if self._node_size else 0


def _machine_key(rank: int) -> str:
    return f"machine/{rank}"


def _domain_key(rank: int) -> str:
    return f"nvlink domain/{rank}"


def _figures_key(device_type: str, rank: int) -> str:
    return f"figures/{device_type}/{rank}"


def why_no_memory(device: torch.device, requested: str | None) -> str | None:
    """The reason why no ranks reach each other's memory for tensors on `device` by the requested transport; or
    None."""
    if device.type == "cpu":
        return why_unsupported()
    return why_no_symmetric_memory(device) if requested == "symmetric_memory" else f"tensors are on {device.type}"


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


_transports: list[Transports] = []  # of the current default process group, if any
_creating = threading.Lock()


def _end_transports() -> None:
    while _transports:
        _transports.pop().finish()
    flight_recorder.stop()


on_group_destroyed(_end_transports)


def current_transports() -> Transports:
    """The transports of the current default process group.

    Raises:
        UnsupportedError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UnsupportedError("torch.distributed is not initialised; call init_process_group first")
    forget_dead_groups()
    if not _transports:
        with _creating:
            if not _transports:
                _transports.append(Transports())
    return _transports[0]


def has_topologies() -> bool:
    """Whether this rank has found the topology of any ranks on several nodes."""
    return bool(_transports) and any(_transports[0]._topologies.values())


def known_topology(ranks: tuple[int, ...], device_type: str) -> Topology | None:
    """The topology that `ranks` (ascending) have found, once all have made a call together and so know the same;
    None before, or if they found none. Does not wait."""
    if not _transports:
        return None
    topology = _transports[0]._topologies.get((ranks, device_type))
    return topology if topology is not None and _transports[0].rendezvous.calls.has_met(ranks) else None


def sessions() -> set[str]:
    """The sessions that this rank has agreed on with others in the current default process group (`Rendezvous`)."""
    return _transports[0].rendezvous.sessions if _transports else set()


def publish_settings() -> None:
    """Publish this rank's settings for warnings of its peers, if there is a process group."""
    if dist.is_initialized():
        current_transports().rendezvous.reports.publish_settings()


def why_not_backend(device: torch.device, requested: str | None = None) -> str | None:
    """The reason why the default process group cannot exchange tensors on `device` by the requested transport; or
    None."""
    return current_transports().why_not_backend(device.type, requested)
