"""The values of a replayed redistribution, each rank's part of them, and the comparison of results with these.

Each element follows from its index alone, so no rank makes the whole tensor, and the expected result does not depend on
either side.

An element is a small power of two, chosen by a hash of its index and of the number of the term, so that rows, columns
and the terms of different ranks differ. The values are so small that sums, averages and products of all terms are exact
in the dtype, in any order. A rank's part is cut as `torch.chunk` cuts (`stock_dtensor.held`), in the shard order of the
layout's text; the planner's index sets are used only where strided shards are not a shard order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from ..bench.baselines.stock_dtensor import held
from ..planner import Layout, Partial
from ..planner.layouts.index_sets import parts_of
from ..planner.layouts.spans import held_spans

_CHUNK = 1 << 18  # elements made at a time
_CHOICES = ((1, 2, 4, 8), (1, 2), (0, 1))
_REDUCE = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}  # default: np.add


@dataclass(frozen=True)
class Values:
    """The terms of a tensor under a source layout.

    Attributes:
        terms: the number of terms, one per combination of coordinates along the partial mesh dims; 1 without any.
        divisor: the divisor of averages, of which terms are multiples.
        choices: the possible values of a term.
        exact: whether the reduction of all terms is exact in the dtype; otherwise results are not compared.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh_shape: tuple[int, ...]
    partial_dims: tuple[int, ...]
    op: str
    terms: int
    divisor: int
    choices: tuple[int, ...]
    exact: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, source: str, mesh_shape: tuple[int, ...]) -> Values:
        placements = Layout.parse(source).placements
        ops = {m: p.op for m, p in enumerate(placements) if isinstance(p, Partial)}
        op = next(iter(ops.values()), "sum")
        terms = math.prod(mesh_shape[m] for m in ops)
        divisor = math.prod(mesh_shape[m] for m in ops if ops[m] == "avg")
        fits = [choice for choice in _CHOICES if _fits(choice, dtype, op, terms, divisor)]
        choices = fits[0] if fits else _CHOICES[-1]
        return cls(shape, dtype, mesh_shape, tuple(ops), op, terms, divisor, choices, bool(fits))

    def source(self, text: str, coordinate: Sequence[int] | None) -> torch.Tensor:
        """The source shard of the rank at `coordinate` of the mesh; its own term where the layout is partial."""
        mine = 0
        for m in self.partial_dims if coordinate is not None else ():
            mine = mine * self.mesh_shape[m] + coordinate[m]  # type: ignore[index]
        return self._part(held_indices(text, self.mesh_shape, coordinate, self.shape), [mine], 1)

    def target(self, text: str, mesh_shape: tuple[int, ...], coordinate: Sequence[int] | None) -> torch.Tensor:
        """The target shard of the rank at `coordinate` of a mesh: the reduction of all terms."""
        indices = held_indices(text, mesh_shape, coordinate, self.shape)
        return self._part(indices, range(self.terms), self.divisor)

    def _part(self, indices: list[np.ndarray], terms: Sequence[int], divide_by: int) -> torch.Tensor:
        """The elements at the indices of each tensor dim, with the terms reduced."""
        sizes = [len(of_dim) for of_dim in indices]
        out = torch.empty(sizes, dtype=self.dtype)
        if not out.numel():
            return out
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        offsets = [of_dim * stride for of_dim, stride in zip(indices, strides, strict=True)]
        inner, dims = np.zeros(1, dtype=np.int64), len(sizes)  # offsets along the last dims, as many as fit in a chunk
        while dims and len(inner) * sizes[dims - 1] <= _CHUNK:
            dims -= 1
            inner = (offsets[dims][:, None] + inner).ravel()
        rows, outer = (offsets[dims - 1], offsets[: dims - 1]) if dims else (np.zeros(1, dtype=np.int64), [])
        at_once, flat, done = max(1, _CHUNK // len(inner)), out.view(-1), 0
        for lead in product(*outer):
            for first in range(0, len(rows), at_once):
                chunk = (rows[first : first + at_once, None] + (inner + sum(lead))).ravel()
                flat[done : done + len(chunk)] = self._values(chunk, terms, divide_by)
                done += len(chunk)
        return out

    def _values(self, offsets: np.ndarray, terms: Sequence[int], divide_by: int) -> torch.Tensor:
        """The reduced values at flat offsets of the global tensor."""
        choices, combine = np.array(self.choices, dtype=np.int64), _REDUCE.get(self.op, np.add)
        total: np.ndarray | None = None
        for term in terms:
            which = _hash(offsets, term) >> np.uint64(64 - (len(choices) - 1).bit_length())
            value = choices[which.astype(np.int64)] * self.divisor
            total = value if total is None else combine(total, value)
        assert total is not None
        values = torch.from_numpy(total // divide_by)
        return (values.float() if self.dtype.is_floating_point else values).to(self.dtype)


def difference(result: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The difference between a result and the expected tensor, as text; None if they are equal."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"has {result.dtype}{list(result.shape)}, not {expected.dtype}{list(expected.shape)}"
    if result.dtype.itemsize == 1 and result.dtype.is_floating_point:
        result, expected = result.float(), expected.float()
    differ = int((result != expected).sum())
    return f"{differ} of {result.numel()} elements differ" if differ else None


def _fits(choices: Sequence[int], dtype: torch.dtype, op: str, terms: int, divisor: int) -> bool:
    """Whether every reduction of the terms, and every intermediate result, is exact in the dtype."""
    top = max(choices)
    if dtype is torch.bool:
        return top == 1
    if op == "prod" and terms > 1 and (top != 2 or min(choices) == 0):
        return False  # larger values overflow, and with zeros nearly every product is 0
    if op in ("max", "min") or terms == 1:
        return True
    largest = top**terms if op == "prod" else top * terms * divisor
    if not (dtype.is_floating_point or dtype.is_complex):
        return largest <= torch.iinfo(dtype).max
    # Powers of two need no mantissa bits.
    needed = 1 if op == "prod" else top * terms * (divisor // (divisor & -divisor))
    limits = torch.finfo(dtype)
    return largest <= limits.max and needed <= 2 / limits.eps


def _hash(offsets: np.ndarray, term: int) -> np.ndarray:
    """A 64-bit hash of each offset and the term, by multiplication and folding."""
    x = offsets.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64((term + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x ^= x >> np.uint64(30)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def held_indices(
    text: str, mesh_shape: tuple[int, ...], coordinate: Sequence[int] | None, shape: tuple[int, ...]
) -> list[np.ndarray]:
    """The indices of each tensor dim that a rank holds under a layout; empty for a rank outside the mesh."""
    if coordinate is None:
        return [np.zeros(0, dtype=np.int64)] * max(len(shape), 1)
    ranges = _ranges(text, mesh_shape, coordinate, shape)
    if ranges is not None:
        return [np.arange(part.start, part.stop) for part in ranges]
    layout, at = Layout.parse(text, mesh_shape), tuple(coordinate)
    return [
        np.concatenate([np.arange(0), *(np.arange(low, high) for low, high in spans.tolist())])
        for spans in (held_spans(n, parts_of(layout.cuts(d), mesh_shape, at)) for d, n in enumerate(shape))
    ]


def _ranges(
    text: str, mesh_shape: tuple[int, ...], coordinate: Sequence[int], shape: tuple[int, ...]
) -> list[slice] | None:
    """The index range of each tensor dim; None where a strided shard does not mean that the mesh dims to its right that
    shard the same tensor dim are cut first."""
    head, _, orders = text.partition("@")
    tokens = head.split()
    for m, token in enumerate(tokens):
        base, strided, factor = token.partition("/")
        first = math.prod(mesh_shape[n] for n in range(m + 1, len(tokens)) if tokens[n].partition("/")[0] == base)
        if strided and (orders or factor != str(first)):
            return None
    order = [int(m) for one in orders.split() for m in one.partition(":")[2].split(",")]
    order += [m for m in range(len(tokens)) if m not in order]
    return held(head, mesh_shape, coordinate, shape, order if orders else None)
