"""Figures of kinds of hardware, for topologies that are found and not measured. Each row gives its source.

"Nominal" is the vendor's data sheet, in one direction. Latencies and the costs of messages are assumptions, as is that
a copy reaches 90% of the nominal memory bandwidth. `python -m shardweave calibrate` measures better figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ArgumentError, shown
from ..layouts.distinct import numbered
from ..layouts.nodes import RankNodes
from .topology import Link, Topology


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        name: part of the name that the driver gives, or "cpu".
        node: the link between devices of a node.
        memory_gigabytes_per_s: as for `Topology`.
        source: where the figures come from.
    """

    name: str
    node: Link
    memory_gigabytes_per_s: float
    source: str


@dataclass(frozen=True)
class Network:
    """A kind of network.

    Attributes:
        name: its name.
        link: one NIC; its bandwidth stands where the NIC's own is not known.
        full_duplex: as for `Topology`.
        source: where the figures come from.
    """

    name: str
    link: Link
    full_duplex: bool
    source: str


def _gpu(name: str, link: float, memory: float, source: str) -> Device:
    return Device(name, Link(5.0, link, one_sided=True), 0.9 * memory, source)


DEVICES = (
    _gpu("GB200", 900.0, 8000.0, "nominal: NVLink 5, HBM3e"),
    _gpu("B200", 900.0, 8000.0, "nominal: NVLink 5, HBM3e"),
    _gpu("H200", 450.0, 4800.0, "nominal: NVLink 4, HBM3e"),
    _gpu("H100 PCIe", 64.0, 2000.0, "nominal: PCIe 5.0 x16, HBM2e"),
    _gpu("H100", 450.0, 3350.0, "nominal: NVLink 4, HBM3"),
    _gpu("A100-PCIE", 32.0, 1555.0, "nominal: PCIe 4.0 x16, HBM2"),
    _gpu("A100", 300.0, 2039.0, "nominal: NVLink 3, HBM2e"),
    _gpu("MI300X", 448.0, 5300.0, "nominal: 7 Infinity Fabric links, HBM3"),
    Device("cpu", Link(20.0, 10.0, one_sided=True), 20.0, "assumed: a core copies 10 GB/s in shared memory"),
)
OTHER_DEVICE = _gpu("other", 32.0, 1000.0, "nominal: PCIe 4.0 x16; memory assumed")
NETWORKS = (
    Network("RDMA", Link(20.0, 50.0, one_sided=False, message_us=2.0), True, "assumed: 400 Gb/s"),
    Network(
        "TCP",
        Link(100.0, 1.25, one_sided=False, message_us=20.0),
        False,
        "assumed: 10 Gb/s, and one thread for all connections",
    ),
)


def device_of(name: str) -> Device:
    """The row of `DEVICES` for a device by the name that its driver gives; `OTHER_DEVICE` if there is none."""
    return next((device for device in DEVICES if device.name in name), OTHER_DEVICE)


@dataclass(frozen=True)
class MachineFigures:
    """What a rank knows of its machine.

    Attributes:
        device: the name of the device, "cpu" for CPU tensors.
        network: a name of `NETWORKS`.
        nics: the number of NICs.
        nic_gigabytes_per_s: the bandwidth of a NIC; None if it is not known.
        measured: the figures that `calibrate` kept for this kind of machine, as `Topology.to_dict` has them: "node",
            "network" (its bandwidth is that of a node, in each direction at once), "memory_gigabytes_per_s", "call_us",
            those that were measured; None: there are none.
    """

    device: str
    network: str = "TCP"
    nics: int = 1
    nic_gigabytes_per_s: float | None = None
    measured: dict[str, Any] | None = None

    def topology(self) -> Topology:
        """The topology of one node with these figures; nodes are set later.

        Raises:
            ArgumentError: a figure that `Topology` does not allow, or a network that is not known.
        """
        device = device_of(self.device)
        network = next((network for network in NETWORKS if network.name == self.network), None)
        if network is None:
            raise ArgumentError(f"network: {shown(self.network)}; allowed: {', '.join(n.name for n in NETWORKS)}")
        link = network.link
        if self.nic_gigabytes_per_s is not None:
            link = replace(link, gigabytes_per_s=self.nic_gigabytes_per_s)
        topology = Topology(
            "", None, device.node, link, device.memory_gigabytes_per_s, nics_per_node=self.nics,
            full_duplex=network.full_duplex,
        )  # fmt: skip
        if not self.measured:
            return topology
        topology = Topology.from_dict({**topology.to_dict(), **self.measured})
        if "network" in self.measured:
            # Measured while as many bytes came in as went out, by all NICs of a node together.
            rate = topology.network.gigabytes_per_s / self.nics * (1 if network.full_duplex else 2)
            topology = replace(topology, network=replace(topology.network, gigabytes_per_s=rate))
        return topology

    @property
    def source(self) -> str:
        """Where the figures come from."""
        if self.measured is not None:
            return self.device_source
        network = next(n for n in NETWORKS if n.name == self.network)
        known = f"{8 * self.nic_gigabytes_per_s:g} Gb/s" if self.nic_gigabytes_per_s is not None else network.source
        nics = "1 NIC" if self.nics == 1 else f"{self.nics} NICs"
        return f"{self.device_source}, {network.name} over {nics} for each node ({known})"

    @property
    def device_source(self) -> str:
        """Where the figures inside a node come from."""
        if self.measured is not None:
            return f"calibrated on {self.device}"
        return f"{self.device} ({device_of(self.device).source})"


