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


class PairRun(NamedTuple):
    """Pairs `begin` to `end` (exclusive), whose rows are at one destination and contiguous from `row` on."""

    destination: int
    begin: int
    end: int
    row: int


class PairPart(NamedTuple):
    """Pairs `begin` to `end` (exclusive), whose rows are at one destination."""

    destination: int
    begin: int
    end: int


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
        self._tokens, self._k, self._destinations = len(key), max(key.shape[1], 1), destinations
        keys, rows = key.reshape(-1), row.reshape(-1).astype(np.int64)
        pair = np.flatnonzero(rows >= 0)
        if len(pair) < len(rows):
            keys, rows = keys[pair], rows[pair]
            groups = None if groups is None else groups.reshape(-1)[pair]
        destination, kth = np.divmod(keys, self._k)
        token = pair // self._k
        self._by_token = token, kth, rows, destination
        order = _stable_order(destination.astype(np.int64) << 32 | rows if groups is None else groups.reshape(-1))
        self.token, self.kth, self.row, self._of_row = token[order], kth[order], rows[order], destination[order]
        self.sizes: list[int] = np.bincount(destination, minlength=destinations).tolist()
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[PairSums]] = {}

    def runs(self) -> list[PairRun]:
        """All pairs in as few runs as possible: one per physical expert that this rank has rows for."""
        if self._runs is None:
            begins = np.flatnonzero(_changes(self.row - np.arange(len(self.row))) | _changes(self._of_row))
            ends = [*begins[1:].tolist(), len(self.row)]
            destination, row = self._of_row[begins].tolist(), self.row[begins].tolist()
            self._runs = [PairRun(*run) for run in zip(destination, begins.tolist(), ends, row, strict=False)]
        return self._runs

    def parts(self) -> list[PairPart]:
        """All pairs by destination, of those that have any."""
        ends = [0, *itertools.accumulate(self.sizes)]
        return [PairPart(i, *bounds) for i, bounds in enumerate(itertools.pairwise(ends)) if self.sizes[i]]

    def sums(self, most: int) -> list[PairSums]:
        """The pairs of each `most` consecutive tokens."""
        if most not in self._sums:
            self._sums[most] = self._new_sums(most)
        return self._sums[most]

    def _new_sums(self, most: int) -> list[PairSums]:
        token, kth, row, destination = self._by_token
        # All chunks are sorted at once: by chunk, first pairs and others, destination.
        first = _changes(token * self._destinations + destination)  # a token's pairs at a destination adjoin
        chunk, kinds = token // most, 2 * self._destinations
        key = chunk * kinds + np.where(first, destination, destination + self._destinations)
        order, chunks = _stable_order(key), -(-self._tokens // most)
        sizes = np.bincount(key, minlength=chunks * kinds).reshape(chunks, kinds)
        ends = sizes.sum(1).cumsum()
        begins, firsts = ends - sizes.sum(1), sizes[:, : self._destinations].sum(1)
        chunk, of_run = chunk[order], (first.cumsum() - 1)[order]  # pairs of a token at a destination are a run
        lead, is_first = np.empty(np.count_nonzero(first), np.int64), first[order]
        lead[of_run[is_first]] = np.flatnonzero(is_first) - begins[chunk[is_first]]
        pair, row = (token * self._k + kth)[order], row[order]
        of_chunk, lead_of = torch.from_numpy(token[order] - chunk * most), torch.from_numpy(lead[of_run])
        return [
            PairSums(
                pair[begin:end], row[begin:end], of_chunk[begin : begin + m], lead_of[begin + m : end],
                *self._parts_of(of_parts),
            )
            for begin, end, m, of_parts in zip(
                begins.tolist(), ends.tolist(), firsts.tolist(), sizes.tolist(), strict=True
            )
        ]  # fmt: skip

    def _parts_of(self, sizes: Sequence[int]) -> tuple[list[PairPart], int]:
        """The parts of first pairs and of others with these sizes, of those that have any; the number of the former."""
        ends = [0, *itertools.accumulate(sizes)]
        parts = [PairPart(i % self._destinations, ends[i], ends[i + 1]) for i, size in enumerate(sizes) if size]
        return parts, sum(size > 0 for size in sizes[: self._destinations])


def _stable_order(keys: npt.NDArray[np.integer]) -> Ints:
    """The order of numbers that are not negative; equal ones stay in theirs."""
    few = int(keys.max(initial=0)) < 1 << 15  # numpy sorts 16-bit numbers by radix
    return np.argsort(keys.astype(np.int16) if few else keys, kind="stable")


def _changes(values: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; true for the first."""
    changes = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
