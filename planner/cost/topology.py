"""Topologies: the links between ranks and their costs, by which plans are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...errors import ArgumentError, shown
from ..layouts.nodes import Nodes, RankNodes, nodes_of

_MAX_NODE_SIZE = 1 << 62  # fits in an int64
_BANDWIDTH_RANGE = 1e-9, 1e30  # in 1e9 bytes per second; the price of 2**62 bytes stays finite
_MAX_US = 1e12
_OPTIONAL = {"nodes": None, "nics_per_node": None, "full_duplex": True, "origin": ""}  # left out of JSON if they are so


@dataclass(frozen=True)
class Link:
    """The cost of one kind of link, as one rank sees it.

    Attributes:
        latency_us: microseconds of a step over the link, regardless of its bytes.
        gigabytes_per_s: bandwidth of one rank, or of one NIC (`Topology.nics_per_node`), in 1e9 bytes per second, in
            each direction at the same time.
        one_sided: whether ranks access each other's memory. If not, bytes are packed and unpacked.
        message_us: microseconds per peer: of a message, or on a one-sided link of waiting for one more rank (0 if all
            ranks run at the same time).

    Raises:
        ArgumentError: microseconds below 0 or above 1e12, a bandwidth below 1e-9 or above 1e30, or a `one_sided` other
            than True and False.
    """

    latency_us: float
    gigabytes_per_s: float
    one_sided: bool
    message_us: float = 0.0

    def __post_init__(self) -> None:
        _check_bandwidth("link: gigabytes_per_s", self.gigabytes_per_s)
        _check_us("link: latency_us", self.latency_us)
        _check_us("link: message_us", self.message_us)
        if not isinstance(self.one_sided, bool):
            raise ArgumentError(f"link: one_sided {shown(self.one_sided)}; allowed: True, False")

    def us(self, nbytes: Any, messages: Any) -> Any:
        """Microseconds in which a rank moves `nbytes` to or from `messages` peers; 0 for 0 bytes. Numbers or arrays."""
        us = (nbytes > 0) * self.latency_us
        if self.message_us:
            us = us + messages * self.message_us
        return us + nbytes / (self.gigabytes_per_s * 1e3)


@dataclass(frozen=True)
class Topology:
    """Nodes of ranks, the links inside and between them, and the memory of each rank.

    Attributes:
        name: the name that plans show.
        node_size: ranks per node: r and s share a node if r // node_size == s // node_size. None: all ranks do, unless
            `nodes` is given.
        node, network: the links inside a node and between nodes.
        memory_gigabytes_per_s: memory bandwidth of a rank in 1e9 bytes per second, reads and writes together.
        call_us: microseconds of host overhead per call, besides its steps. 0 if the host runs ahead of a busy device;
            the cost of launches is then part of the latency of a link.
        nodes: the node of each rank, by rank: whole numbers, equal for ranks that share a node. For nodes of different
            sizes or whose ranks are not consecutive; instead of `node_size`.
        nics_per_node: the NICs that the ranks of a node share, in equal blocks of ascending ranks: the time of an
            exchange between nodes is that of the NIC with the most bytes in or out. None: each rank has its own.
        full_duplex: whether a NIC receives while it sends, so that the larger number of bytes counts. If not, their sum
            does.
        origin: where the nodes and figures come from, for `explain()`; empty for a topology that a user made. Not
            compared.

    Raises:
        ArgumentError: a number outside the range that `Link` allows, a `node_size` below 1 or above 2**62, a `node` or
            `network` that is not a Link, a name that is not a string, `nodes` together with `node_size` or of other
            values than whole numbers of 0 and up, or `nics_per_node` below 1.
    """

    name: str
    node_size: int | None
    node: Link
    network: Link
    memory_gigabytes_per_s: float
    call_us: float = 0.0
    nodes: RankNodes | None = field(default=None, repr=False)
    nics_per_node: int | None = field(default=None, repr=False)
    full_duplex: bool = field(default=True, repr=False)
    origin: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.node_size
        if self.nodes is not None:
            object.__setattr__(self, "nodes", _checked_nodes(self.nodes, size))
        nics = self.nics_per_node
        if nics is not None and not _is_count(nics):
            allowed = "a whole number from 1 to 2**62, or None for one for each rank"
            raise ArgumentError(f"topology: nics_per_node {shown(nics)}; allowed: {allowed}")
        if not isinstance(self.full_duplex, bool):
            raise ArgumentError(f"topology: full_duplex {shown(self.full_duplex)}; allowed: True, False")
        if not isinstance(self.origin, str):
            raise ArgumentError(f"topology: origin {shown(self.origin)}; allowed: text")
        if not isinstance(self.name, str):
            raise ArgumentError(f"topology: name {shown(self.name)}; allowed: text")
        for name in ("node", "network"):
            if not isinstance(getattr(self, name), Link):
                raise ArgumentError(f"topology: {name} {shown(getattr(self, name))}; allowed: a Link")
        if size is not None and not _is_count(size):
            allowed = "a whole number from 1 to 2**62, or None for one node"
            raise ArgumentError(f"topology: node_size {shown(size)}; allowed: {allowed}")
        _check_bandwidth("topology: memory_gigabytes_per_s", self.memory_gigabytes_per_s)
        _check_us("topology: call_us", self.call_us)

    @cached_property
    def rank_nodes(self) -> Nodes | None:
        """The node of each rank; None if all ranks share one."""
        return self.node_size if self.nodes is None else self.nodes

    def node_of(self, rank: int) -> int:
        """The index of the node of a rank."""
        return int(self.nodes_of(np.array([rank]))[0])

    def nodes_of(self, ranks: np.ndarray) -> np.ndarray:
        """[n] the index of the node of each of `ranks` [n].

        Raises:
            ArgumentError: `nodes` does not have one of the ranks.
        """
        if self.nodes is not None and len(ranks) and int(ranks.max()) >= len(self.nodes):
            raise ArgumentError(
                f"topology: nodes has {len(self.nodes)} ranks; allowed: more than rank {int(ranks.max())} of the mesh"
            )
        return nodes_of(ranks, self.rank_nodes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached, as topologies are keys of many caches
        figures = self.node, self.network, self.memory_gigabytes_per_s, self.call_us
        return hash((self.name, self.rank_nodes, figures, self.nics_per_node, self.full_duplex))

    def copy_us(self, nbytes: Any) -> Any:
        """Microseconds to copy `nbytes` inside a rank, which reads and writes each byte."""
        return 2 * nbytes / (self.memory_gigabytes_per_s * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain values, ready for JSON."""
        values = asdict(self)
        if self.nodes is not None:
            values["nodes"] = list(self.nodes)
        return {name: value for name, value in values.items() if name not in _OPTIONAL or value != _OPTIONAL[name]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """The inverse of `to_dict`.

        Raises:
            ArgumentError: a key is unknown or missing, or a value is invalid.
        """
        values = _fields_of(cls, "topology", data)
        for link in ("node", "network"):
            values[link] = Link(**_fields_of(Link, f"topology: {link}", values[link]))
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The inverse of `to_json`; also reads files of `python -m shardweave calibrate --out FILE`.

        Raises:
            ArgumentError: `text` is not JSON, or as for `from_dict`.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:  # ValueError covers numbers of over 4,300 digits
            raise ArgumentError(f"topology: not valid JSON: {error}") from None
        return cls.from_dict(data)


def _checked_nodes(nodes: Any, node_size: int | None) -> RankNodes:
    if isinstance(nodes, RankNodes) and node_size is None:
        return nodes
    if node_size is not None:
        raise ArgumentError(f"topology: nodes and node_size {shown(node_size)}; allowed: one of them")
    known = tuple(nodes) if isinstance(nodes, Iterable) and not isinstance(nodes, str | bytes | Mapping) else ()
    if not known or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**31 for n in known):
        raise ArgumentError(f"topology: nodes {shown(nodes)}; allowed: a whole number of 0 and up for each rank")
    return RankNodes(known)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_NODE_SIZE


