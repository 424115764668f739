"""Settings and limits that decide between algorithms: push or pull, one collective or point-to-point messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Direction = Literal["auto", "push", "pull"]


class Rates(NamedTuple):
    """Bytes per second of a rank: writes to its peers, reads from its peers, copies in its own memory."""

    push: float = 1.0
    pull: float = 1.0
    local: float = 1.0


class PooledOutputs(NamedTuple):
    """Buffers for outputs that the ranks of a group write directly: bytes of each, and how many are lent at a time."""

    nbytes: int
    number: int


@dataclass
class WindowPolicy:
    """Whether ranks that share windows write into those of their peers, into their outputs, or read from them.

    Attributes:
        direction: "auto" takes the faster one by the rates of the group. Equal on all ranks when programs are bound.
        rates: measured rates, by the ascending ranks of a group. Equal on all ranks of the group.
        outputs: pooled outputs, by the ascending ranks of a group. Equal on all ranks of the group.
    """

    direction: Direction = "auto"
    rates: dict[tuple[int, ...], Rates] = field(default_factory=dict)
    outputs: dict[tuple[int, ...], PooledOutputs] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveLimits:
    """The largest shard, in bytes, for which one collective replaces a message to each peer."""

    all_to_all: int
    """Each receive buffer has room for so many bytes, whatever the request: gloo ends a process that gets more."""
    all_gather: float


BACKENDS = {
    # One all-to-all saves the start-up cost of gloo's messages, but packing large shards into one buffer costs more
    # than that. gloo's all-gather was slower than its all-to-all when this was set.
    "gloo": CollectiveLimits(all_to_all=1 << 20, all_gather=0),
    # NCCL's all-to-all is a group of messages that have to be packed; its all-gather sends each byte into a node once.
    "nccl": CollectiveLimits(all_to_all=0, all_gather=math.inf),
}


def assumed_node(rank: int, one_sided: bool, node_size: int | None) -> int:
    """The node of a rank in an assumed transport: one node if one-sided, otherwise nodes of `node_size` ranks (1 if
    None)."""
    return 0 if one_sided else rank // (node_size or 1)
