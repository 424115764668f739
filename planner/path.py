"""A path from one layout to another, as searches find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .layouts.layout import Layout

_OTHERS = 3  # rejected paths that a path lists


@dataclass(frozen=True)
class Path:
    """A sequence of layouts, from the source to the target.

    Attributes:
        layouts: the source, the intermediate layouts, the target.
        us: the estimated microseconds of one call: its steps and the overhead of the call itself.
        peak_bytes: the estimated bytes that a rank holds at most.
        others: the next best paths and the direct exchange, cheapest first.
        over_max_bytes: of one of `others`, whether it was rejected because a rank would hold more than `max_bytes`.
    """

    layouts: tuple[Layout, ...]
    us: float
    peak_bytes: int
    others: tuple[Path, ...] = ()
    over_max_bytes: bool = False

    def __str__(self) -> str:
        return " → ".join(f"({layout})" for layout in self.layouts)


def with_others(ranked: Sequence[Path], chosen: int) -> Path:
    """The chosen one of paths, cheapest first, with its `others`; the cheaper ones are over `max_bytes`."""
    others = [replace(path, over_max_bytes=i < chosen) for i, path in enumerate(ranked) if i != chosen]
    listed = [path for i, path in enumerate(others) if i < _OTHERS or len(path.layouts) == 2]
    return replace(ranked[chosen], others=tuple(listed))
