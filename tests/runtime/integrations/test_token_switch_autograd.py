"""TokenSwitch on ranks without experts, whose outputs require no gradients: which backwards run, and recomputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_reference import Tokens
from rank_processes import end_ranks, run_ranks
from test_threads import Turns, in_threads
from test_token_modes import Log
from test_token_switch import (
    LAYOUTS,
    H,
    assert_weighted,
    given_of,
    leaf,
    most_rows,
    needs_token_switch,
    switch_of,
    weighted,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardweave.errors import ArgumentError

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
SIZE, EXPERTS = 3, 2  # the last rank has none


def tokens_in_flight(rank: int, number: int) -> list[Tokens]:
    """Return tokens of equal ids."""
    tokens = [given_of(rank, seed, experts=EXPERTS) for seed in range(number)]
    for item in tokens:
        item.ids = tokens[0].ids
    return tokens


def outputs(switch, layout: str, got, depend: bool = False) -> torch.Tensor:
    """Return the rows times their weights where the rank has experts, otherwise no rows, which may depend on `got`."""
    if dist.get_rank() < EXPERTS:
        return weighted(layout, got)
    return got[0][:0] if depend else torch.zeros(0, H)


def several_in_flight(rank: int) -> None:
    for layout in LAYOUTS:
        rows = most_rows(layout, SIZE)
        switch = switch_of(EXPERTS, rows)
        tokens = tokens_in_flight(rank, 3)
        routed = switch.create_routing(tokens[0].ids, layout=layout)
        given = [(leaf(t.x), leaf(t.weights)) for t in tokens]
        got = [switch.dispatch(routed, *pair, rows) for pair in given]
        with torch.no_grad():
            switch.combine(routed, torch.ones(rows, H))  # belongs to no dispatch
        ys = [switch.combine(routed, outputs(switch, layout, item, depend=i == 1)) for i, item in enumerate(got)]
        order = [1, 0, 2]
        for i, at in enumerate(order):
            ys[at].backward(tokens[at].gradient)
            assert {n for n, (x, _) in enumerate(given) if x.grad is not None} == set(order[: i + 1])
        for t, y, (x, weights) in zip(tokens, ys, given, strict=True):
            assert_weighted(t, y, x.grad, weights.grad)


def combined_twice(rank: int) -> None:
    """Two combines of one dispatch, then a dispatch and a combine."""
    for layout in LAYOUTS:
        rows = most_rows(layout, SIZE)
        switch = switch_of(EXPERTS, rows)
        first, second = tokens_in_flight(rank, 2)
        routed = switch.create_routing(first.ids, layout=layout)
        x, weights = leaf(first.x), leaf(first.weights)
        got = switch.dispatch(routed, x, weights, rows)
        a, b = (switch.combine(routed, outputs(switch, layout, got) * share) for share in (0.25, 0.75))
        (a + b).backward(first.gradient)
        assert_weighted(first, a + b, x.grad, weights.grad)
        x, weights = leaf(second.x), leaf(second.weights)
        again = switch.dispatch(routed, x, weights, rows)  # with `got` alive
        y = switch.combine(routed, outputs(switch, layout, again))
        y.backward(second.gradient)
        assert_weighted(second, y, x.grad, weights.grad)


def checkpointed(rank: int) -> None:
    for layout in LAYOUTS:
        rows, (tokens,) = most_rows(layout, SIZE), tokens_in_flight(rank, 1)
        switch = switch_of(EXPERTS, rows)
        routings = []

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            routings.append(switch.create_routing(tokens.ids, layout=layout))  # noqa: B023
            got = switch.dispatch(routings[-1], x, weights, rows)  # noqa: B023
            return switch.combine(routings[-1], outputs(switch, layout, got))  # noqa: B023

        def region(*saved: Any) -> Any:
            return partial(create_selective_checkpoint_contexts, list(saved))

        regions: list[dict[str, Any]] = [{"context_fn": region()}, {"context_fn": region(ALL_TO_ALL)}, {}]
        for options in ({"use_reentrant": True}, *({"use_reentrant": False, **options} for options in regions)):
            routings.clear()
            x, weights = leaf(tokens.x), leaf(tokens.weights)
            y = checkpoint(layer, x, weights, **options)
            y.backward(tokens.gradient)
            assert len(routings) == 2
            assert_weighted(tokens, y, x.grad, weights.grad)
        switch.check()


def in_flight_on_threads(rank: int) -> None:
    """Two threads use one routing: the second to dispatch combines first. Then a thread combines another's dispatch."""
    for layout in LAYOUTS:
        rows = most_rows(layout, SIZE)
        switch, tokens = switch_of(EXPERTS, rows), tokens_in_flight(rank, 2)
        routed = switch.create_routing(tokens[0].ids, layout=layout)
        turns, given = Turns(), [(leaf(t.x), leaf(t.weights)) for t in tokens]

        def dispatch(i: int, switch=switch, routed=routed, given=given, rows=rows):
            return switch.dispatch(routed, *given[i], rows)

        def combine(got, switch=switch, routed=routed, layout=layout) -> torch.Tensor:
            return switch.combine(routed, outputs(switch, layout, got))

        def thread(i: int, turns=turns, dispatch=dispatch, combine=combine, tokens=tokens) -> torch.Tensor:
            first, second, third = ((0, 3, 5), (1, 2, 4))[i]
            got = turns.run(first, lambda: dispatch(i))
            y = turns.run(second, lambda: combine(got))
            turns.run(third, lambda: y.backward(tokens[i].gradient))
            return y

        ys = in_threads(lambda: thread(0), lambda: thread(1))
        for t, y, (x, weights) in zip(tokens, ys, given, strict=True):
            assert_weighted(t, y, x.grad, weights.grad)
            x.grad = weights.grad = None
        got = dispatch(0)
        (y,) = in_threads(partial(combine, got))
        y.backward(tokens[0].gradient)
        assert_weighted(tokens[0], y, given[0][0].grad, given[0][1].grad)


