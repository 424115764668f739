"""The split sizes of a token exchange: read by the host from the device, or the same for all chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from .topology import Topology

Splits = Literal["host", "fixed"]
SPLITS: tuple[Splits, ...] = ("host", "fixed")
HOST_READ_US = 40.0
"""Microseconds that the host waits for its device to be idle, and the device then waits for new work. An assumption,
not a measurement."""


@dataclass(frozen=True)
class SplitPrices:
    """The estimated microseconds of one exchange for each kind of split sizes, the wait of the host included."""

    host: float
    fixed: float

    @property
    def cheaper(self) -> Splits:
        """The kind with the lower price."""
        return "fixed" if self.fixed < self.host else "host"


def price_splits(
    nodes: Sequence[Hashable], rows: int, chunk_rows: int, row_bytes: int, topology: Topology, host_waits: bool
) -> SplitPrices:
    """Estimate one exchange of rows on the slowest rank.

    Args:
        nodes: the node of each rank.
        rows: the rows that a rank sends in all, spread evenly over the ranks.
        chunk_rows: the rows of a chunk, which a rank sends to each peer regardless of the number of tokens.
        row_bytes: the bytes of a row.
        host_waits: whether the host must wait for a device to read the sizes.
    """
    host = fixed = 0.0
    for ranks_there in set(Counter(nodes).values()):
        links = (topology.node, ranks_there - 1), (topology.network, len(nodes) - ranks_there)
        sharing = 1, -(-ranks_there // (topology.nics_per_node or ranks_there))  # the ranks that share the link
        for (link, peers), ranks in zip(links, sharing, strict=True):
            host = max(host, link.us(ranks * peers * rows // len(nodes) * row_bytes, peers))
            fixed = max(fixed, link.us(ranks * peers * chunk_rows * row_bytes, peers))
    return SplitPrices(host + HOST_READ_US * host_waits, fixed)
