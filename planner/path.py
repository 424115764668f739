"""A path from one layout to another, as searches find it."""

from __future__ import annotations

from dataclasses import dataclass

from .layouts.layout import Layout


@dataclass(frozen=True)
class Path:
    """A sequence of layouts, from the source to the target.

    Attributes:
        layouts: the source, the intermediate layouts, the target.
        us: the estimated microseconds of one call: its steps and the overhead of the call itself.
        peak_bytes: the estimated bytes that a rank holds at most.
        others: the next best paths and the direct exchange, cheapest first.
    """

    layouts: tuple[Layout, ...]
    us: float
    peak_bytes: int
    others: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return " → ".join(f"({layout})" for layout in self.layouts)
