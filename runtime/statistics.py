"""Counts of what was carried out and of what was left to torch, with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Since the process started, or since `reset`.

    Attributes:
        calls: programs carried out, by world.
        delegations: calls left to torch's own redistribution, by reason.
        worlds: by the ranks of a mesh, the world they use and why.
    """

    calls: Counter[str] = field(default_factory=Counter)
    delegations: Counter[str] = field(default_factory=Counter)
    worlds: dict[tuple[int, ...], str] = field(default_factory=dict)

    def reset(self) -> None:
        self.calls.clear()
        self.delegations.clear()
        self.worlds.clear()


_statistics = Statistics()


def stats() -> Statistics:
    """The live counters of this process."""
    return _statistics
