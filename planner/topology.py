"""What links ranks, and what a link costs: the prices by which plans are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from ..errors import ArgumentError, shown

_LARGEST_NODE = 1 << 62  # ranks, which an int64 holds
_BANDWIDTHS = 1e-9, 1e30  # 1e9 bytes a second, by which the price of 2**62 bytes is finite
_MOST_US = 1e12


@dataclass(frozen=True)
class Link:
    """One kind of link, from the place of one rank.

    Attributes:
        latency_us: what a step over the link costs, however little moves.
        gigabytes_per_s: 1e9 bytes a second of one rank, in each of both directions at once.
        one_sided: ranks write straight into each other's memory; where they do not, bytes are packed and unpacked.
        message_us: what each peer costs beside: a message, or on a one-sided link one more rank to wait for, which is
            free where all ranks run at once (0 then).

    Raises:
        ArgumentError: microseconds below 0 or above 1e12, a bandwidth below 1e-9 or above 1e30, a `one_sided` that is
            neither True nor False.
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
        """Microseconds in which a rank moves `nbytes` to or from so many peers; numbers or arrays, 0 where 0 move."""
        return (nbytes > 0) * self.latency_us + messages * self.message_us + nbytes / (self.gigabytes_per_s * 1e3)


@dataclass(frozen=True)
class Topology:
    """Nodes of `node_size` consecutive ranks each, the links inside and between them, and each rank's memory.

    Attributes:
        name: for people.
        node, network: the links inside a node, and between nodes.
        node_size: ranks r and s share a node if r // node_size == s // node_size; None: all ranks do.
        memory_gigabytes_per_s: 1e9 bytes a second, read and written together.
        call_us: what a call costs beside its steps, whatever it does: the host's work. 0 where the host runs ahead of
            a device, as it does of a GPU that has enough to do; launching is then part of a link's latency.

    Raises:
        ArgumentError: a figure out of the range that `Link` allows, a `node_size` below 1 or above 2**62, a `node` or
            `network` that is no Link, a name that is no text.
    """

    name: str
    node_size: int | None
    node: Link
    network: Link
    memory_gigabytes_per_s: float
    call_us: float = 0.0

    def __post_init__(self) -> None:
        size = self.node_size
        if not isinstance(self.name, str):
            raise ArgumentError(f"topology: name {shown(self.name)}; allowed: text")
        for name in ("node", "network"):
            if not isinstance(getattr(self, name), Link):
                raise ArgumentError(f"topology: {name} {shown(getattr(self, name))}; allowed: a Link")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST_NODE):
            allowed = "a whole number from 1 to 2**62, or None for one node"
            raise ArgumentError(f"topology: node_size {shown(size)}; allowed: {allowed}")
        _check_bandwidth("topology: memory_gigabytes_per_s", self.memory_gigabytes_per_s)
        _check_us("topology: call_us", self.call_us)

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return 0 if self.node_size is None else rank // self.node_size

    def copy_us(self, nbytes: Any) -> Any:
        """Microseconds to copy `nbytes` inside a rank: each is read and written."""
        return 2 * nbytes / (self.memory_gigabytes_per_s * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """The topology that `to_dict` was called on.

        Raises:
            ArgumentError: a key too many or too few, a value that does not fit.
        """
        values = _fields_of(cls, "topology", data)
        for link in ("node", "network"):
            values[link] = Link(**_fields_of(Link, f"topology: {link}", values[link]))
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as JSON, of several lines."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology of what `to_json` made, or `python -m shardweave calibrate --out FILE`.

        Raises:
            ArgumentError: no JSON, or as for `from_dict`.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:  # numbers of over 4,300 digits are a ValueError
            raise ArgumentError(f"topology: no JSON: {error}") from None
        return cls.from_dict(data)


def _check_bandwidth(name: str, value: Any) -> None:
    least, most = _BANDWIDTHS
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(f"{name} {shown(value)}; allowed: a number from {least:g} to {most:g}")


def _check_us(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST_US:
        raise ArgumentError(f"{name} {shown(value)}; allowed: a number from 0 to {_MOST_US:g}")


def _fields_of(kind: type, name: str, data: Any) -> dict[str, Any]:
    known = fields(kind)
    allowed = [f.name for f in known]
    if not isinstance(data, Mapping) or not set(data) <= set(allowed):
        raise ArgumentError(f"{name}: {shown(data)}; allowed: an object of {', '.join(allowed)}")
    missing = [f.name for f in known if f.name not in data and f.default is MISSING]
    if missing:
        raise ArgumentError(f"{name}: {', '.join(missing)} missing")
    return dict(data)


_NVLINK = Link(latency_us=5.0, gigabytes_per_s=450.0, one_sided=True)
_INFINIBAND = Link(latency_us=20.0, gigabytes_per_s=50.0, one_sided=False, message_us=2.0)

NVLINK_NODE = Topology("one NVLink domain", None, _NVLINK, _INFINIBAND, 4300.0)
"""GPUs that all reach each other. NVLink 4 has 450 GB/s a direction by its makers. Assumed, not measured: the latency,
and the memory's bandwidth, nine tenths of the 4.8 TB/s that an H200 has by its makers."""

NVLINK_INFINIBAND = Topology("NVLink nodes of 8 on InfiniBand", 8, _NVLINK, _INFINIBAND, 4300.0)
"""Nodes of 8 GPUs as in `NVLINK_NODE`, with 400 Gb/s of InfiniBand a GPU. Latencies are assumed, not measured."""
