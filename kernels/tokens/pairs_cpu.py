"""Sorted (token, k) pairs: the orders in which the CPU paths of the token kernels move and sum rows.

Indices are numpy arrays: calls on few pairs cost less in numpy than in torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


PairRun = tuple[int, int, int, int]
"""(destination, begin, end, row): pairs `begin` to `end` (exclusive), whose rows are at one destination and contiguous
from `row` on."""
PairPart = tuple[int, int, int]
"""(destination, begin, end): pairs `begin` to `end` (exclusive), whose rows are at one destination."""


class PairSums(NamedTuple):
    """The n pairs of some consecutive tokens, in the order in which their rows are read.

    First the m pairs that are a token's first ones at a destination, then the others; both by destination, and there in
    order of token and k.
    """

    pair: Ints
    """[n]: token * K + k."""
    row: Ints
    """[n]."""
    token: torch.Tensor
    """int64 [m]: of the first pairs, counted from the first of these tokens."""
    lead: torch.Tensor
    """int64 [n - m]: for each of the others, the index of the first pair of its token at its destination."""
    parts: list[PairPart]
    """All pairs by destination: the parts with first pairs, destinations ascending, the last of which ends at m, then
    those with others."""


class LocatedPairs(NamedTuple):
    """Pairs in some order, and where their rows are."""

    pair: Ints
    """[N]: token * K + k."""
    row: Ints
    """[N]: the row in the destination's buffer; -1 if there is none."""
    destination: npt.NDArray[np.int32]
    """[N]."""

    def take(self, order: Ints) -> LocatedPairs:
        return LocatedPairs(self.pair.take(order), self.row.take(order), self.destination.take(order))

    def kept(self) -> LocatedPairs:
        """Those whose row is not negative."""
        at = (self.row >= 0).nonzero()[0]
        return self if len(at) == len(self.row) else self.take(at)


class Pairs:
    """The pairs that have a row, sorted by destination and row.

    Args:
        tokens, k: T, K.
        by_token: the pairs that have a row, by token, destination and k.
        pair, row: see below.
        bounds: [W + 1]: destination d has pairs bounds[d] to bounds[d + 1] (exclusive).

    Attributes:
        token, pair, row: int64 [N]; pair: token * K + k.
        sizes: the number of pairs of each destination.
    """

    def __init__(
        self, tokens: int, k: int, by_token: LocatedPairs, pair: Ints, row: Ints, bounds: Sequence[int]
    ) -> None:
        self._tokens, self._k, self._by_token, self._bounds = tokens, max(k, 1), by_token, bounds
        self.pair, self.row, self.token = pair, row, pair // self._k
        self.sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[PairSums]] = {}

    @classmethod
    def sorted_by(cls, order: Ints, tokens: int, k: int, destinations: int, by_token: LocatedPairs) -> Pairs:
        """The pairs of `by_token`, of which `order` is the order by destination and row."""
        sizes = np.bincount(by_token.destination, minlength=destinations).tolist()
        bounds = [*itertools.accumulate(sizes, initial=0)]
        return cls(tokens, k, by_token, by_token.pair.take(order), by_token.row.take(order), bounds)

    @classmethod
    def of_rows(cls, key: npt.NDArray[np.int32], row: npt.NDArray[np.int32], destinations: int) -> Pairs:
        """The pairs of `TokenRows`.

        Args:
            key: int32 [T, K], destination * K + k.
            row: int32 [T, K], -1 if there is none.
        """
        tokens, k = key.shape
        destination = key // max(k, 1)
        pair = key - destination * k + np.arange(0, key.size, k or 1)[:, None]
        every = LocatedPairs(pair.reshape(-1), row.reshape(-1).astype(np.int64), destination.reshape(-1))
        by_token = every.kept()
        order = (by_token.destination.astype(np.int64) << 32 | by_token.row).argsort(kind="stable")
        return cls.sorted_by(order, tokens, k, destinations, by_token)

    def runs(self) -> list[PairRun]:
        """All pairs in as few runs as possible: one per physical expert that this rank has rows for."""
        if self._runs is None:
            bounds, number = np.array(self._bounds), len(self.row)
            changes = _changes(self.row - np.arange(number))
            changes[bounds[bounds < number]] = True
            begins = changes.nonzero()[0]
            destination = bounds.searchsorted(begins, "right") - 1
            begin = begins.tolist()
            runs = zip(destination.tolist(), begin, [*begin[1:], number], self.row.take(begins).tolist(), strict=False)
            self._runs = list(runs)
        return self._runs

    def parts(self) -> list[PairPart]:
        """All pairs by destination, of those that have any."""
        parts = enumerate(itertools.pairwise(self._bounds))
        return [(i, begin, end) for i, (begin, end) in parts if begin < end]

    def sums(self, most: int) -> list[PairSums]:
        """The pairs of each `most` consecutive tokens."""
        if most not in self._sums:
            self._sums[most] = self._new_sums(most)
        return self._sums[most]

    def _new_sums(self, most: int) -> list[PairSums]:
        (pair, row, destination), number = self._by_token, len(self.sizes)
        token, numbers = pair // self._k, np.arange(len(pair))
        first = _changes(token * number + destination)
        # All chunks are sorted at once: by chunk, first pairs and others, destination.
        chunks = -(-self._tokens // most)
        key = destination + number * ~first
        if chunks > 1:
            chunk = token // most
            key += chunk * (2 * number)
            token -= chunk * most
        order = stable_order(key, chunks * 2 * number)
        place = np.empty_like(order)
        place[order] = numbers
        lead = place.take(np.maximum.accumulate(numbers * first))  # a token's pairs at a destination adjoin
        token, pair, row, lead = (x.take(order) for x in (token, pair, row, lead))
        # Where the parts of a chunk end: those with first pairs, then those with others.
        ends = np.bincount(key, minlength=chunks * 2 * number).reshape(chunks, 2 * number).cumsum(1).tolist()
        sums, begin = [], 0
        for of_chunk in ends:
            bounds = enumerate(itertools.pairwise((0, *of_chunk)))
            parts = [(i % number, first, last) for i, (first, last) in bounds if first < last]
            middle, end = begin + of_chunk[number - 1], begin + of_chunk[-1]
            of_pairs = torch.from_numpy(token[begin:middle]), torch.from_numpy(lead[middle:end] - begin)
            sums.append(PairSums(pair[begin:end], row[begin:end], *of_pairs, parts))
            begin = end
        return sums


def stable_order(keys: npt.NDArray[np.integer], bound: int) -> Ints:
    """The order of numbers from 0 to `bound` (exclusive); equal ones stay in theirs."""
    # numpy sorts 16-bit numbers by radix.
    return (keys.astype(np.int16) if bound <= 1 << 15 else keys).argsort(kind="stable")


def _changes(values: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; true for the first."""
    changes = np.empty(len(values), np.bool_)
    changes[:1] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
