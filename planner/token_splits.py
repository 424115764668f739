"""How ranks that send rows of tokens know the sizes of what they receive: from the host, or by slabs of one size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from .topology import Topology

Splits = Literal["host", "fixed"]
SPLITS: tuple[Splits, ...] = ("host", "fixed")
HOST_READ_US = 40.0
"""A host that waits for its device: until that is idle, and again until it has something to do. Assumed, until
measured."""


@dataclass(frozen=True)
class SplitPrices:
    """Microseconds of one exchange of rows, the host's wait included, on one topology."""

    host: float
    slabs: float

    @property
    def cheaper(self) -> Splits:
        return "fixed" if self.slabs < self.host else "host"


def price_splits(
    nodes: Sequence[Hashable], rows: int, slab_rows: int, row_bytes: int, topology: Topology, host_waits: bool
) -> SplitPrices:
    """Prices of the rank that is dearest, on the links of a topology.

    Args:
        nodes: of each rank; equal where ranks share one.
        rows: that a rank sends in all, spread evenly.
        slab_rows: that a rank sends to each other in a slab of one size, whatever there is to send.
        host_waits: for a device, to read the sizes.
    """
    host = slabs = 0.0
    for ranks_there in set(Counter(nodes).values()):
        links = (topology.node, ranks_there - 1), (topology.network, len(nodes) - ranks_there)
        host = max([host, *(link.us(peers * rows // len(nodes) * row_bytes, peers) for link, peers in links)])
        slabs = max([slabs, *(link.us(peers * slab_rows * row_bytes, peers) for link, peers in links)])
    return SplitPrices(host + HOST_READ_US * host_waits, slabs)
