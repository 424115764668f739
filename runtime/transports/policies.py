"""What a transport has to carry out exchanges with: an algorithm is chosen for each step from nothing else."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Direction = Literal["auto", "push", "pull"]


class Rates(NamedTuple):
    """Bytes a second that a rank of a group writes to its peers, reads from them, and copies in its own memory."""

    push: float = 1.0
    pull: float = 1.0
    local: float = 1.0


@dataclass
class WindowPolicy:
    """Whether ranks that meet on the device write into their peers' windows or read from them.

    Attributes:
        direction: "auto": what takes less time, by the rates of the group; alike on all ranks when programs are bound.
        rates: of groups, ascending, whose rates were measured; alike on all ranks of the group.
    """

    direction: Direction = "auto"
    rates: dict[tuple[int, ...], Rates] = field(default_factory=dict)


@dataclass(frozen=True)
class OneCall:
    """Bytes of the largest shard up to which one collective takes the place of a message to each peer."""

    all_to_all: int
    all_gather: float


BACKENDS = {
    # What its messages cost to start is saved by one all-to-all; large shards cost more to pack into one buffer. Its
    # all-gather was slower than its all-to-all when this was set.
    "gloo": OneCall(all_to_all=1 << 20, all_gather=0),
    # Its all-to-all is grouped messages, and wants them in one buffer; its all-gather sends each byte into a node once.
    "nccl": OneCall(all_to_all=0, all_gather=math.inf),
}


class Means(Protocol):
    """What a transport has to carry out exchanges with."""

    @property
    def one_sided(self) -> bool:
        """All ranks write into each other's memory."""

    def node_of(self, rank: int) -> Hashable:
        """Equal for ranks that write into each other's memory; alike on all ranks."""

    @property
    def windows(self) -> WindowPolicy | None:
        """How ranks use each other's windows, and meet on the device; None where they do not. The windows of a group
        have one size, that of the rank that needs most."""

    @property
    def backend(self) -> str:
        """Of process groups: one of `BACKENDS`; not asked for where the transport is one-sided."""

    def group_order(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """The ranks of a process group of exactly these ranks, in its order; None if there is none that all of them
        know."""


def node_of(rank: int, one_sided: bool, node_size: int | None) -> int:
    """Of a rank in an assumed transport: all write into each other's memory, or those of nodes of so many."""
    return 0 if one_sided else rank // (node_size or 1)
