"""Sorted (token, k) pairs: the orders in which the CPU paths of the token kernels move and sum rows.

Indices are numpy arrays: calls on few pairs cost less in numpy than in torch.
"""

from __future__ import annotations

import itertools
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
    """All pairs by destination: the parts with first pairs, destinations ascending, then those with others."""
    firsts: int
    """The number of parts with first pairs."""


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
        tokens, k, destinations: T, K, W.
        by_token: the pairs that have a row, by token, destination and k.
        by_row: the same by destination and row.

    Attributes:
        token, pair, row: int64 [N]; pair: token * K + k.
        sizes: the number of pairs of each destination.
    """

    def __init__(self, tokens: int, k: int, destinations: int, by_token: LocatedPairs, by_row: LocatedPairs) -> None:
        self._tokens, self._k, self._destinations = tokens, max(k, 1), destinations
        self._by_token = by_token
        self.pair, self.row, self._of_row = by_row
        self.token = self.pair // self._k
        self.sizes: list[int] = np.bincount(self._of_row, minlength=destinations).tolist()
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[PairSums]] = {}

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
        order = stable_order(by_token.destination.astype(np.int64) << 32 | by_token.row)
        return cls(tokens, k, destinations, by_token, by_token.take(order))

    def runs(self) -> list[PairRun]:
        """All pairs in as few runs as possible: one per physical expert that this rank has rows for."""
        if self._runs is None:
            # Equal in a run alone: between destinations it changes by more than rows and pairs do.
            line = self.row - np.arange(len(self.row)) + (self._of_row.astype(np.int64) << 32)
            begins = _changes(line).nonzero()[0]
            destination, row, begin = self._of_row[begins].tolist(), self.row[begins].tolist(), begins.tolist()
            self._runs = list(zip(destination, begin, [*begin[1:], len(line)], row, strict=False))
        return self._runs

    def parts(self) -> list[PairPart]:
        """All pairs by destination, of those that have any."""
        ends = [0, *itertools.accumulate(self.sizes)]
        return [(i, *bounds) for i, bounds in enumerate(itertools.pairwise(ends)) if self.sizes[i]]

    def sums(self, most: int) -> list[PairSums]:
        """The pairs of each `most` consecutive tokens."""
        if most not in self._sums:
            self._sums[most] = self._new_sums(most)
        return self._sums[most]

    def _new_sums(self, most: int) -> list[PairSums]:
        (pair, row, destination), number = self._by_token, self._destinations
        token, numbers = pair // self._k, np.arange(len(pair))
        first = _changes(token * number + destination)
        # All chunks are sorted at once: by chunk, first pairs and others, destination.
        chunks = -(-self._tokens // most)
        key = destination + number * ~first
        if chunks > 1:
            chunk = token // most
            key += chunk * (2 * number)
            token -= chunk * most
        order = stable_order(key)
        place = np.empty_like(order)
        place[order] = numbers
        lead = place.take(np.maximum.accumulate(numbers * first))  # a token's pairs at a destination adjoin
        token, pair, row, lead = (x.take(order) for x in (token, pair, row, lead))
        sizes = np.bincount(key, minlength=chunks * 2 * number).reshape(chunks, 2 * number).tolist()  # of parts
        sums, begin = [], 0
        for of_chunk in sizes:
            parts: list[PairPart] = []
            firsts = at = middle = 0
            for i, size in enumerate(of_chunk):
                if i == number:
                    firsts, middle = len(parts), at
                if size:
                    parts.append((i % number, at, at + size))
                    at += size
            end, middle = begin + at, begin + middle
            of_pairs = torch.from_numpy(token[begin:middle]), torch.from_numpy(lead[middle:end] - begin)
            sums.append(PairSums(pair[begin:end], row[begin:end], *of_pairs, parts, firsts))
            begin = end
        return sums


def stable_order(keys: npt.NDArray[np.integer]) -> Ints:
    """The order of numbers that are not negative; equal ones stay in theirs."""
    few = np.maximum.reduce(keys, initial=0) < 1 << 15  # numpy sorts 16-bit numbers by radix
    return (keys.astype(np.int16) if few else keys).argsort(kind="stable")


def _changes(values: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; true for the first."""
    changes = np.empty(len(values), np.bool_)
    changes[:1] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
