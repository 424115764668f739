"""The GPU's benchmark of token dispatch, on the CPU: its checks can fail, and whoever is beside it is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardweave.bench.baselines import token_kernels
from shardweave.bench.baselines.token_kernels import Rival
from shardweave.bench.gpu import token_cases
from shardweave.bench.gpu.token_cases import Shape, VirtualRank, verified

pytestmark = pytest.mark.plan
CPU = torch.device("cpu")
SMALL = Shape(tokens=40, hidden=16, top_k=3, experts=8, ranks=4)


@pytest.fixture(scope="module")
def rank() -> VirtualRank:
    return VirtualRank(SMALL, CPU)


def test_bytes_are_those_of_rows() -> None:
    assert Shape(4096, 7168, 8, 256, 8).moved == 9 * 4096 * 7168 * 2


def test_rows_of_a_virtual_rank(rank: VirtualRank) -> None:
    """Of every slot the rows of lower ranks come first, then its own by token and k."""
    matrix = rank.matrices.tensors[rank.me]
    assert (matrix >= 0).all() and matrix[:, -1].sum() == 0
    seen: dict[int, int] = {}
    for t in range(SMALL.tokens):
        for k in range(SMALL.top_k):
            slot = int(rank.ids[t, k])
            owner, first = slot // 2, slot - slot % 2
            begin = int(matrix[:, first:slot].sum() + matrix[: rank.me, slot].sum())
            assert rank.at[t, k] == owner * rank.rows + begin + seen.get(slot, 0)
            seen[slot] = seen.get(slot, 0) + 1


MADE: dict[str, Callable[[VirtualRank], token_cases.Made]] = {
    "push": lambda rank: rank.push(routing=False),
    "route + push": lambda rank: rank.push(routing=True),
    "combine": lambda rank: rank.combine(),
    "both": lambda rank: rank.both(),
}


@pytest.mark.parametrize("name", MADE)
def test_results_are_wrong_before_a_call_and_right_after(rank: VirtualRank, name: str) -> None:
    call, right = MADE[name](rank)
    assert not right()
    call()
    assert right()
    call()
    assert right()
    with pytest.raises(AssertionError, match="wrong"):
        verified([(lambda: None, MADE[name](rank)[1])])


def test_a_row_too_many_or_out_of_place_is_seen(rank: VirtualRank) -> None:
    x, (whole, _), (numbers, _) = rank.tokens(), rank.buffers(token_cases.poisoned), rank.numbers()
    for k in range(SMALL.top_k):
        whole[rank.at[:, k]] = x
    numbers[rank.at] = rank.weights
    assert rank.pushed(whole, numbers, x)
    others = torch.ones(len(whole), dtype=torch.bool).index_fill(0, rank.at.view(-1), False).nonzero().view(-1)
    for spoil in (
        lambda whole, numbers: whole[others[0]].fill_(0),
        lambda whole, numbers: numbers[others[0]].fill_(0),
        lambda whole, numbers: whole[rank.at[5, 1]].add_(1),
        lambda whole, numbers: numbers[rank.at[5, 1]].add_(1),
    ):
        rows, weights = whole.clone(), numbers.clone()
        spoil(rows, weights)
        assert not rank.pushed(rows, weights, x)


def test_routes_are_checked(rank: VirtualRank, monkeypatch: pytest.MonkeyPatch) -> None:
    call, right = rank.routed()
    call()
    assert right()
    for part in range(3):
        real = token_cases.route_tokens

        def wrong(ids: torch.Tensor, experts: int, part: int = part, real: Callable = real) -> object:
            found = real(ids, experts)
            found[part].view(-1)[1] += 1
            return found

        with monkeypatch.context() as patched:
            patched.setattr(token_cases, "route_tokens", wrong)
            call()
        assert not right()


@pytest.mark.parametrize("of", [token_kernels.permuting, token_kernels.combining, token_kernels.routing_and_permuting])
def test_rivals_compute_equal_results(rank: VirtualRank, of: Callable[..., list[Rival]]) -> None:
    names = []
    for rival in of(rank, dry=True):
        if rival.name in ("torchao", "torchtitan"):
            continue  # Triton's kernels: they run in the interpreter, and on a GPU
        call, right = rival.make()
        call()
        assert right(), rival.name
        names.append(rival.name)
    assert "torch.compile" in names and len(names) > 1
