"""A brute-force oracle of shards, which cuts a tensor of global flat indices with torch.chunk.

The planner is tested against it and shares no code with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import permutations, product
from random import Random

import numpy as np
import pytest
import torch

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """A parsed layout text: one token per mesh dim, and the mesh dims that cut each tensor dim, first cut first."""

    tokens: tuple[str, ...]
    orders: dict[int, tuple[int, ...]] = field(hash=False)

    def split(self, mesh_dim: int) -> int:
        """The split factor of a mesh dim; 1 unless it is a strided shard."""
        return int(self.tokens[mesh_dim].replace("//", "/").partition("/")[2] or 1)

    @property
    def partial_dims(self) -> tuple[int, ...]:
        return tuple(m for m, token in enumerate(self.tokens) if token.startswith("P"))

    def op(self, mesh_dim: int) -> str:
        return self.tokens[mesh_dim][1:] or "sum"


@cache
def read(text: str) -> Spec:
    """Parse a valid layout text."""
    head, _, tail = text.partition("@")
    tokens = tuple(head.split())
    orders: dict[int, tuple[int, ...]] = {}
    for mesh_dim, token in enumerate(tokens):
        if token.startswith("S"):
            dim = int(token[1:].partition("/")[0])
            orders[dim] = (*orders.get(dim, ()), mesh_dim)
    for entry in tail.split():
        dim, _, order = entry.partition(":")
        orders[int(dim)] = tuple(map(int, order.split(",")))
    return Spec(tokens, orders)


def layout_texts(mesh_dims: int, tokens: Sequence[str]) -> Iterator[str]:
    """All layouts over `tokens`, in all shard orders, as text; strided shards cut from left to right."""
    for chosen in product(tokens, repeat=mesh_dims):
        orders = read(" ".join(chosen)).orders
        strided = {int(token[1]) for token in chosen if "/" in token and "//" not in token}
        for orderings in product(*([c] if dim in strided else permutations(c) for dim, c in orders.items())):
            odd = [
                f"{dim}:{','.join(map(str, order))}"
                for dim, order in sorted(zip(orders, orderings, strict=True))
                if list(order) != sorted(order)
            ]
            yield " ".join(chosen) + (" @ " + " ".join(odd) if odd else "")


def coordinates(mesh_shape: Sizes) -> list[Sizes]:
    return list(product(*map(range, mesh_shape)))


@lru_cache(maxsize=4096)
def held_indices(mesh_shape: Sizes, shape: Sizes, text: str) -> tuple[torch.Tensor, ...]:
    """For each rank, the global flat indices of its shard, in the shape of the shard."""
    spec = read(text)
    out = []
    for coordinate in coordinates(mesh_shape):
        part = torch.arange(math.prod(shape)).view(shape)
        for dim, order in spec.orders.items():
            for mesh_dim in order:
                taken = []
                for piece in part.chunk(spec.split(mesh_dim), dim):
                    chunks = piece.chunk(mesh_shape[mesh_dim], dim)
                    index = coordinate[mesh_dim]
                    taken.append(chunks[index] if index < len(chunks) else piece.narrow(dim, 0, 0))
                part = torch.cat(taken, dim)
        out.append(part)
    return tuple(out)


@lru_cache(maxsize=4096)
def held_mask(mesh_shape: Sizes, shape: Sizes, text: str) -> np.ndarray:
    """[ranks, elements] whether the rank holds the element."""
    mask = np.zeros((math.prod(mesh_shape), math.prod(shape)), dtype=bool)
    for rank, indices in enumerate(held_indices(mesh_shape, shape, text)):
        mask[rank, indices.reshape(-1).numpy()] = True
    return mask


def bound_elements(mesh_shape: Sizes, shape: Sizes, source: str, target: str) -> list[int]:
    """For each rank, the number of elements of its target shard that it does not hold. For layouts without partial."""
    return (held_mask(mesh_shape, shape, target) & ~held_mask(mesh_shape, shape, source)).sum(axis=1).tolist()


def step_elements(mesh_shape: Sizes, shape: Sizes, source: str, target: str, floating: bool) -> list[int]:
    """For each rank, the number of elements that it must receive in one step, partial included.

    A rank needs the elements of its target shard that are not filled with an identity. Of each it needs one term per
    coordinate along the mesh dims whose partial is reduced, one of which is its own if it holds the element:
    contributors × needed − (needed and held).
    """
    a, b = read(source), read(target)
    places = coordinates(mesh_shape)
    held, wanted = held_mask(mesh_shape, shape, source), held_mask(mesh_shape, shape, target)
    changed = [m for m in range(len(mesh_shape)) if mesh_shape[m] > 1 and a.tokens[m] != b.tokens[m]]
    contributors = math.prod(mesh_shape[m] for m in changed if m in a.partial_dims)
    split = [m for m in changed if m in b.partial_dims]
    owned = [m for m in split if a.tokens[m].startswith("S")]
    kept = [m for m in split if m not in owned and b.op(m) == "sum" and not floating]
    out = []
    for rank, place in enumerate(places):
        if any(place[m] for m in kept):
            out.append(0)
            continue
        alike = [all(other[m] == place[m] for m in owned) for other in places]
        needed = wanted[rank] & held[alike].any(axis=0)
        out.append(contributors * int(needed.sum()) - int((needed & held[rank]).sum()))
    return out


def reduce_over(values: torch.Tensor, ops: dict[int, str]) -> torch.Tensor:
    """Reduce leading mesh axes of [*mesh, ...] to size 1; `ops` maps a mesh dim to its op. A sum of bool is or."""
    for mesh_dim, op in ops.items():
        name = {"avg": "mean", "max": "amax", "min": "amin"}.get(op, op)
        if values.dtype == torch.bool:
            name = {"sum": "any", "prod": "all"}.get(op, name)
        values = getattr(values, name)(mesh_dim, keepdim=True)
    return values


def contribution_shape(mesh_shape: Sizes, shape: Sizes, text: str) -> Sizes:
    """The shape [*mesh or 1, *shape] of one whole tensor per coordinate along the partial mesh dims."""
    spec = read(text)
    return (*(n if m in spec.partial_dims else 1 for m, n in enumerate(mesh_shape)), *shape)


def local_shards(mesh_shape: Sizes, shape: Sizes, text: str, contributed: torch.Tensor) -> list[torch.Tensor]:
    """For each rank, its shard of its own contribution, in new memory."""
    out = []
    for place, indices in zip(coordinates(mesh_shape), held_indices(mesh_shape, shape, text), strict=True):
        mine = contributed[tuple(c if n > 1 else 0 for c, n in zip(place, contributed.shape, strict=False))]
        out.append(mine.reshape(-1)[indices])
    return out


def whole_of(mesh_shape: Sizes, text: str, contributed: torch.Tensor) -> torch.Tensor:
    """The global tensor of some contributions: the reduction over partial mesh dims."""
    spec = read(text)
    return reduce_over(contributed, {m: spec.op(m) for m in spec.partial_dims}).reshape(
        contributed.shape[len(mesh_shape) :]
    )


def assembled(mesh_shape: Sizes, text: str, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each rank, its shard of the global tensor, reduced over the partial mesh dims."""
    spec, places = read(text), coordinates(mesh_shape)
    if not spec.partial_dims:
        return list(locals_)
    ops = {m: spec.op(m) for m in spec.partial_dims}
    out: list[torch.Tensor] = []
    for place in places:
        alike = [
            locals_[i]
            for i, other in enumerate(places)
            if all(a == b for m, (a, b) in enumerate(zip(place, other, strict=True)) if m not in ops)
        ]
        lead = [n if m in ops else 1 for m, n in enumerate(mesh_shape)]
        out.append(reduce_over(torch.stack(alike).reshape(*lead, *alike[0].shape), ops).reshape(alike[0].shape))
    return out


