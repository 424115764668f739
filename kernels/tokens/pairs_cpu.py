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


class Pairs:
    """The pairs that have a row, sorted by destination and row.

    Args:
        key: int32 [T, K], destination * K + k, as in `TokenRows`.
        row: int32 [T, K], the row in the destination's buffer, -1 if there is none.
        destinations: W, the number of destination ranks.
        groups: [T, K], of each pair a number that is less where the destination is less, or the row at the same
            destination; pairs of one number have rows in ascending order. Faster to sort by; default: none are known.

    Attributes:
        token, kth, row: int64 [N].
        sizes: the number of pairs of each destination.
    """

    def __init__(
        self,
        key: npt.NDArray[np.int32],
        row: npt.NDArray[np.int32],
        destinations: int,
        groups: npt.NDArray[np.integer] | None = None,
    ) -> None:
        k = max(key.shape[1], 1)
        self._tokens, self._destinations = len(key), destinations
        keys, rows = key.reshape(-1), row.reshape(-1).astype(np.int64)
        at = (rows >= 0).nonzero()[0]
        if len(at) < len(rows):
            keys, rows = keys[at], rows[at]
            groups = None if groups is None else groups.reshape(-1)[at]
        destination, token = keys // k, at // k
        kth = keys - destination * k
        self._by_token = token, token * k + kth, rows, destination
        order = _stable_order(destination.astype(np.int64) << 32 | rows if groups is None else groups.reshape(-1))
        self.token, self.kth, self.row, self._of_row = token[order], kth[order], rows[order], destination[order]
        self.sizes: list[int] = np.bincount(destination, minlength=destinations).tolist()
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[PairSums]] = {}

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
        token, pair, row, destination = self._by_token
        # All chunks are sorted at once: by chunk, first pairs and others, destination.
        chunks, number = -(-self._tokens // most), self._destinations
        first = _changes(token * number + destination)
        run = first.cumsum() - 1  # a token's pairs at a destination adjoin
        key = token // most * (2 * number) + np.where(first, destination, destination + number)
        order = _stable_order(key)
        pair, row, run = pair[order], row[order], run[order]
        sizes = np.bincount(key, minlength=chunks * 2 * number).reshape(chunks, 2 * number)  # of parts
        ends = sizes.cumsum(1)  # of parts, in their chunk
        chunk_ends = ends[:, -1].cumsum()
        begins = chunk_ends - ends[:, -1]
        index = np.arange(len(row)) - begins.repeat(ends[:, -1])  # of pairs, likewise
        firsts = first[order].nonzero()[0]
        lead = np.empty(len(firsts), np.int64)
        lead[run[firsts]] = index[firsts]
        lead, token = lead[run], token[order] % most
        there = sizes.nonzero()
        of_parts = there[1] % number, (ends - sizes)[there], ends[there]
        parts = zip(*[x.tolist() for x in of_parts], strict=True)
        numbers = [np.add.reduce(x > 0, 1) for x in (sizes, sizes[:, :number])]  # of parts
        of_chunks = begins, begins + ends[:, number - 1], chunk_ends, *numbers
        return [
            PairSums(
                pair[begin:end], row[begin:end], torch.from_numpy(token[begin:middle]),
                torch.from_numpy(lead[middle:end]), list(itertools.islice(parts, n)), m,
            )
            for begin, middle, end, n, m in zip(*[x.tolist() for x in of_chunks], strict=True)
        ]  # fmt: skip


def _stable_order(keys: npt.NDArray[np.integer]) -> Ints:
    """The order of numbers that are not negative; equal ones stay in theirs."""
    few = np.maximum.reduce(keys, initial=0) < 1 << 15  # numpy sorts 16-bit numbers by radix
    return (keys.astype(np.int16) if few else keys).argsort(kind="stable")


def _changes(values: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; true for the first."""
    changes = np.empty(len(values), np.bool_)
    changes[:1] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
