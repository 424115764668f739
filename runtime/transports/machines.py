"""Machines: the nodes that ranks are on, which they publish at their start, and the topology that follows."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from ...errors import ArgumentError
from ...planner import MachineFigures, Topology, found_topology
from .machine_figures import from_text, machine_figures, to_text
from .nvlink_domain import nvlink_domain
from .rendezvous.rendezvous import Rendezvous
from .rendezvous.store_texts import malformed
from .shared_memory.transport import machine_name

_logger = logging.getLogger(__name__)
_UNKNOWN = "unknown"


class Machines:
    """The machines of the ranks of a process group, or the nodes that are pretended.

    Args:
        node_size: ranks of a pretended node; None: nodes are machines.

    Attributes:
        nodes: those that are known, by rank.
    """

    def __init__(self, rendezvous: Rendezvous, node_size: int | None) -> None:
        self._rendezvous, self._rank, self._node_size = rendezvous, rendezvous.rank, node_size
        self.nodes: dict[int, tuple[str, int]] = {}
        self._topologies: dict[tuple[tuple[int, ...], str], Topology | None] = {}
        self._published_figures: set[str] = set()
        machine = machine_name() if platform.system() == "Linux" else _UNKNOWN
        rendezvous.texts.publish(_machine_key(self._rank), f"{machine} {node_size or 0}")

    def nodes_of(self, ranks: Sequence[int]) -> list[tuple[str, int]]:
        """The node of each rank. Waits until all of `ranks` have published theirs."""
        self._read_nodes(ranks)
        return [self.node_of(rank) for rank in ranks]

    def find_topology(self, ranks: tuple[int, ...], device: torch.device) -> Topology | None:
        """The topology of `ranks` (ascending) for tensors on a device, equal on all of them: its nodes are the machines
        that ranks publish at their start, or for GPUs the NVLink domains that connect machines; its figures those that
        the first rank of each node publishes when ranks of several machines first need them. None if all share a node,
        or if a machine is not known.

        Raises:
            ArgumentError: as `node_of`.
            MeetingTimeoutError, PeerError, DisagreementError: a rank did not arrive.
        """
        key = ranks, device.type
        if key not in self._topologies:
            # A rank that refuses its arguments publishes no figures.
            with self._rendezvous.making_ready(ranks, self._for_request(ranks, "finding the topology")):
                topology = self._topologies[key] = self._new_topology(ranks, device)
            if topology is not None:
                level = logging.INFO if self._rank == ranks[0] else logging.DEBUG
                _logger.log(level, "ranks %s have the topology %s: %s", ranks, topology.name, topology.origin)
        return self._topologies[key]

    def figures_of_first(self, ranks: tuple[int, ...], device: torch.device) -> MachineFigures:
        """The figures of the first of `ranks` (ascending), which they share: equal on all of them.

        Raises:
            MeetingTimeoutError, PeerError, DisagreementError: a rank did not arrive.
        """
        key, first = _figures_key(device.type, ranks[0]), ranks[0]
        with self._rendezvous.making_ready(ranks, self._for_request(ranks, "finding the figures of this machine")):
            if self._rank == first and device.type not in self._published_figures:
                self._rendezvous.write(key, to_text(machine_figures(device)))
                self._published_figures.add(device.type)
            (text,) = self._rendezvous.read_each({first: key})
        return _parsed_figures(first, text)

    def _for_request(self, ranks: tuple[int, ...], what: str) -> Callable[[], str]:
        """The text of `what`, with the request of these ranks that is being bound, if it is known."""
        call = self._rendezvous.calls.current
        return lambda: f"{what} for {call.text}" if call.ranks == ranks and not call.fingerprint else what

    def known_topology(self, ranks: tuple[int, ...], device_type: str) -> Topology | None:
        """The topology that `find_topology` has found for `ranks`, once all of them have made a call together."""
        topology = self._topologies.get((ranks, device_type))
        return topology if topology is not None and self._rendezvous.calls.has_met(ranks) else None

    @property
    def has_topologies(self) -> bool:
        """Whether a topology has been found for any ranks."""
        return any(self._topologies.values())

    def _new_topology(self, ranks: tuple[int, ...], device: torch.device) -> Topology | None:
        first_ranks: dict[Hashable, int] = {}
        nodes = self.nodes_of(ranks)
        for rank, node in zip(ranks, nodes, strict=True):
            first_ranks.setdefault(node, rank)
        if len(first_ranks) == 1 or any(machine == _UNKNOWN for machine, _ in nodes):
            return None
        if device.type not in self._published_figures:
            if device.type == "cuda":
                self._rendezvous.write(_domain_key(self._rank), nvlink_domain(device) or "")
            self._rendezvous.write(_figures_key(device.type, self._rank), to_text(machine_figures(device)))
            self._published_figures.add(device.type)
        if device.type == "cuda":
            # Machines that NVLink connects are one node.
            domains = self._rendezvous.read_each({rank: _domain_key(rank) for rank in ranks})
            nodes = [(domain, 0) if domain else node for domain, node in zip(domains, nodes, strict=True)]
            first_ranks = {}
            for rank, node in zip(ranks, nodes, strict=True):
                first_ranks.setdefault(node, rank)
        keys = {rank: _figures_key(device.type, rank) for rank in first_ranks.values()}
        texts = {text: rank for rank, text in zip(keys, self._rendezvous.read_each(keys), strict=True)}
        figures = [_parsed_figures(rank, text) for text, rank in texts.items()]
        number = {node: i for i, node in enumerate(first_ranks)}
        by_rank = np.full(ranks[-1] + 1, -1)
        by_rank[list(ranks)] = [number[node] for node in nodes]
        return found_topology(by_rank, figures)

    def _read_nodes(self, ranks: Sequence[int]) -> None:
        """Read the nodes of many ranks at once, if all have published theirs."""
        missing = [rank for rank in ranks if rank not in self.nodes]
        # If it fails, reading them one by one names the rank that is gone.
        if len(missing) > 1 and (texts := self._rendezvous.texts.get_all([_machine_key(rank) for rank in missing])):
            for rank, text in zip(missing, texts, strict=True):
                self.nodes[rank] = self._parsed_node(rank, text)

    def node_of(self, rank: int) -> tuple[str, int]:
        """The machine and pretended node of a rank.

        Raises:
            ArgumentError: SHARDWEAVE_NODE_SIZE differs on that rank.
        """
        if rank not in self.nodes:
            self.nodes[rank] = self._parsed_node(rank, self._rendezvous.read(_machine_key(rank), rank))
        return self.nodes[rank]

    def _parsed_node(self, rank: int, text: str) -> tuple[str, int]:
        machine, _, size = text.partition(" ")
        if not size.isdecimal():
            raise malformed(rank, text)
        if int(size) != (self._node_size or 0):
            own, other = (f"{n}" if n else "not set" for n in (self._node_size, int(size)))
            raise ArgumentError(
                f"SHARDWEAVE_NODE_SIZE: {own} on rank {self._rank}, {other} on rank {rank}; allowed: one for all"
            )
        return machine, rank // self._node_size if self._node_size else 0


def _machine_key(rank: int) -> str:
    return f"machine/{rank}"


def _domain_key(rank: int) -> str:
    return f"nvlink domain/{rank}"


def _parsed_figures(rank: int, text: str) -> MachineFigures:
    try:
        return from_text(text)
    except ArgumentError as error:
        raise malformed(rank, text) from error


def _figures_key(device_type: str, rank: int) -> str:
    return f"figures/{device_type}/{rank}"