# The pairs of layouts that are tested


@dataclass(frozen=True)
class Case:
    """Pairs of layouts of one tensor on one mesh: all of them, or a fixed random sample."""

    mesh_shape: Sizes
    shape: Sizes
    tokens: tuple[str, ...]
    sample: int | None = None

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.mesh_shape))}-{'x'.join(map(str, self.shape)) or '0d'}-{''.join(self.tokens)}"

    def pairs(self, partial: bool | None = None) -> list[tuple[str, str]]:
        """The (source, target) pairs: all, those with a partial layout (True), or those without (False)."""
        texts = list(layout_texts(len(self.mesh_shape), self.tokens))
        pairs = list(product(texts, texts))
        if self.sample is not None and self.sample < len(pairs):
            pairs = Random(str(self)).sample(pairs, self.sample)
        return [pair for pair in pairs if partial is None or ("P" in pair[0] + pair[1]) == partial]


SHAPES: tuple[Sizes, ...] = (
    *((16,), (7,), (3,), (0,)),
    *((16, 8), (7, 5), (1, 3), (0, 4)),
    *((8, 4, 2), (5, 7, 3), (2, 1, 3), (3, 0, 2)),
)
EXHAUSTIVE = [
    Case(mesh_shape, shape, ("R", "P", "S0", "S1")[: 2 + min(len(shape), 2)])
    for mesh_shape in ((2, 2), (2, 4))
    for shape in SHAPES
]
SAMPLED = [
    *(
        Case((2, 2, 2), shape, ("R", "P", "S0", "S1")[: 2 + min(len(shape), 2)], 150)
        for shape in ((16,), (8, 16), (7, 5))
    ),
    Case((2, 2, 2), (5, 9, 3), ("R", "P", "S0", "S1", "S2"), 150),
    Case((2, 2), (5, 4, 7), ("R", "P", "S0", "S1", "S2"), 150),
    Case((2, 1, 2), (7, 5), ("R", "P", "S0", "S1"), 150),
    Case((1, 4, 1), (6, 5), ("R", "P", "S0", "S1"), 150),
    Case((3, 2), (7, 11), ("R", "P", "S0", "S1"), 150),
    Case((2, 2, 3), (13, 6), ("R", "S0", "S1"), 100),
    Case((2, 2), (24, 12), ("R", "P", "S0", "S1", "S0/3", "S1//2"), 200),
    Case((2, 2), (11, 7), ("R", "P", "S0", "S1", "S0/3", "S1//2"), 200),
    Case((2, 2), (5, 0), ("R", "S0", "S1", "S0/3", "S1//2"), 60),
    Case((3, 2), (29, 4), ("R", "P", "S0", "S0/4", "S0//2", "S1"), 150),
    Case((2, 2, 2), (40, 3), ("R", "S0", "S1", "S0/5", "S0//2"), 120),
    Case((4,), (67,), ("R", "P", "S0", "S0/8", "S0/3")),
    Case((2, 1), (9, 2), ("R", "P", "S0", "S0/3", "S1")),
    Case((2, 2), (), ("R", "P")),
    Case((6,), (13, 5), ("R", "P", "S0", "S1")),
    Case((1,), (3, 2), ("R", "P", "S0", "S1")),
]
# The larger mesh repeats on these shapes what the smaller one shows: for `make test-long`.
_REPEATED: tuple[Sizes, ...] = ((16,), (3,), (0,), (1, 3), (0, 4), (8, 4, 2), (2, 1, 3), (3, 0, 2))
PARAMETERS = [
    pytest.param(
        case, marks=pytest.mark.long if case.mesh_shape == (2, 4) and case.shape in _REPEATED else (), id=str(case)
    )
    for case in EXHAUSTIVE
] + [pytest.param(case, id=str(case)) for case in SAMPLED]
