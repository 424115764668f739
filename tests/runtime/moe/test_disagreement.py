"""Ranks with different dispatchers, arguments or order of calls raise on every transport before rows are misread."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardweave import redistribute
from shardweave.errors import ArgumentError, TransportError, UnsupportedError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.routed import RoutedTokens

RANKS, E, K, H = 4, 6, 2, 8
TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")


def dispatcher(transport: str, **given) -> TokenDispatcher:
    settings = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 4, "dtype": torch.float32}
    return TokenDispatcher(**with_options(**{**settings, **given}, transport=transport))


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.full((3, H), 1.0 + rank), torch.randint(0, E, (3, K), generator=g), torch.ones(3, K)


def fits(d: TokenDispatcher, rank: int) -> None:
    """A dispatch and its combine, with the expected result."""
    routed = d.dispatch(*tokens(rank))
    assert (d.combine(routed.x, routed) == K * (1.0 + rank)).all()


def other_order(rank: int, transport: str) -> None:
    """Two dispatchers of equal settings."""
    first, second = dispatcher(transport), dispatcher(transport)
    fits(first, rank)
    fits(second, rank)
    for d in (second, first) if rank == RANKS - 1 else (first, second):
        d.dispatch(*tokens(rank))


def other_call(rank: int, transport: str) -> None:
    d = dispatcher(transport)
    fits(d, rank)
    routed = d.dispatch(*tokens(rank))
    if rank == RANKS - 1:
        d.combine(routed.x, routed)
    else:
        d.dispatch(*tokens(rank))


def other_order_of_starts(rank: int, transport: str) -> None:
    first, second = dispatcher(transport), dispatcher(transport)
    for d in (second, first) if rank == RANKS - 1 else (first, second):
        d.dispatch_start(*tokens(rank))
    first.dispatch(*tokens(rank))


def other_start(rank: int, transport: str) -> None:
    d = dispatcher(transport)
    routed = d.dispatch(*tokens(rank))
    starts = d.combine_start(routed.x, routed) if rank == RANKS - 1 else d.dispatch_start(*tokens(rank))
    starts.finish()


def other_max_tokens(rank: int, transport: str) -> None:
    dispatcher(transport, max_tokens=4 + (rank == 1)).dispatch(*tokens(rank))


def other_expert_capacity(rank: int, transport: str) -> None:
    """Chunks have other sizes than their receivers expect."""
    d = dispatcher(transport, expert_capacity=1 if rank == 1 else 3, overflow="drop")
    d.dispatch(*tokens(rank))


def larger_rows(rank: int, transport: str, others: Callable[[], object]) -> None:
    """One rank dispatches 1.5 MiB to the first, which makes another call, as all others do: gloo ends a process whose
    buffer is smaller than what it gets."""
    d, wide = dispatcher(transport, hidden=1 << 16), torch.ones(3, 1 << 16)
    given = wide, torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    d.dispatch(*given)
    others()
    d.dispatch(*given) if rank == 1 else others()


def larger_rows_than_in_a_dispatch(rank: int, transport: str) -> None:
    few = dispatcher(transport)
    larger_rows(rank, transport, lambda: few.dispatch(*tokens(rank)))


def larger_rows_than_in_a_redistribution(rank: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    x = DTensor.from_local(torch.full((2, 8), float(rank)), mesh, [Shard(0)], run_check=False)
    larger_rows(rank, transport, lambda: redistribute(x, [Shard(1)], transport=transport))


def one_without_gradients(rank: int, d: TokenDispatcher) -> RoutedTokens:
    """Dispatch weights that require gradients, on one rank without recording them."""
    x, ids, weights = tokens(rank)
    with torch.set_grad_enabled(rank != 1):
        return d.dispatch(x, ids, weights.requires_grad_())


def refused_combine(rank: int, transport: str) -> None:
    d = dispatcher(transport)
    routed = one_without_gradients(rank, d)
    d.combine(routed.x, routed)


def refused_combine_start(rank: int, transport: str) -> None:
    """The start raises, not `finish`."""
    d = dispatcher(transport)
    routed = one_without_gradients(rank, d)
    pending = d.combine_start(routed.x, routed)
    assert rank != 1
    pending.finish()


def refused_to_be_made(rank: int, transport: str) -> None:
    """One rank makes no dispatcher, since its settings are not allowed."""
    d = dispatcher(transport)
    fits(d, rank)
    dispatcher(transport, hidden=0 if rank == 1 else H).dispatch(*tokens(rank))


def refused_mesh(rank: int, transport: str) -> None:
    d = dispatcher(transport)
    fits(d, rank)
    mesh = init_device_mesh("cpu", (2, 2))
    dispatcher(transport, group_or_mesh=mesh if rank == 1 else None).dispatch(*tokens(rank))


def refused_to_be_made_by_all(rank: int, transport: str) -> str:
    """The transport remains usable."""
    for given, error in (({"hidden": 0}, ArgumentError), ({"device": "meta"}, UnsupportedError)):
        with pytest.raises(error):
            dispatcher(transport, **given)
        fits(dispatcher(transport), rank)
    return "went on"


def refused_by_all(rank: int, transport: str) -> str:
    """The transport remains usable."""
    d = dispatcher(transport)
    for _ in range(3):
        for call in (lambda: d.dispatch(torch.zeros(9, H), *tokens(rank)[1:]), lambda: d.combine(torch.zeros(1), None)):
            with pytest.raises(ArgumentError):
                call()
        fits(d, rank)
    return "went on"


def disagreed(outcomes: list[str]) -> bool:
    # The rank that ends first closes its connections.
    return set(outcomes) <= {"DisagreementError", "PeerError", "TransportError"} and "DisagreementError" in outcomes


def one_refused(outcomes: list[str]) -> bool:
    return outcomes.pop(1) == "ArgumentError" and disagreed(outcomes)


def went_on(outcomes: list[str]) -> bool:
    return outcomes == ["went on"] * RANKS


CASES: dict[Callable, Callable[[list[str]], bool]] = {
    **dict.fromkeys([other_order, other_call, other_order_of_starts, other_start], disagreed),
    **dict.fromkeys([other_max_tokens, other_expert_capacity], disagreed),
    **dict.fromkeys([larger_rows_than_in_a_dispatch, larger_rows_than_in_a_redistribution], disagreed),
    **dict.fromkeys([refused_to_be_made, refused_mesh], one_refused),
    **dict.fromkeys([refused_combine, refused_combine_start], lambda outcomes: outcomes.pop(1) == "ArgumentError"),
    **dict.fromkeys([refused_to_be_made_by_all, refused_by_all], went_on),
}


def every_case(rank: int, transport: str) -> list[str]:
    """Return each rank's outcome; a failed transport is destroyed with its process group."""
    store, results = dist.distributed_c10d._get_default_store(), []
    for i, case in enumerate(CASES):
        dist.destroy_process_group()
        options = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", store=dist.PrefixStore(f"case/{i}", store), **options)
        try:
            results.append(case(rank, transport) or "nothing")
        except (ArgumentError, TransportError) as error:
            results.append(type(error).__name__)
        # Wait for all ranks, so that closing connections do not affect the next case.
        store.set(f"ended/{i}/{rank}", "")
        store.wait([f"ended/{i}/{other}" for other in range(RANKS)])
    return results


@pytest.mark.multi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_disagreement_is_raised(transport):
    environment = {"SHARDWEAVE_TIMEOUT": "40"} | ({"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {})
    by_rank = run_ranks(every_case, RANKS, transport, environment=environment)
    for case, outcomes in zip(CASES, map(list, zip(*by_rank, strict=True)), strict=True):
        assert CASES[case](outcomes.copy()), f"{case.__name__}: {outcomes}"
