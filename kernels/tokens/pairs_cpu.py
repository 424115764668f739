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


class PairRun(NamedTuple):
    """Pairs `begin` to `end` (exclusive), whose rows are at one destination and contiguous from `row` on."""

    destination: int
    begin: int
    end: int
    row: int


class PairPart(NamedTuple):
    """Pairs `begin` to `end` (exclusive) of PairSums, whose rows are at one destination."""

    destination: int
    begin: int
    end: int


class PairSums(NamedTuple):
    """The n pairs of some consecutive tokens, in the order in which their rows are read.

    Each part has pairs of one destination: first the parts with the first pair there of each token, destinations
    ascending, then those with the second pairs, and so on.
    """

    pair: Ints
    """[n]: token * K + k."""
    row: Ints
    """[n]."""
    token: torch.Tensor
    """int64 [n], counted from the first of these tokens."""
    parts: list[PairPart]
    firsts: int
    """The number of parts with first pairs."""
    leads: list[int]
    """For each of the other parts, the first of as many pairs, one after another, of the part with the first pairs of
    the same tokens at the same destination."""


class Pairs:
    """The pairs that have a row, sorted by destination and row. CPU tensors only.

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

    def __init__(self, key: torch.Tensor, row: torch.Tensor, destinations: int, groups: Ints | None = None) -> None:
        self._tokens, k = len(key), max(key.shape[1], 1)
        keys, rows = key.numpy().reshape(-1).astype(np.int64), row.numpy().reshape(-1).astype(np.int64)
        pair = np.flatnonzero(rows >= 0)
        if len(pair) < len(rows):
            keys, rows = keys[pair], rows[pair]
        destination, kth = np.divmod(keys, k)
        token = pair // k
        self._k, self._by_token = k, (token, kth, rows, destination)
        order = _stable_order(destination << 32 | rows if groups is None else groups.reshape(-1)[pair])
        self._destination = destination[order]
        self.token, self.kth, self.row = token[order], kth[order], rows[order]
        self.sizes: list[int] = np.bincount(destination, minlength=destinations).tolist()
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[PairSums]] = {}

    def runs(self) -> list[PairRun]:
        """All pairs in as few runs as possible: one per physical expert that this rank has rows for."""
        if self._runs is None:
            begins = np.flatnonzero(_changes(self.row - np.arange(len(self.row))) | _changes(self._destination))
            ends = [*begins[1:].tolist(), len(self.row)]
            destination, row = self._destination[begins].tolist(), self.row[begins].tolist()
            self._runs = [PairRun(*run) for run in zip(destination, begins.tolist(), ends, row, strict=False)]
        return self._runs

    def parts(self) -> list[PairPart]:
        """All pairs by destination, of those that have any."""
        ends = [0, *itertools.accumulate(self.sizes)]
        return [PairPart(i, *bounds) for i, bounds in enumerate(itertools.pairwise(ends)) if self.sizes[i]]

    def sums(self, most: int) -> list[PairSums]:
        """The pairs of each `most` consecutive tokens."""
        if most not in self._sums:
            self._sums[most] = self._grouped(most)
        return self._sums[most]

    def _grouped(self, most: int) -> list[PairSums]:
        token, kth, row, destination = self._by_token  # in order of token, destination and k
        number, chunks, destinations = len(token), -(-self._tokens // most), len(self.sizes)
        # The pairs of a token at a destination adjoin. Number them.
        begins = np.flatnonzero(_changes(token) | _changes(destination))
        lengths = np.diff(begins, append=number)
        many, nth = np.repeat(lengths, lengths), np.arange(number) - np.repeat(begins, lengths)
        deepest = int(lengths.max(initial=1))
        # Tokens with more pairs come first, so that those of each part are the first ones of the part before.
        part = (token // most * deepest + nth) * destinations + destination
        order = _stable_order(part * (deepest + 1) - many)
        part, token, row, pair = part[order], token[order], row[order], (token * self._k + kth)[order]
        begins = np.flatnonzero(_changes(part))
        ends = [*begins[1:].tolist(), number]
        parts: list[list[PairPart]] = [[] for _ in range(chunks)]
        leads: list[list[int]] = [[] for _ in range(chunks)]
        first, end_of = 0, [0] * chunks
        at: dict[int, int] = {}  # of this chunk's destinations: where their first pairs begin
        for which, begin, end in zip(part[begins].tolist(), begins.tolist(), ends, strict=False):
            chunk, which = divmod(which, deepest * destinations)
            round_, to = divmod(which, destinations)
            if not parts[chunk]:
                first = begin
            if round_:
                leads[chunk].append(at[to])
            else:
                at[to] = begin - first
            parts[chunk].append(PairPart(to, begin - first, end - first))
            end_of[chunk] = end
        sums, begin = [], 0
        for chunk, end in enumerate(end_of):
            these = slice(begin, max(begin, end))
            tokens = torch.from_numpy(token[these] - chunk * most)
            firsts = len(parts[chunk]) - len(leads[chunk])
            sums.append(PairSums(pair[these], row[these], tokens, parts[chunk], firsts, leads[chunk]))
            begin = these.stop
        return sums


def _stable_order(keys: Ints) -> Ints:
    """The order of numbers that are not negative; equal ones stay in theirs."""
    few = int(keys.max(initial=0)) < 1 << 15  # numpy sorts 16-bit numbers by radix
    return np.argsort(keys.astype(np.int16) if few else keys, kind="stable")


def _changes(values: Ints) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; true for the first."""
    changes = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes
