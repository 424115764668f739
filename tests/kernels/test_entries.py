"""The orders in which torch operations take entries, against loops over tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from shardweave.kernels.entries import Entries, entries_of, keep_entries
from shardweave.kernels.rows import TokenRows

pytestmark = pytest.mark.plan


def random_rows(rng: np.random.Generator, tokens: int, k: int, owners: int) -> tuple[TokenRows, list]:
    """Rows of all entries but some, and (owner, row) of each entry [t][k]."""
    free = [list(rng.permutation(tokens * k + 3)) for _ in range(owners)]
    places: list[list[tuple[int, int] | None]] = []
    for _ in range(tokens):
        owner = [int(o) for o in rng.integers(0, owners + 1, k)]
        places.append([(o, int(free[o].pop())) if o < owners else None for o in owner])
    key, row = [], []
    for of_token in places:
        keys = sorted((owners if p is None else p[0], i) for i, p in enumerate(of_token))
        key += [o * k + i for o, i in keys]
        row += [-1 if of_token[i] is None else of_token[i][1] for _, i in keys]
    shape = tokens, k
    return TokenRows(*[torch.tensor(v, dtype=torch.int32).view(shape) for v in (key, row)]), places


@pytest.mark.parametrize("tokens, k, owners", [(0, 2, 3), (1, 1, 1), (9, 5, 2), (40, 8, 4), (7, 3, 9)])
def test_entries(tokens, k, owners):
    rng = np.random.default_rng(tokens + k)
    rows, places = random_rows(rng, tokens, k, owners)
    entries = Entries(rows, owners)
    want = sorted((p[0], p[1], t, i) for t, of_token in enumerate(places) for i, p in enumerate(of_token) if p)
    assert list(zip(entries.row.tolist(), entries.token.tolist(), entries.kth.tolist(), strict=True)) == [
        (row, t, i) for _, row, t, i in want
    ]
    assert entries.owners == [sum(owner == o for owner, *_ in want) for o in range(owners)]
    check_runs(entries, want)
    for most in (1, 4, 100):
        check_sums(entries, want, most, -(-tokens // most))


def check_runs(entries: Entries, want: list) -> None:
    covered = []
    for run in entries.runs():
        assert [(run.owner, run.row + i) for i in range(run.end - run.begin)] == [
            w[:2] for w in want[run.begin : run.end]
        ]
        covered += range(run.begin, run.end)
    assert covered == list(range(len(want)))
    for a, b in pairwise(entries.runs()):  # none could be one with the next
        assert a.owner != b.owner or a.row + a.end - a.begin != b.row


def check_sums(entries: Entries, want: list, most: int, chunks: int) -> None:
    """Token by token the entries of an owner in order of k, whatever the rounds; each chunk's owners ascending."""
    seen = 0
    found, known = list(entries.sums(most)), {tuple(entry) for entry in want}
    assert len(found) == chunks
    for chunk, sums in enumerate(found):
        assert [s.owner for s in sums] == sorted({o for o, _, t, _ in want if t // most == chunk})
        for s in sums:
            by_token: dict[int, list[int]] = {}
            entries_of_sum = torch.stack((s.token, s.kth, s.row), 1)
            rounds = [of_round.tolist() for of_round in entries_of_sum.split(s.rounds)]
            first = [t for t, *_ in rounds[0]]
            assert len(set(first)) == len(first)
            for of_round in rounds:
                assert [t for t, *_ in of_round] == first[: len(of_round)]
                for t, k, row in of_round:
                    assert (s.owner, row, t, k) in known and t // most == chunk
                    by_token.setdefault(t, []).append(k)
            for t, ks in by_token.items():
                assert ks == sorted(i for o, _, at, i in want if (o, at) == (s.owner, t))
            seen += len(s.token)
    assert seen == len(want)


def test_entries_live_as_long_as_their_memory():
    rows, _ = random_rows(np.random.default_rng(0), 5, 2, 3)
    assert entries_of(rows, 3) is not entries_of(rows, 3)
    keep_entries(rows, 3)
    kept = entries_of(rows, 3)
    assert entries_of(TokenRows(rows.key.detach(), rows.row.view(5, 2)), 3) is kept
    other = TokenRows(rows.key.clone(), rows.row.clone())
    assert entries_of(other, 3) is not kept