def _check_bandwidth(name: str, value: Any) -> None:
    least, most = _BANDWIDTH_RANGE
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(f"{name} {shown(value)}; allowed: a number from {least:g} to {most:g}")


def _check_us(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_US:
        raise ArgumentError(f"{name} {shown(value)}; allowed: a number from 0 to {_MAX_US:g}")


def _fields_of(kind: type, name: str, data: Any) -> dict[str, Any]:
    known = fields(kind)
    allowed = [f.name for f in known]
    if not isinstance(data, Mapping):
        raise ArgumentError(f"{name}: {shown(data)}; allowed: an object of {', '.join(allowed)}")
    unknown = [key for key in data if key not in allowed]
    if unknown:
        keys = "unknown key" if len(unknown) == 1 else "unknown keys"
        raise ArgumentError(f"{name}: {keys} {', '.join(map(shown, unknown[:4]))}; allowed: {', '.join(allowed)}")
    missing = [f.name for f in known if f.name not in data and f.default is MISSING]
    if missing:
        raise ArgumentError(f"{name}: {', '.join(missing)} missing")
    return dict(data)


_NVLINK = Link(latency_us=5.0, gigabytes_per_s=450.0, one_sided=True)
_INFINIBAND = Link(latency_us=20.0, gigabytes_per_s=50.0, one_sided=False, message_us=2.0)

NVLINK_NODE = Topology("one NVLink domain", None, _NVLINK, _INFINIBAND, 4300.0)
"""GPUs in one NVLink domain. The bandwidth is NVLink 4's nominal 450 GB/s per direction. The latency and the memory
bandwidth (90% of an H200's nominal 4.8 TB/s) are assumptions, not measurements."""

NVLINK_INFINIBAND = Topology("NVLink nodes of 8 on InfiniBand", 8, _NVLINK, _INFINIBAND, 4300.0)
"""Nodes of 8 GPUs as in `NVLINK_NODE`, with 400 Gb/s of InfiniBand per GPU. Latencies are assumptions, not
measurements."""

TopologyName = Literal["nvlink", "nvlink-infiniband"]
TOPOLOGIES: dict[str, Topology] = {"nvlink": NVLINK_NODE, "nvlink-infiniband": NVLINK_INFINIBAND}
"""The topologies that have names, in functions and on the command line."""


def topology_argument(topology: object) -> Topology | None:
    """The argument `topology` of a function: a Topology, the name of one, or None.

    Raises:
        ArgumentError: anything else.
    """
    if topology is None or isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and topology in TOPOLOGIES:
        return TOPOLOGIES[topology]
    names = " or ".join(map(repr, TOPOLOGIES))
    raise ArgumentError(f"topology: {shown(topology)}; allowed: a Topology, or None, or a name: {names}")
