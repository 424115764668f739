"""The CPU paths of the token kernels: compiled loops, and what takes their place, against each other and the
definitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from token_loops import without_loops

from shardweave.errors import ArgumentError
from shardweave.kernels import (
    PAYLOADS,
    QUANTIZATIONS,
    Buffers,
    Groups,
    PhysicalExperts,
    QuantizedRows,
    TokenRows,
    combine_rows,
    count_pairs,
    gather_values,
    locate_rows,
    push_rows,
    weigh_rows,
    why_not_compiled,
)
from shardweave.kernels.tokens.combine_rows import combine_rows_reference

pytestmark = pytest.mark.plan

HIDDEN = (1, 31, 32, 33, 100, 257)
NAN = float("nan")


@pytest.fixture(params=["loops", "without loops"], autouse=True)
def paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without loops":
        without_loops(monkeypatch)
    elif importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed; it comes with shardweave[cpu]")
    else:
        assert why_not_compiled() is None


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr("shardweave.kernels.tokens.compiled_loops._PARALLEL", 64)
    yield
    torch.set_num_threads(before)


def random_rows(rng: np.random.Generator, tokens: int, k: int, destinations: int, number: int) -> TokenRows:
    """Rows of most pairs, different ones at a destination, of `number` rows each."""
    free = [rng.permutation(number).tolist() for _ in range(destinations)]
    key, row = [], []
    for _ in range(tokens):
        destination = sorted((int(d), i) for i, d in enumerate(rng.integers(0, destinations + 1, k)))
        key.append([d * k + i for d, i in destination])
        row.append([free[d].pop() if d < destinations else -1 for d, _ in destination])
    return TokenRows(*(torch.tensor(x, dtype=torch.int32).view(tokens, k) for x in (key, row)))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with one NaN for all."""
    as_ints = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])
    return torch.where(x.isnan(), -1, as_ints)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", PAYLOADS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_combine_rows(hidden: int, dtype: torch.dtype, nested: bool) -> None:
    rng, g = np.random.default_rng(hidden), torch.Generator().manual_seed(hidden)
    for tokens, k, ranks in ((0, 2, 3), (1, 1, 1), (9, 5, 4), (6, 0, 2), (23, 3, 2)):
        rows = random_rows(rng, tokens, k, ranks, tokens * k + 1)
        values = [torch.randn(tokens * k + 1, hidden, generator=g).to(dtype) for _ in range(ranks)]
        values[0][:1, :1], values[-1][-1:, -1:] = -0.0, float("inf")
        nodes = torch.arange(ranks, dtype=torch.int32) // 2 if nested else None
        # Weights and results are strided.
        weights = torch.randn(tokens, 2 * k, generator=g)[:, ::2]
        added = torch.randn(tokens, hidden + 3, generator=g).to(dtype)[:, :hidden]
        for given, add in ((weights, None), (None, added), (weights.contiguous(), added)):
            out = torch.full((tokens, 2 * hidden), NAN, dtype=dtype)
            combine_rows(rows, Buffers(values), out[:, :hidden], given, add, nodes=nodes)
            want = combine_rows_reference(rows, values, given, add, None if nodes is None else nodes.tolist())
            assert bits(out[:, :hidden]).equal(bits(want))
            assert out[:, hidden:].isnan().all()