@needs_token_switch
@pytest.mark.multi
def test_threads_with_one_routing():
    run_ranks(in_flight_on_threads, SIZE)


def seen_by_a_mode(rank: int) -> None:
    """One operator for each call, in the first one as later, and results as without the mode."""
    for layout in LAYOUTS:
        rows, (tokens,) = most_rows(layout, SIZE), tokens_in_flight(rank, 1)
        switch = switch_of(EXPERTS, rows)
        counts = torch.zeros(EXPERTS, dtype=torch.int32)
        outs = torch.empty(rows, H), torch.empty(rows, *tokens.ids.shape[1:] if layout == "flat" else ()), None
        for _ in range(2):
            x, weights = leaf(tokens.x), leaf(tokens.weights)
            log = Log()
            with log:
                routing = switch.create_routing(tokens.ids, counts, layout=layout)
                got = switch.dispatch(routing, x, weights, rows)
            output = outputs(switch, layout, got)
            with log:
                y = switch.combine(routing, output)
            y.backward(tokens.gradient)
            assert_weighted(tokens, y, x.grad, weights.grad)
            total = torch.empty_like(y)
            with log, torch.no_grad():
                switch.dispatch(routing, x, weights, out=outs)
                switch.combine(routing, output, out=total)
                switch.check()
            assert torch.equal(outs[0], got[0]) and torch.equal(outs[1], got[1]) and torch.equal(total, y)
            names = ["dispatch", "dispatch", "combine", "dispatch", "combine"]
            assert log.seen == [f"shardweave.{name}.default" for name in names], log.seen


@needs_token_switch
@pytest.mark.multi
@pytest.mark.parametrize("function", [several_in_flight, combined_twice, checkpointed, seen_by_a_mode])
def test_a_rank_without_experts(function):
    run_ranks(function, SIZE)


def freed(rank: int) -> None:
    rows, (tokens,) = most_rows("flat", SIZE), tokens_in_flight(rank, 1)
    switch = switch_of(EXPERTS, rows)
    routed = switch.create_routing(tokens.ids, layout="flat")
    x, weights = leaf(tokens.x), leaf(tokens.weights)
    # The last rank frees the rows before it combines.
    values = outputs(switch, "flat", switch.dispatch(routed, x, weights, rows))
    switch.combine(routed, values)


def slice_of_no_rows(rank: int) -> None:
    """What the error advises."""
    rows, (tokens,) = most_rows("flat", SIZE), tokens_in_flight(rank, 1)
    switch = switch_of(EXPERTS, rows)
    routed = switch.create_routing(tokens.ids, layout="flat")
    x, weights = leaf(tokens.x), leaf(tokens.weights)
    got = switch.dispatch(routed, x, weights, rows)
    values = outputs(switch, "flat", got, depend=True)
    del got
    y = switch.combine(routed, values)
    y.backward(tokens.gradient)
    assert_weighted(tokens, y, x.grad, weights.grad)
    switch.dispatch(routed, x, weights, rows)
    with torch.no_grad():
        switch.combine(routed, torch.ones(0, H))


def constants(rank: int) -> None:
    """Ranks with experts may combine constants, whether or not an earlier dispatch was combined."""
    rows, tokens = most_rows("expert_major", 2), given_of(rank, 0)
    switch = switch_of(5, rows)
    routed = switch.create_routing(tokens.ids, layout="expert_major")
    switch.dispatch(routed, leaf(tokens.x), leaf(tokens.weights), rows)
    for _ in range(2):
        y = switch.combine(routed, torch.ones(rows, H))
        assert torch.equal(y, (tokens.ids >= 0).sum(1, keepdim=True).float().expand(-1, H))


@needs_token_switch
@pytest.mark.multi
def test_freed_rows_are_an_error():
    ends = end_ranks(freed, SIZE, environment={"SHARDWEAVE_TIMEOUT": "40"})
    assert ends[2].error == ArgumentError.__name__
    text = "expert_tokens: requires no gradients, and out_tokens of the routing's oldest dispatch"
    assert all(text in end.message and end.error is not None for end in ends), [end.message for end in ends]
    run_ranks(slice_of_no_rows, SIZE)
    run_ranks(constants, 2)
