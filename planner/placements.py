"""Placements: what one mesh dim does to a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """The mesh dim's ranks hold the same: `R`."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """The mesh dim cuts a tensor dim, as `torch.chunk` does: `S0`. Later ranks may have less, or nothing.

    Args:
        dim: the tensor dim, from 0 on.
    """

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True)
class StridedShard(Shard):
    """What is there is cut into `split` pieces first, and each rank has its part of every piece.

    Where a shard order says the same it is that order, as soon as the mesh is known (`Layout.decoded`); otherwise an
    index set of its own: mesh dims then cut the tensor dim from left to right.

    In text `S0/2`, and with `own` `S0//2`.

    Args:
        dim: the tensor dim, from 0 on.
        split: pieces, 1 or more.
        own: an index set of its own although an order would have these split factors. For uneven sizes that is not
            the same; torch means it so where a view made the shard. Mesh dims then cut from left to right, or in the
            layout's order.
    """

    split: int
    own: bool = False

    def __str__(self) -> str:
        return f"S{self.dim}{'//' if self.own else '/'}{self.split}"


@dataclass(frozen=True)
class Partial:
    """The mesh dim's ranks hold terms, of which the value is made: `P`, `Pavg`, `Pmax`, `Pmin`, `Pprod`.

    Args:
        op: "sum", "avg", "max", "min" or "prod". In one layout only sum and avg mix.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P{self.op}"


Placement = Replicate | Shard | Partial
LARGEST = 1 << 58  # tensor dim or split factor: no tensor has more elements
