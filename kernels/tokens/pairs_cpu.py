"""Sorted (token, k) pairs: the orders in which the CPU paths of the token kernels move and sum rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch


class PairRun(NamedTuple):
    """Pairs `begin` to `end` (exclusive), whose rows are at one destination and contiguous from `row` on."""

    destination: int
    begin: int
    end: int
    row: int


class PairSum(NamedTuple):
    """The pairs of some tokens at one destination.

    The first `rounds[0]` pairs are each token's first pair there; the next `rounds[1]` are the second pairs of the
    first `rounds[1]` of these tokens, and so on.
    """

    destination: int
    token: torch.Tensor
    """int64 [n], the token of each pair, round by round; `kth` and `row` likewise."""
    kth: torch.Tensor
    row: torch.Tensor
    rounds: list[int]


class Pairs:
    """The pairs that have a row, sorted by destination and row. CPU tensors only.

    Args:
        key: int32 [T, K], destination * K + k, as in `TokenRows`.
        row: int32 [T, K], the row in the destination's buffer, -1 if there is none.
        destinations: W, the number of destination ranks.

    Attributes:
        token, kth, row: int64 [N].
        sizes: the number of pairs of each destination.
    """

    def __init__(self, key: torch.Tensor, row: torch.Tensor, destinations: int) -> None:
        k = max(key.shape[1], 1)
        self._tokens = len(key)
        flat = torch.nonzero(row.reshape(-1) >= 0).view(-1)
        key, row = key.reshape(-1)[flat].long(), row.reshape(-1)[flat].long()
        destination, most = key // k, int(row.amax()) + 1 if len(row) else 1
        order = _argsort(destination * most + row)
        self._destination = destination[order]
        self.token, self.kth, self.row = flat[order] // k, key[order] % k, row[order]
        self.sizes: list[int] = torch.bincount(destination, minlength=destinations).tolist()
        self._runs: list[PairRun] | None = None
        self._sums: dict[int, list[list[PairSum]]] = {}

    def runs(self) -> list[PairRun]:
        """All pairs in as few runs as possible: one per physical expert that this rank has rows for."""
        if self._runs is None:
            follows = (self.row.diff() == 1) & (self._destination.diff() == 0)
            ends = [*(torch.nonzero(~follows).view(-1) + 1).tolist(), len(self.row)] if len(self.row) else []
            begins = [0, *ends[:-1]] if ends else []
            at = torch.tensor(begins, dtype=torch.int64, device="cpu")
            destination, row = self._destination[at].tolist(), self.row[at].tolist()
            self._runs = [PairRun(*run) for run in zip(destination, begins, ends, row, strict=True)]
        return self._runs

    def sums(self, most: int) -> Iterator[list[PairSum]]:
        """For each `most` consecutive tokens their pairs, destinations ascending."""
        if most not in self._sums:
            self._sums[most] = self._grouped(most)
        return iter(self._sums[most])

    def _grouped(self, most: int) -> list[list[PairSum]]:
        chunks = -(-self._tokens // most)
        sums: list[list[PairSum]] = [[] for _ in range(chunks)]
        if not len(self.row):
            return sums
        destinations = len(self.sizes)
        # Sort by destination and token, k ascending; number each token's pairs there.
        group = self._destination * self._tokens + self.token
        order = _argsort(group * (int(self.kth.amax()) + 1) + self.kth)
        _, which, many = torch.unique_consecutive(group[order], return_inverse=True, return_counts=True)
        nth = torch.arange(len(order), device="cpu") - (many.cumsum(0) - many)[which]
        many = many[which]
        # Tokens with more pairs come first, so that the tokens of each round are the first of the round before.
        deepest = int(many.amax()) + 1
        place = (self.token[order] // most) * destinations + self._destination[order]  # [N], chunk and destination
        sort = ((place * deepest + nth) * deepest + (deepest - many)) * self._tokens + self.token[order]
        sorting = _argsort(sort)
        order, place, nth = order[sorting], place[sorting], nth[sorting]
        sizes = torch.bincount(place * deepest + nth, minlength=chunks * destinations * deepest)
        rounds_of = sizes.view(-1, deepest).tolist()
        lengths = [sum(rounds) for rounds in rounds_of]
        parts = (values[order].split(lengths) for values in (self.token, self.kth, self.row))
        for i, (rounds, token, kth, row) in enumerate(zip(rounds_of, *parts, strict=True)):
            if lengths[i]:
                sums[i // destinations].append(PairSum(i % destinations, token, kth, row, [n for n in rounds if n]))
        return sums


def _argsort(keys: torch.Tensor) -> torch.Tensor:
    """The order of distinct keys; numpy's sort is faster than torch's here."""
    return torch.from_numpy(np.argsort(keys.numpy()))
