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
    locate_rows,
    weigh_rows,
    why_not_compiled,
)
from shardweave.kernels.tokens.combine_rows import combine_rows_reference

pytestmark = pytest.mark.plan

HIDDEN = (1, 33, 257)
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
