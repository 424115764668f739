"""Sorted (token, k) pairs of the CPU paths, against loops over tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from shardweave.kernels import (
    Buffers,
    Groups,
    PhysicalExperts,
    RowsInParts,
    combine_rows,
    count_pairs,
    gather_values,
    host_array,
    locate_counted_pairs,
    locate_rows,
)
from shardweave.kernels.tokens.pairs_cpu import Pairs
from shardweave.kernels.tokens.rows import TokenRows
from shardweave.kernels.tokens.rows_cpu import HostRows

pytestmark = pytest.mark.plan


def random_rows(rng: np.random.Generator, tokens: int, k: int, destinations: int) -> tuple[TokenRows, list]:
    """Rows of most pairs, and (destination, row) or None of each pair [t][k]."""
    free = [list(rng.permutation(tokens * k + 3)) for _ in range(destinations)]
    places: list[list[tuple[int, int] | None]] = []
    for _ in range(tokens):
        destination = [int(o) for o in rng.integers(0, destinations + 1, k)]
        places.append([(o, int(free[o].pop())) if o < destinations else None for o in destination])
    key, row = [], []
    for of_token in places:
        keys = sorted((destinations if p is None else p[0], i) for i, p in enumerate(of_token))
        key += [o * k + i for o, i in keys]
        row += [-1 if of_token[i] is None else of_token[i][1] for _, i in keys]
    shape = tokens, k
    return TokenRows(*[torch.tensor(v, dtype=torch.int32).view(shape) for v in (key, row)]), places


@pytest.mark.parametrize("tokens, k, destinations", [(0, 2, 3), (1, 1, 1), (9, 5, 2), (40, 8, 4), (7, 3, 9)])
def test_pairs(tokens, k, destinations):
    rng = np.random.default_rng(tokens + k)
    rows, places = random_rows(rng, tokens, k, destinations)
    pairs = Pairs.of_rows(rows.key.numpy(), rows.row.numpy(), destinations)
    want = sorted((p[0], p[1], t, i) for t, of_token in enumerate(places) for i, p in enumerate(of_token) if p)
    assert list(zip(pairs.row.tolist(), pairs.token.tolist(), (pairs.pair % k).tolist(), strict=True)) == [
        (row, t, i) for _, row, t, i in want
    ]
    assert pairs.sizes == [sum(destination == o for destination, *_ in want) for o in range(destinations)]
    check_runs(pairs, want)
    for most in (1, 4, 100):
        check_sums(pairs, want, most, -(-tokens // most), k)


def check_runs(pairs: Pairs, want: list) -> None:
    covered = []
    for destination, begin, end, row in pairs.runs():
        assert [(destination, row + i) for i in range(end - begin)] == [w[:2] for w in want[begin:end]]
        covered += range(begin, end)
    assert covered == list(range(len(want)))
    for (destination, begin, end, row), after in pairwise(pairs.runs()):  # adjacent runs cannot be merged
        assert (destination, row + end - begin) != (after[0], after[3])


def check_sums(pairs: Pairs, want: list, most: int, chunks: int, k: int) -> None:
    """Each token's pairs at a destination are in order of k across parts; destinations ascend among the first ones."""
    seen = 0
    results, known = pairs.sums(most), {tuple(pair) for pair in want}
    assert len(results) == chunks
    for chunk, sums in enumerate(results):
        firsts = [part for part in sums.parts if part[2] <= len(sums.token)]
        assert [of_part for of_part, _, _ in firsts] == sorted({o for o, _, t, _ in want if t // most == chunk})
        assert [0, *(end for _, _, end in sums.parts)] == [*(begin for _, begin, _ in sums.parts), len(sums.row)]
        tokens, m = (sums.token + chunk * most).tolist(), len(sums.token)
        assert m == (firsts[-1][2] if firsts else 0)
        of_pair = list(
            zip([*tokens, *[tokens[i] for i in sums.lead.tolist()]], sums.pair.tolist(), sums.row.tolist(), strict=True)
        )
        ks: dict[tuple[int, int], list[int]] = {}
        for number, (destination, begin, end) in enumerate(sums.parts):
            for at in range(begin, end):
                t, pair, row = of_pair[at]
                assert (destination, row, t, pair % k) in known and t == pair // k and t // most == chunk
                if number < len(firsts):
                    assert (destination, t) not in ks
                else:
                    lead = int(sums.lead[at - m])
                    assert [of_part for of_part, first, last in firsts if first <= lead < last] == [destination]
                ks.setdefault((destination, t), []).append(pair % k)
                seen += 1
        for (destination, t), of_token in ks.items():
            assert of_token == sorted(i for o, _, at, i in want if (o, at) == (destination, t))
    assert seen == len(want)


def test_sorted_pairs_are_computed_once_if_passed_on():
    rows, _ = random_rows(np.random.default_rng(0), 5, 2, 3)
    assert rows.pairs is None and rows.sorted_pairs(3) is not rows.sorted_pairs(3)
    rows = rows._replace(pairs=rows.sorted_pairs(3))
    assert rows.sorted_pairs(3) is rows.pairs


@pytest.mark.parametrize("most", [None, 0, 3])
@pytest.mark.parametrize("tokens, k, replicated", [(0, 2, False), (1, 1, True), (9, 4, False), (40, 8, True)])
def test_rows_of_counted_pairs_are_those_of_their_places(tokens: int, k: int, replicated: bool, most: int | None):
    experts = PhysicalExperts.divided((0, 2, 2, 5, 8), torch.device("cpu"))
    rng = np.random.default_rng(tokens)
    number = 5 if replicated else 8
    table = torch.tensor(rng.choice(8, 5, replace=False), dtype=torch.int32) if replicated else None
    ids = torch.tensor(rng.integers(-2, number + 2, (tokens, k)))  # some are bad
    counted = count_pairs(ids, number, table, 8)
    counts = counted.counts[:-1]
    # Rows of other ranks lie between.
    start = (counts.cumsum(0) - counts).int() + torch.tensor([0, 5, 0, 3, 3, 9, 9, 9], dtype=torch.int32)
    limit = counts if most is None else counts.clamp(max=most)
    none = limit[:0]
    want = locate_rows(counted.physical_expert, counted.place, Groups(start, limit, *[none] * 5), experts)
    before = counted.physical_expert.clone()
    check_located(locate_counted_pairs(counted, start.numpy(), limit.numpy(), experts), want)
    assert counted.physical_expert.equal(before)


def check_located(rows: TokenRows, want: TokenRows) -> None:
    assert rows.key.equal(want.key) and rows.row.equal(want.row)
    # The others are sorted by their rows.
    pairs, others = rows.sorted_pairs(4), want._replace(pairs=None).sorted_pairs(4)
    assert pairs.sizes == others.sizes and pairs.parts() == others.parts() and pairs.runs() == others.runs()
    for name in ("token", "pair", "row"):
        assert np.array_equal(getattr(pairs, name), getattr(others, name))
    k = rows.key.shape[1]
    places = zip(rows.key.flatten().tolist(), rows.row.flatten().tolist(), strict=True)
    check_runs(pairs, sorted((key // k, row) for key, row in places if row >= 0))
    for sums, same in zip(pairs.sums(4), others.sums(4), strict=True):
        assert sums.parts == same.parts and sums.token.equal(same.token) and sums.lead.equal(same.lead)
        assert np.array_equal(sums.pair, same.pair) and np.array_equal(sums.row, same.row)


def test_experts_of_many_sources_are_more_than_16_bits_have() -> None:
    """As those of two levels, where the experts of each source count as others, and destinations do not ascend."""
    number = 70_000
    destination = torch.arange(number, dtype=torch.int32) % 2
    experts = PhysicalExperts((0, 1, 2), destination, torch.zeros_like(destination))
    expert = torch.randperm(number, dtype=torch.int32)[:240].view(60, 4)
    start, limit = torch.arange(number, dtype=torch.int32) // 2, torch.ones(number, dtype=torch.int32)
    rows = locate_rows(expert, torch.zeros_like(expert), Groups(start, limit, *[limit[:0]] * 5), experts)
    assert rows.row.equal(start[expert.gather(1, rows.key.long() % 4)])
    pairs, others = rows.sorted_pairs(2), rows._replace(pairs=None).sorted_pairs(2)
    assert np.array_equal(pairs.pair, others.pair) and np.array_equal(pairs.row, others.row)


def test_without_limits_rows_follow_each_other() -> None:
    experts = PhysicalExperts.divided((0, 2, 2, 5, 8), torch.device("cpu"))
    counted = count_pairs(torch.randint(-1, 8, (9, 4)), 8)
    counts = counted.counts[:-1]
    groups = Groups((counts.cumsum(0) - counts).int(), counts, *[counts[:0]] * 5)
    want = locate_rows(counted.physical_expert, counted.place, groups, experts)
    check_located(locate_counted_pairs(counted, None, None, experts), want)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_parts_are_read_as_those_of_one_buffer(dtype: torch.dtype) -> None:
    experts = PhysicalExperts.divided((0, 2, 2, 5, 8), torch.device("cpu"))
    rows = locate_counted_pairs(count_pairs(torch.randint(-1, 8, (9, 4)), 8), None, None, experts)
    sizes = rows.sorted_pairs(4).sizes
    for buffer in (torch.randn(sum(sizes), 5).to(dtype), torch.randn(sum(sizes))):
        parts = RowsInParts([host_array(part.clone()) for part in buffer.split(sizes)], buffer.dtype)
        assert parts.shape == buffer.shape and len(parts) == 4
        results = []
        for buffers in (parts, Buffers([buffer] * 4)):
            if buffer.dim() == 1:
                results.append(gather_values(rows, buffers))
            else:
                results.append(torch.empty(9, 5, dtype=dtype))
                combine_rows(rows, buffers, results[-1], None, None)
        assert results[0].equal(results[1])


@pytest.mark.usefixtures("threads")
def test_rows_are_put() -> None:
    x, to = torch.randn(6, 3), torch.zeros(4, 3)
    HostRows(to).put(HostRows(x), np.array([5, 0, 0]), np.array([3, 1, 0]))
    assert to.equal(torch.stack([x[0], x[0], torch.zeros(3), x[5]]))
