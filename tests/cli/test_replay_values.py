"""The values of a replay: the shard of each rank, and the reduction of terms."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardweave.cli import replay_values
from shardweave.cli.replay_values import Values


def _cut(
    whole: torch.Tensor, order: list[tuple[int, int]], sizes: tuple[int, ...], at: tuple[int, ...]
) -> torch.Tensor:
    """The reference: chunked along (mesh dim, tensor dim) in this order."""
    for m, dim in order:
        chunks = whole.chunk(sizes[m], dim)
        whole = chunks[at[m]] if at[m] < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@pytest.mark.plan
@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("S0 S1 R", [(0, 0), (1, 1)]),
        ("S1 S1 S1", [(0, 1), (1, 1), (2, 1)]),
        ("S0/6 S0 S0", [(1, 0), (2, 0), (0, 0)]),  # the layout of FSDP
        ("S0/3 S1 S0", [(2, 0), (0, 0), (1, 1)]),
        ("S0 S0 S0 @ 0:1,2,0", [(1, 0), (2, 0), (0, 0)]),
        ("S0/2 S0 S0", [(1, 0), (0, 0), (2, 0)]),  # decoded by the planner
    ],
)
@pytest.mark.parametrize("shape", [(12, 24), (7, 5, 3), (1, 50), (0, 4)])
def test_values_held_by_each_rank(text: str, order: list[tuple[int, int]], shape: tuple[int, ...]) -> None:
    sizes = (2, 2, 3)
    values = Values.of(shape, torch.float32, text, sizes)
    whole = values.target("R", (1,), (0,))
    assert whole.shape == shape and (not whole.numel() or len(whole.unique()) == 4)
    for at in itertools.product(*map(range, sizes)):
        assert torch.equal(values.source(text, at), _cut(whole, order, sizes, at)), at


REDUCTIONS = {"": "sum", "avg": "mean", "max": "amax", "min": "amin", "prod": "prod"}
DTYPES = ("float64", "bfloat16", "int8", "bool", "float8_e4m3fn")


@pytest.mark.plan
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in REDUCTIONS for name in DTYPES if op != "avg" or "float" in name]
)
def test_terms_differ_and_reduce_to_the_value(op: str, name: str) -> None:
    shape, sizes, dtype = (30, 40), (2, 2), getattr(torch, name)
    values = Values.of(shape, dtype, f"P{op} P{op}", sizes)
    terms = [values.source(f"P{op} P{op}", at) for at in itertools.product(range(2), range(2))]
    assert all(not torch.equal(a.float(), b.float()) for a, b in itertools.combinations(terms, 2))
    assert all(len(term.float().unique(dim=0)) == 30 for term in terms), "no two rows are alike"
    assert values.exact
    stacked = torch.stack([term.double() for term in terms])
    exact = getattr(stacked, REDUCTIONS[op])(0)
    assert torch.equal(values.target("R", (1,), (0,)).double(), exact.bool().double() if name == "bool" else exact)


@pytest.mark.plan
def test_inexact_values_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(name: str, source: str, ranks: int) -> bool:
        return Values.of((4,), getattr(torch, name), source, (ranks,)).exact

    assert exact("float8_e5m2", "P", 8) and not exact("float8_e5m2", "P", 9)
    assert exact("float16", "Pprod", 15) and not exact("float16", "Pprod", 16)
    assert exact("bfloat16", "Pavg", 15) and exact("int8", "P", 16) and exact("float8_e5m2", "Pmax", 16)
    # Made in chunks that do not divide the dims.
    values = Values.of((3, 5, 7), torch.int32, "R", (1,))
    whole = values.target("R", (1,), (0,))
    for chunk in (1, 2, 7, 8, 35, 36, 105):
        monkeypatch.setattr(replay_values, "_CHUNK", chunk)
        assert torch.equal(values.target("R", (1,), (0,)), whole)