@pytest.mark.parametrize("dtype", PAYLOADS)
def test_combine_rows_with_pairs_that_have_none(dtype: torch.dtype) -> None:
    """Anywhere among a token's pairs, as those of ranks that sum up for others have them."""
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 40, 9, 3, 400)
    row = torch.where(torch.rand(40, 9) < 0.4, -1, rows.row).int()
    values, weights = [torch.randn(400, 33).to(dtype) for _ in range(3)], torch.randn(40, 9)
    for nodes in (None, torch.tensor([0, 0, 1], dtype=torch.int32)):
        out = torch.full((40, 33), NAN, dtype=dtype)
        combine_rows(TokenRows(rows.key, row), Buffers(values), out, weights, nodes=nodes)
        of_nodes = None if nodes is None else nodes.tolist()
        want = combine_rows_reference(TokenRows(rows.key, row), values, weights, None, of_nodes)
        assert bits(out).equal(bits(want))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", PAYLOADS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_combine_quantized_rows(hidden: int, dtype: torch.dtype, name: str) -> None:
    how, rng = QUANTIZATIONS[name], np.random.default_rng(hidden)
    scales_at = -(-hidden // 16) * 16
    quantized = QuantizedRows(how, scales_at)
    words = -(-(scales_at + how.scales(hidden) * how.scale_dtype.itemsize) // 16) * 4
    values = [torch.randn(46, hidden).to(dtype) * 10.0**i for i in range(-1, 2)]
    values[0][3] = 0
    values[1][4, -1] = float("inf")  # all of its group becomes NaN
    packed = [quantized.rows_of(x, words) for x in values]
    rows, weights = random_rows(rng, 15, 3, 3, 46), torch.randn(15, 3)
    out = torch.full((15, hidden), NAN, dtype=dtype)
    combine_rows(rows, Buffers(packed), out, weights, quantized=quantized)
    # The sums of float32 rows are not rounded before the last rounding, so the definition is written out.
    want = torch.empty_like(out)
    of_rows = [quantized.values(x, hidden) for x in packed]
    for t in range(15):
        total = torch.zeros(hidden)
        for destination in range(3):
            partial = torch.zeros(hidden)
            for key, row in zip(rows.key[t].tolist(), rows.row[t].tolist(), strict=True):
                if row >= 0 and key // 3 == destination:
                    partial += of_rows[destination][row] * weights[t, key % 3]
            total += partial.to(dtype).float()
        want[t] = total.to(dtype)
    assert bits(out).equal(bits(want))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [*PAYLOADS, torch.int32])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_push_rows(hidden: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(hidden)
    none, experts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    groups = Groups(experts, experts, experts, none, none, experts, none)
    for tokens, k, ranks in ((0, 2, 3), (1, 1, 1), (9, 5, 4), (6, 0, 2)):
        rows = random_rows(rng, tokens, k, ranks, tokens * k + 1)
        x = torch.randint(-99, 99, (tokens, 2 * hidden)).to(dtype)[:, hidden:]
        weights = torch.randn(tokens, 2 * k)[:, ::2]
        buffers = [torch.full((tokens * k + 1, hidden), 77).to(dtype) for _ in range(ranks)]
        numbers = [torch.full((tokens * k + 1,), 77.0) for _ in range(ranks)]
        want, want_numbers = [b.clone() for b in buffers], [n.clone() for n in numbers]
        for t, (keys, of_rows) in enumerate(zip(rows.key.tolist(), rows.row.tolist(), strict=True)):
            for key, row in zip(keys, of_rows, strict=True):
                if row >= 0:
                    want[key // k][row], want_numbers[key // k][row] = x[t], weights[t, key % k]
        push_rows(x, rows, Buffers(buffers), groups, 0, weights, Buffers(numbers))
        assert all(map(torch.equal, buffers, want)) and all(map(torch.equal, numbers, want_numbers))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", PAYLOADS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_weigh_rows(hidden: int, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    g = torch.Generator().manual_seed(hidden)
    for size, number in ((0, 0), (7, 0), (7, 5), (11, 11)):
        gradient, values = (torch.randn(size, hidden, generator=g).to(dtype) for _ in range(2))
        weights = torch.randn(size, generator=g)
        for out in (torch.full_like(gradient, NAN), gradient.clone()):
            given = gradient if out.isnan().any() else out
            dots = torch.full((size,), NAN)
            weigh_rows(given, values, weights, torch.tensor([number], dtype=torch.int32), out, dots)
            assert out[:number].equal((gradient.float() * weights[:, None]).to(dtype)[:number])
            assert out[number:].equal(gradient[number:]) or out[number:].isnan().all()
            assert dots[number:].isnan().all()
            products = gradient[:number].float() * values[:number].float()
            # Each product is rounded once, and is in at most hidden / 32 + 6 rounded sums of a column, and in one more
            # for each of the last hidden % 32 columns; torch's sums are at most as many.
            roundings = 1 + hidden // 32 + 6 + hidden % 32
            exact = (gradient[:number].double() * values[:number].double()).sum(1)
            bound = products.double().abs().sum(1) * roundings * 2.0**-24
            assert ((dots[:number] - exact).abs() <= bound).all()
            if "without loops" not in request.node.name:
                assert dots[:number].equal(documented_sums(products))


def documented_sums(products: torch.Tensor) -> torch.Tensor:
    """Of rows, in the order of `weigh_rows_cpu`'s description."""
    whole = products.shape[1] // 32 * 32
    lanes, rest = torch.zeros(len(products), 32), torch.zeros(len(products))
    for columns in products[:, :whole].split(32, 1) if whole else ():
        lanes = lanes + columns
    for apart in (16, 8, 4, 2, 1):
        lanes = lanes[:, :apart] + lanes[:, apart:]
    for column in products[:, whole:].T:
        rest = rest + column
    return lanes[:, 0] + rest


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("tokens, k", [(0, 2), (1, 1), (9, 4), (40, 8), (5, 0)])
def test_count_pairs(tokens: int, k: int, replicated: bool, ids_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(tokens)
    number = 5 if replicated else 8
    table = torch.tensor(rng.choice(8, 5, replace=False), dtype=torch.int32) if replicated else None
    ids = torch.tensor(rng.integers(-2, number + 2, (tokens, k))).to(ids_dtype)  # some are bad
    if ids.numel():
        ids[0, 0] = torch.iinfo(ids_dtype).min
        ids[-1, -1] = torch.iinfo(ids_dtype).max
    for given in (ids, ids.T.contiguous().T):
        expert, place, counts = count_pairs(given, number, table, 8)
        seen = [0] * 9
        for i, id_ in enumerate(ids.flatten().tolist()):
            want = -1 if not 0 <= id_ < number else id_ if table is None else int(table[id_])
            assert int(expert.flatten()[i]) == want
            assert int(place.flatten()[i]) == (-1 if want < 0 else seen[want])
            seen[want if want >= 0 else 8] += want >= 0 or id_ != -1
        assert counts.tolist() == seen


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("most", [0, 2, 100])
@pytest.mark.parametrize("tokens, k", [(0, 2), (1, 1), (9, 4), (40, 8), (5, 0)])
def test_locate_rows(tokens: int, k: int, most: int) -> None:
    experts = PhysicalExperts.divided((0, 2, 2, 5, 8), torch.device("cpu"))
    counted = count_pairs(torch.randint(-1, 8, (tokens, k)), 8)
    start = torch.tensor([0, 5, 0, 3, 30, 9, 90, 900])  # int64, as some callers have them
    limit = counted.counts[:-1].clamp(max=most)
    rows = locate_rows(counted.physical_expert, counted.place, Groups(start, limit, *[limit[:0]] * 5), experts)
    for t in range(tokens):
        pairs = []
        for i, (e, at) in enumerate(zip(counted.physical_expert[t].tolist(), counted.place[t].tolist(), strict=True)):
            kept = e >= 0 and at < int(limit[e])
            pairs.append((int(experts.destination[e]) if kept else 4, i, int(start[e]) + at if kept else -1))
        assert rows.key[t].tolist() == [d * k + i for d, i, _ in sorted(pairs)]
        assert rows.row[t].tolist() == [row for _, _, row in sorted(pairs)]


@pytest.mark.usefixtures("threads")
def test_gather_values() -> None:
    rows = random_rows(np.random.default_rng(0), 40, 4, 3, 60)
    numbers = torch.randn(3, 60)
    found = gather_values(rows, Buffers(list(numbers)))
    want = torch.zeros(40, 4)
    for t, (keys, at) in enumerate(zip(rows.key.tolist(), rows.row.tolist(), strict=True)):
        for key, row in zip(keys, at, strict=True):
            if row >= 0:
                want[t, key % 4] = numbers[key // 4, row]
    assert found.equal(want)


def test_buffers_without_memory_are_refused(request: pytest.FixtureRequest) -> None:
    if "without loops" in request.node.name:
        pytest.skip("torch operations read what is not there")
    rows, buffer, out = TokenRows(*torch.zeros(2, 3, 1, dtype=torch.int32)), torch.zeros(4, 8), torch.empty(3, 8)
    buffer.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"a Tensor of shape \(4, 8\) without memory"):
        combine_rows(rows, Buffers([buffer]), out)


def test_experts_of_many_sources() -> None:
    """As those of two levels, where the experts of each source count as others, and destinations do not ascend."""
    number = 70_000
    destination = torch.arange(number, dtype=torch.int32) % 2
    experts = PhysicalExperts((0, 1, 2), destination, torch.zeros_like(destination))
    expert = torch.randperm(number, dtype=torch.int32)[:240].view(60, 4)
    start, limit = torch.arange(number, dtype=torch.int32) // 2, torch.ones(number, dtype=torch.int32)
    rows = locate_rows(expert, torch.zeros_like(expert), Groups(start, limit, *[limit[:0]] * 5), experts)
    assert rows.row.equal(start[expert.gather(1, rows.key.long() % 4)])
