"""A dispatch that one rank refuses raises on all ranks alike, names the rank and the reason, and the next one works."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import run_ranks

from shardweave.errors import ArgumentError, CapacityError, DisagreementError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions

E, K, H, MOST = 6, 2, 8, 16
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shared memory": (3, "shared_memory", {}),
    "exact sizes": (3, "process_group", {"capacity": 2 * MOST * K, "overflow": "drop"}),
    "fixed sizes": (3, "process_group", {"chunk_capacity": 1 << 20}),
    "one level": (4, "hierarchical", {"two_level": False}),
    "two levels": (4, "hierarchical", {"two_level": True}),
    "two levels, dropping": (3, "hierarchical", {"two_level": True, "capacity": 200, "overflow": "drop"}),
    "two levels, exact sizes": (4, "process_group", {"two_level": True}),
    "two levels, fixed sizes": (4, "process_group", {"two_level": True, "chunk_capacity": 1 << 20}),
}


def tokens(rank: int, call: int, number: int, hidden: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * call + rank)
    x, ids = torch.randn(number, hidden, generator=g), torch.randint(0, E, (number, K), generator=g)
    return x, ids, torch.ones(number, K)


def outcome(d: TokenDispatcher, given: tuple[torch.Tensor, ...], in_phases: bool) -> str:
    """A dispatch and its combine: "right", or how it was refused."""
    try:
        routed = d.dispatch_start(*given).finish() if in_phases else d.dispatch(*given)
    except ArgumentError as error:
        return f"refused: {error}"
    except DisagreementError as error:
        assert error.recoverable, error
        return f"learned: {error}"
    rows = routed.x.clone()
    y = d.combine_start(rows, routed).finish() if in_phases else d.combine(rows, routed)
    return "right" if torch.allclose(y, K * given[0]) else "wrong"


def one_refuses(rank: int, transport: str, options: dict[str, Any]) -> None:
    settings = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": MOST, "dtype": torch.float32, **options}
    hidden = settings["hidden"]
    first, second = (TokenDispatcher(None, **with_options(**settings, transport=transport)) for _ in range(2))
    # The first call of all, calls one after another, in two phases, and by several ranks.
    for call, refusing in enumerate([(1,), (), (0,), (1,), (), (), (1,), (0, 1), ()]):
        d, in_phases = (second if call == 5 else first), call in (3, 4, 6)
        if rank == call % 2 and call in (2, 3):
            time.sleep(0.15)  # peers look into the store meanwhile
        x, ids, weights = tokens(rank, call, (MOST + 1) if rank in refusing else 3 + rank, hidden)
        if call == 6 and rank == 1:
            x, ids, weights = x[:4].double(), ids[:4], weights[:4]
        text = outcome(d, (x, ids, weights), in_phases)
        if rank in refusing:
            assert text.startswith("refused: x: torch.float"), (call, text)
        elif refusing:
            assert text.startswith("learned: rank"), (call, text)
            assert any(f"rank {r} refused its arguments in call" in text for r in refusing), (call, text)
            assert "x: torch.float" in text and f"T up to max_tokens, {MOST}" in text, (call, text)
        else:
            assert text == "right", (call, text)


@pytest.mark.multi
@pytest.mark.parametrize("case", CASES)
def test_next_dispatch_works_on_all_ranks(case: str) -> None:
    ranks, transport, options = CASES[case]
    pretended = transport == "hierarchical" or "two_level" in options
    environment = {"SHARDWEAVE_TIMEOUT": "40", "SHARDWEAVE_NODE_SIZE": "2" if pretended else ""}
    run_ranks(one_refuses, ranks, transport, options, environment=environment)


def overflow_and_refusal(rank: int, transport: str) -> list[str]:
    """The third dispatch is to raise the overflow of the first on all ranks: also on the one that refuses it."""
    d = TokenDispatcher(
        None,
        num_experts=4,
        top_k=K,
        hidden=H,
        max_tokens=MOST,
        dtype=torch.float32,
        transport=transport,
        options=DispatchOptions(capacity=4),
    )
    outcomes = []
    for call in range(5):
        refuses = rank == 1 and call in (2, 3)
        number = 8 if call == 0 else MOST + 1 if refuses else 1
        x, ids = torch.full((number, H), float(call)), torch.zeros(number, K, dtype=torch.int64)
        ids[:, 1] = 3
        try:
            routed = d.dispatch(x, ids, torch.ones(number, K))
            y = d.combine(routed.x.clone(), routed)
            outcomes.append("right" if call and y.eq(K * call).all() else "dropped")
        except (ArgumentError, CapacityError, DisagreementError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_overflow_is_raised_before_a_refusal(transport: str) -> None:
    of_others, of_refusing = run_ranks(overflow_and_refusal, 2, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})
    assert of_others == ["dropped", "right", "CapacityError", "DisagreementError", "right"]
    assert of_refusing == ["dropped", "right", "CapacityError", "ArgumentError", "right"]


def refused_combine(rank: int) -> list[str]:
    d = TokenDispatcher(
        None, num_experts=E, top_k=K, hidden=H, max_tokens=MOST, dtype=torch.float32, transport="shared_memory"
    )
    outcomes = []
    for call in range(3):
        x, ids, weights = tokens(rank, call, 4)
        routed = d.dispatch(x, ids, weights)
        given = routed.x.double() if (rank, call) == (0, 1) else routed.x
        try:
            outcomes.append("right" if torch.allclose(d.combine(given, routed), K * x) else "wrong")
        except (ArgumentError, DisagreementError) as error:
            assert getattr(error, "recoverable", True), error
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.multi
def test_refused_combine_in_shared_memory() -> None:
    outcomes = run_ranks(refused_combine, 3)
    assert outcomes[0] == ["right", "ArgumentError", "right"]
    assert outcomes[1] == outcomes[2] == ["right", "DisagreementError", "right"]
