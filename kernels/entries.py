"""The entries of tokens that have a row, in the orders in which torch operations move and sum them. Of CPU tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from .rows import TokenRows


class Run(NamedTuple):
    """Entries from `begin` to below `end`, whose rows are at one owner and follow each other from `row` on."""

    owner: int
    begin: int
    end: int
    row: int


class Sum(NamedTuple):
    """What some tokens have at one owner.

    `rounds[0]` entries are the tokens' first there; the next `rounds[1]` are the second ones of as many of the same
    tokens from the first on, and so forth.
    """

    owner: int
    token: torch.Tensor
    """int64 [n], of each entry, round by round; as `kth` and `row`."""
    kth: torch.Tensor
    row: torch.Tensor
    rounds: list[int]


class Entries:
    """In order of owner and row.

    Attributes:
        token, kth, row: int64 [N].
        owners: how many entries each owner has.
    """

    def __init__(self, rows: TokenRows, owners: int) -> None:
        k = max(rows.key.shape[1], 1)
        flat = torch.nonzero(rows.row.reshape(-1) >= 0).view(-1)
        key, row = rows.key.reshape(-1)[flat].long(), rows.row.reshape(-1)[flat].long()
        owner, most = key // k, int(row.amax()) + 1 if len(row) else 1
        order = _argsort(owner * most + row)
        self._owner, self._tokens = owner[order], len(rows.key)
        self.token, self.kth, self.row = flat[order] // k, key[order] % k, row[order]
        self.owners: list[int] = torch.bincount(owner, minlength=owners).tolist()
        self._runs: list[Run] | None = None
        self._sums: dict[int, list[list[Sum]]] = {}

    def runs(self) -> list[Run]:
        """All entries, as few runs as there are: one for each slot that this rank has rows for."""
        if self._runs is None:
            follows = (self.row.diff() == 1) & (self._owner.diff() == 0)
            ends = [*(torch.nonzero(~follows).view(-1) + 1).tolist(), len(self.row)] if len(self.row) else []
            begins = [0, *ends[:-1]] if ends else []
            at = torch.tensor(begins, dtype=torch.int64, device="cpu")
            owner, row = self._owner[at].tolist(), self.row[at].tolist()
            self._runs = [Run(*run) for run in zip(owner, begins, ends, row, strict=True)]
        return self._runs

    def sums(self, most: int) -> Iterator[list[Sum]]:
        """For each `most` tokens in turn what they have, owners ascending."""
        if most not in self._sums:
            self._sums[most] = self._summed(most)
        return iter(self._sums[most])

    def _summed(self, most: int) -> list[list[Sum]]:
        chunks = -(-self._tokens // most)
        found: list[list[Sum]] = [[] for _ in range(chunks)]
        if not len(self.row):
            return found
        owners = len(self.owners)
        # By owner and token, k ascending: which of the token's entries there each is, and how many these are.
        of = self._owner * self._tokens + self.token
        order = _argsort(of * (int(self.kth.amax()) + 1) + self.kth)
        _, which, many = torch.unique_consecutive(of[order], return_inverse=True, return_counts=True)
        nth = torch.arange(len(order), device="cpu") - (many.cumsum(0) - many)[which]
        many = many[which]
        # Tokens that have more entries come first, so that those of each round are the first of the round before.
        deepest = int(many.amax()) + 1
        place = (self.token[order] // most) * owners + self._owner[order]  # [N], chunk and owner
        sort = ((place * deepest + nth) * deepest + (deepest - many)) * self._tokens + self.token[order]
        sorting = _argsort(sort)
        order, place, nth = order[sorting], place[sorting], nth[sorting]
        sizes = torch.bincount(place * deepest + nth, minlength=chunks * owners * deepest).view(-1, deepest).tolist()
        lengths = [sum(rounds) for rounds in sizes]
        of_each = (of[order].split(lengths) for of in (self.token, self.kth, self.row))
        for i, (rounds, token, kth, row) in enumerate(zip(sizes, *of_each, strict=True)):
            if lengths[i]:
                found[i // owners].append(Sum(i % owners, token, kth, row, [n for n in rounds if n]))
        return found


def _argsort(keys: torch.Tensor) -> torch.Tensor:
    """Of keys that are all different, by numpy's sort."""
    return torch.from_numpy(np.argsort(keys.numpy()))


_kept: weakref.WeakKeyDictionary[torch.UntypedStorage, Entries] = weakref.WeakKeyDictionary()
"""By the memory of `TokenRows.row`, while that is there: only what `keep_entries` was given, where nobody writes."""


def keep_entries(rows: TokenRows, owners: int) -> None:
    """Find the entries of rows that are never written again, once for all that ask while their memory lives."""
    _kept[rows.row.untyped_storage()] = Entries(rows, owners)


def entries_of(rows: TokenRows, owners: int) -> Entries:
    """The entries, as they were kept, else found now."""
    return _kept.get(rows.row.untyped_storage()) or Entries(rows, owners)
