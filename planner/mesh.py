"""A mesh of ranks: sizes, names, and which rank stands where."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import ArgumentError

Coordinate = tuple[int, ...]


def whole_numbers(argument: str, values: Iterable[int]) -> tuple[int, ...]:
    """`values` as plain integers.

    Raises:
        ArgumentError: not an iterable of whole numbers.
    """
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        raise ArgumentError(f"{argument}: {values!r}; allowed: whole numbers, such as (2, 2)") from None


@dataclass(frozen=True)
class Mesh:
    """Ranks in row-major order over `shape`.

    `ranks[i]` is the rank at row-major position i; None means `arange`. The planner works in positions; only the
    runtime turns them into ranks.

    Raises:
        ArgumentError: a size below 1, names or ranks that do not fit the shape, a rank given twice.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None

    def __init__(
        self, shape: Sequence[int] | int, names: Sequence[str] | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        sizes = whole_numbers("mesh", (shape,) if isinstance(shape, int) else shape)
        if not sizes or any(n < 1 for n in sizes):
            raise ArgumentError(f"mesh: shape {sizes} must have at least one dim, and every size must be at least 1")
        if names is not None and (
            isinstance(names, str)
            or not isinstance(names, Sequence)
            or not all(isinstance(name, str) for name in names)
        ):
            raise ArgumentError(f"mesh: names {names!r}; allowed: {len(sizes)} different names, one per mesh dim")
        if names is not None and (len(tuple(names)) != len(sizes) or len(set(names)) != len(sizes)):
            raise ArgumentError(f"mesh: names {tuple(names)} must be {len(sizes)} different names, one per mesh dim")
        if ranks is not None:
            ranks = whole_numbers("mesh: ranks", ranks)
            if len(ranks) != math.prod(sizes) or len(set(ranks)) != len(ranks) or min(ranks) < 0:
                raise ArgumentError(
                    f"mesh: ranks {ranks} must be {math.prod(sizes)} different ranks >= 0 for shape {sizes}"
                )
            if ranks == tuple(range(len(ranks))):
                ranks = None
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "names", None if names is None else tuple(names))
        object.__setattr__(self, "ranks", ranks)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinate(self, position: int) -> Coordinate:
        """The coordinate of a row-major position."""
        if not 0 <= position < self.size:
            raise ArgumentError(
                f"rank: position {position} is outside the mesh {self.shape}; allowed: 0..{self.size - 1}"
            )
        out = []
        for n in reversed(self.shape):
            position, c = divmod(position, n)
            out.append(c)
        return tuple(reversed(out))

    def position(self, coordinate: Sequence[int]) -> int:
        """The row-major position of a coordinate."""
        position = 0
        for n, c in zip(self.shape, coordinate, strict=True):
            position = position * n + c
        return position

    def rank_at(self, position: int) -> int:
        return position if self.ranks is None else self.ranks[position]

    @cached_property
    def strides(self) -> np.ndarray:
        """[mesh dims] what a step along each adds to a position."""
        return np.array([math.prod(self.shape[d + 1 :]) for d in range(self.ndim)], dtype=np.int64)

    @cached_property
    def _positions(self) -> np.ndarray:
        """[ranks] the position of each rank up to the last, -1 for those that are not in the mesh."""
        ranks = np.arange(self.size) if self.ranks is None else np.array(self.ranks)
        positions = np.full(ranks.max() + 1, -1)
        positions[ranks] = np.arange(self.size)
        return positions

    def node_of(self, positions: np.ndarray, node_size: int) -> np.ndarray:
        """The positions on the same node of `node_size` consecutive ranks, -1 for none: [n, node_size]."""
        ranks = positions if self.ranks is None else np.array(self.ranks)[positions]
        node = (ranks // node_size * node_size)[:, None] + np.arange(node_size)
        if self.ranks is None:
            return np.where(node < self.size, node, -1)
        return np.where(node < len(self._positions), self._positions[np.minimum(node, len(self._positions) - 1)], -1)

    def subgroup(self, position: int, dims: Sequence[int]) -> tuple[int, ...]:
        """The positions reached from `position` by moving along `dims`, row-major."""
        positions = [self.position([0 if d in dims else c for d, c in enumerate(self.coordinate(position))])]
        for d in sorted(dims):
            stride = math.prod(self.shape[d + 1 :])
            positions = [p + i * stride for p in positions for i in range(self.shape[d])]
        return tuple(positions)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) + (f" ({', '.join(self.names)})" if self.names else "")
