"""Placements of a tensor along one mesh dim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """The ranks along the mesh dim hold the same values. Text form: `R`."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """The mesh dim cuts a tensor dim as `torch.chunk` does; later ranks may hold less, or nothing. Text form: `S0`.

    Args:
        dim: the tensor dim, 0 or more.
    """

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True)
class StridedShard(Shard):
    """The tensor dim is first cut into `split` pieces, and each rank holds its part of every piece.

    If a shard order gives the same shards, it becomes that order once the mesh is known (`Layout.decoded`). Otherwise
    the mesh dims cut the tensor dim from left to right. Text form: `S0/2`, and with `own` `S0//2`.

    Args:
        dim: the tensor dim, 0 or more.
        split: the number of pieces, 1 or more.
        own: never replace it by a shard order, even if one has these split factors. For uneven sizes the two differ;
            torch has this meaning for shards that a view made. Mesh dims then cut from left to right, or in the
            layout's order.
    """

    split: int
    own: bool = False

    def __str__(self) -> str:
        return f"S{self.dim}{'//' if self.own else '/'}{self.split}"


@dataclass(frozen=True)
class Partial:
    """The ranks along the mesh dim hold terms that are reduced to the value. Text form: `P`, `Pavg`, `Pmax`, `Pmin`,
    `Pprod`.

    Args:
        op: "sum", "avg", "max", "min" or "prod". A layout with several partial mesh dims may mix sum and avg only.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P{self.op}"


Placement = Replicate | Shard | Partial
LARGEST = 1 << 58  # the largest tensor dim or split factor: no tensor has more elements