def found_topology(nodes: Sequence[int] | np.ndarray, machines: Sequence[MachineFigures]) -> Topology | None:
    """The topology of ranks on several nodes; None if all share one.

    For machines of one kind (device and network) measured figures are those of the first machine that has any, and
    stand for all of them. Among kinds, and among machines without measured figures, the slowest count.

    Args:
        nodes: the node of each rank, by rank; -1 for ranks that take no part. Of thousands of ranks an int64 array is
            read fastest.
        machines: the figures of the machines of the ranks that take part, in ascending order of ranks; repeated ones
            may be left out.

    Raises:
        ArgumentError: as `MachineFigures.topology`.
    """
    if isinstance(nodes, np.ndarray):
        by_rank = nodes.astype(np.int64)
    else:
        by_rank = np.fromiter(nodes, np.int64, len(nodes))
    ranks = None if by_rank.min(initial=0) >= 0 else np.flatnonzero(by_rank >= 0)
    of_ranks = by_rank if ranks is None else by_rank[ranks]
    sizes = _sizes(of_ranks)
    if len(sizes) < 2:
        return None
    measured: dict[tuple[str, str], MachineFigures] = {}
    for machine in machines:
        if machine.measured is not None:
            measured.setdefault((machine.device, machine.network), machine)
    used = [measured.get((machine.device, machine.network), machine) for machine in machines]
    topology, *others = [machine.topology() for machine in used]
    for other in others:
        topology = _slower(topology, other)
    size = _node_size(ranks, of_ranks, sizes)
    counts = np.flatnonzero(np.bincount(sizes)).tolist()
    return replace(
        topology,
        name=f"{len(sizes)} nodes of {' or '.join(map(str, counts))} rank{'s' * (counts != [1])}",
        node_size=size,
        nodes=RankNodes(by_rank.tolist(), by_rank) if size is None else None,
        origin="; ".join(dict.fromkeys(machine.source for machine in used)),
    )


def _slower(a: Topology, b: Topology) -> Topology:
    """The slower figures of two topologies of one node."""
    return replace(
        a,
        node=_slower_link(a.node, b.node),
        network=_slower_link(a.network, b.network),
        memory_gigabytes_per_s=min(a.memory_gigabytes_per_s, b.memory_gigabytes_per_s),
        call_us=max(a.call_us, b.call_us),
        nics_per_node=min(a.nics_per_node or 1, b.nics_per_node or 1),
    )


def _slower_link(a: Link, b: Link) -> Link:
    latency, message = max(a.latency_us, b.latency_us), max(a.message_us, b.message_us)
    return Link(latency, min(a.gigabytes_per_s, b.gigabytes_per_s), a.one_sided and b.one_sided, message)


def _sizes(nodes: np.ndarray) -> np.ndarray:
    """[number of nodes] the number of ranks of each node, given the node of each rank."""
    if nodes.max(initial=0) < 2 * len(nodes):  # as numbers of nodes are; faster than to sort them
        counts = np.bincount(nodes)
        return counts[counts > 0]
    return np.bincount(numbered(nodes)[1])


def _node_size(ranks: np.ndarray | None, nodes: np.ndarray, sizes: np.ndarray) -> int | None:
    """The `node_size` that gives the same nodes; None if there is none.

    Args:
        ranks, nodes: [n] the ranks, ascending (None: `arange`), and the node of each.
        sizes: [number of nodes] the number of ranks of each.
    """
    changes = np.flatnonzero(nodes[1:] != nodes[:-1])
    if len(changes) + 1 != len(sizes):
        return None  # the ranks of a node are not consecutive
    first, last = np.append(0, changes + 1), np.append(changes, len(nodes) - 1)  # of each node
    if ranks is not None:
        first, last = ranks[first], ranks[last]
    for size in (int(sizes.max()), int(first[1])):
        index = first // size
        if (index == last // size).all() and (index[1:] != index[:-1]).all():
            return size
    return None
