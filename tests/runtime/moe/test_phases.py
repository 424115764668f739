"""Dispatch and combine in two phases: bits of the calls in one phase, order, failures, calls that are dropped."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import matrices_of, run_experts, tokens_of
from rank_processes import end_ranks, run_ranks
from test_processes import SETTINGS, E, H, K, given, leaf, poisoned, raw, virtual_rounds
from test_threads import in_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError, CapacityError, TransportError, UnsupportedError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

TRANSPORTS = ("shared_memory", "process_group", "hierarchical", "symmetric_memory")
ROUNDS = 3


def phased_rounds(rank: int, transport: str | None, **more: Any) -> list[bytes]:
    """`test_processes.rounds_of` with the rounds in flight together: a dispatch in inference mode, then others."""
    d = TokenDispatcher(**with_options(**SETTINGS, **more, transport=transport))
    low, high = d.config.bounds[rank : rank + 2]
    with torch.inference_mode():
        t = given(rank, 0)
        routed = d.dispatch_start(t.x, t.ids, t.weights).finish()
        out = torch.full_like(t.x, float("nan"))
        combined = d.combine_start(routed.x.clone(), routed, out=out).finish()
        assert combined is out
        collected = [raw(out)]
    tokens = [given(rank, i) for i in range(ROUNDS)]
    xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
    experts = [leaf(matrices_of(E, H, torch.bfloat16)[low:high]) for _ in tokens]
    started = [d.dispatch_start(x, t.ids, w) for x, t, w in zip(xs, tokens, weights, strict=True)]
    combines = []
    for pending, x, t, w, own in zip(started, xs, tokens, weights, experts, strict=True):
        routed = pending.finish()
        assert pending.finish() is routed
        with torch.no_grad():  # later arguments in the same memory
            for argument in (t.ids, w) if d.config.save == "redispatch" else (x, t.ids, w):
                argument.zero_()
        with routed.kept():
            output = run_experts(routed, list(own), True)
        combines.append(d.combine_start(output, routed))
    ys = [pending.finish() for pending in combines]
    torch.autograd.backward(ys, [t.gradient for t in tokens])
    for y, x, w, own in zip(ys, xs, weights, experts, strict=True):
        collected += [raw(y), raw(x.grad), raw(w.grad), raw(torch.zeros_like(own) if own.grad is None else own.grad)]
    d.check()
    return collected


def each_transport(rank: int) -> list[list[bytes]]:
    torch.set_num_threads(1)
    poisoned()
    collected = []
    for transport in TRANSPORTS:
        collected.append(phased_rounds(rank, transport))
        for more in ({"chunk_capacity": 12 * K}, {"save": "copy"}, {"save": "redispatch"}):
            assert phased_rounds(rank, transport, **more) == collected[-1], (transport, more)
    return collected


@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 4])
def test_phases_equal_one_phase(size):
    by_rank, want = run_ranks(each_transport, size), virtual_rounds(size)
    for rank, of_transports in enumerate(by_rank):
        for transport, rounds in zip(TRANSPORTS, of_transports, strict=True):
            assert rounds == want[rank], f"rank {rank}, {transport}"


def on_each_level(rank: int) -> list[list[bytes]]:
    torch.set_num_threads(1)
    poisoned()
    transports = ("hierarchical", False), ("hierarchical", True), ("process_group", True)
    found = [phased_rounds(rank, transport, two_level=two_level) for transport, two_level in transports]
    return [*found, phased_rounds(rank, "symmetric_memory", two_level=True, chunk_capacity=1 << 20)]


@pytest.mark.multi
def test_phases_between_nodes():
    by_rank = run_ranks(on_each_level, 4, environment={"SHARDWEAVE_NODE_SIZE": "2"})
    want = virtual_rounds(4, nodes=[0, 0, 1, 1])
    for rank, levels in enumerate(by_rank):
        for level, rounds in enumerate(levels):
            assert rounds == want[rank], f"rank {rank}, case {level}"


def test_phases_are_not_for_graphs_of_torch_compile(monkeypatch):
    d = VirtualTokenDispatcher(1, **with_options(**SETTINGS))
    t = tokens_of(0, 4, K, E, H, torch.bfloat16, "holes")
    routed = d.dispatch([t.x], [t.ids], [t.weights])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match="dispatch_start in a graph of torch.compile; allowed: dispatch"):
        d.dispatch_start([t.x], [t.ids], [t.weights])
    with pytest.raises(UnsupportedError, match="combine_start in a graph of torch.compile; allowed: combine"):
        d.combine_start([routed[0].x], routed)


def test_finish_on_several_threads():
    d = VirtualTokenDispatcher(1, **with_options(**SETTINGS))
    t = tokens_of(0, 4, K, E, H, torch.bfloat16, "holes")
    started = d.dispatch_start([t.x], [t.ids], [t.weights])
    results = in_threads(*[started.finish] * 4)
    assert all(result is results[0] for result in results)


def small(transport: str, **more: Any) -> TokenDispatcher:
    settings = {"num_experts": 4, "top_k": 1, "hidden": 8, "max_tokens": 4, "dtype": torch.float32}
    return TokenDispatcher(**with_options(**settings | more, transport=transport))


def of_value(value: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((4, 8), value), torch.tensor([[0], [1], [2], [3]]), torch.ones(4, 1)


def returned(d: TokenDispatcher, routed: shardweave.moe.RoutedTokens) -> float:
    y = d.combine(routed.x, routed)
    assert (y == y[0, 0]).all()
    return float(y[0, 0])


def start_waits_for_nobody(rank: int, transport: str) -> None:
    """Rank 0 starts and goes on before its peers start."""
    d, store = small(transport), dist.distributed_c10d._get_default_store()
    d.dispatch(*of_value(0.0))
    for i in range(2):
        if rank:
            store.wait([f"{transport} started {i}"])
        pending = d.dispatch_start(*of_value(1.0 + rank))
        other = d.dispatch_start(*of_value(5.0 + rank))
        if rank == 0:
            store.set(f"{transport} started {i}", "")
        routed = pending.finish()
        combining = d.combine_start(routed.x, routed)
        assert returned(d, other.finish()) == 5.0 + rank  # waits for the combine in flight
        assert (combining.finish() == 1.0 + rank).all()


def other_calls_between(rank: int, transport: str) -> None:
    """Calls in one phase, of the same and of another dispatcher, and a redistribution."""
    d, other = small(transport), small(transport)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(8 * size)).view(size, 8)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    pending = d.dispatch_start(*of_value(1.0 + rank))
    moved = shardweave.redistribute(shard, [Replicate()], transport=transport)
    assert torch.equal(moved.to_local(), whole)
    theirs = other.dispatch_start(*of_value(2.0 + rank))
    assert returned(d, d.dispatch(*of_value(3.0 + rank))) == 3.0 + rank
    later = shardweave.redistribute(shard, [Replicate()], transport=transport, async_op=True)
    assert returned(d, pending.finish()) == 1.0 + rank
    assert torch.equal(later.full_tensor(), whole)
    assert returned(other, theirs.finish()) == 2.0 + rank
    third = small(transport)  # constructed, and exchanged with, while a call is in flight
    pending = d.dispatch_start(*of_value(7.0 + rank))
    fourth = small(transport)
    assert returned(third, third.dispatch(*of_value(8.0 + rank))) == 8.0 + rank
    assert returned(fourth, fourth.dispatch(*of_value(9.0 + rank))) == 9.0 + rank
    assert returned(d, pending.finish()) == 7.0 + rank


def collectives_between(rank: int, transport: str) -> None:
    """The program's own collectives of the same process group, in the meantime, in an order that differs by rank."""
    d, size = small(transport), dist.get_world_size()
    for i in range(10):
        pending = d.dispatch_start(*of_value(1.0 + rank))
        if rank % 2:
            time.sleep(0.002)
        total = torch.full((5,), 1.0 + rank + i)
        dist.all_reduce(total)
        assert (total == sum(1.0 + r + i for r in range(size))).all()
        received = torch.empty(size)
        dist.all_to_all_single(received, torch.full((size,), float(rank)))
        assert received.tolist() == list(range(size))
        routed = pending.finish()
        combining = d.combine_start(routed.x, routed)
        dist.all_reduce(total)
        assert (combining.finish() == 1.0 + rank).all()


def phases_on_one_rank(rank: int, transport: str) -> None:
    """One rank dispatches in two phases, the other in one."""
    d = small(transport)
    d.dispatch(*of_value(1.0))
    routed = d.dispatch_start(*of_value(2.0)).finish() if rank else d.dispatch(*of_value(2.0))
    assert returned(d, routed) == 2.0


def dropped(rank: int, transport: str) -> None:
    d = small(transport, capacity=1)
    fits = torch.tensor([[rank * 4 // dist.get_world_size()], [-1], [-1], [-1]])  # an expert of this rank
    for _ in range(4):
        d.dispatch_start(of_value(1.0)[0], fits, torch.ones(4, 1))
    gc.collect()
    routed = d.dispatch(of_value(3.0 + rank)[0], fits, torch.ones(4, 1))
    assert float(d.combine(routed.x, routed)[0, 0]) == 3.0 + rank
    d.check()
    d.dispatch_start(*of_value(1.0))
    with pytest.raises(CapacityError, match="dispatch 5"):  # nothing is lost
        d.check()
    d.check()
    d.dispatch_start(*of_value(1.0))
    d.dispatch(of_value(0.0)[0], fits, torch.ones(4, 1))
    with pytest.raises(CapacityError, match="dispatch 6"):
        d.dispatch_start(*of_value(1.0))


def out_of_order(rank: int, transport: str) -> None:
    d = small(transport)
    pending = [d.dispatch_start(*of_value(value + rank)) for value in (1.0, 2.0, 3.0)]
    with pytest.raises(ArgumentError, match=r"finish: of dispatch \(started call 2 .*before dispatch \(started call 1"):
        pending[1].finish()
    assert returned(d, pending[0].finish()) == 1.0 + rank
    del pending[1]  # a dropped one does not count
    assert returned(d, pending[1].finish()) == 3.0 + rank


def refused(rank: int, transport: str) -> None:
    d = small(transport)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="x: "):
            d.dispatch_start(torch.zeros(9, 8), *of_value(0.0)[1:])
        assert returned(d, d.dispatch_start(*of_value(1.0 + rank)).finish()) == 1.0 + rank
    x, ids, weights = of_value(1.0 + rank)
    distributed = distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
    with pytest.raises(ArgumentError, match=r"x: a DTensor; allowed: a local tensor, as x.to_local\(\) returns"):
        d.dispatch(distributed, ids, weights)
    with pytest.raises(ArgumentError, match="routed: "):
        d.combine_start(torch.zeros(1), None)  # type: ignore[arg-type]
    assert returned(d, d.dispatch(*of_value(1.0 + rank))) == 1.0 + rank


def every_use(rank: int) -> None:
    for transport in TRANSPORTS:
        for use in (start_waits_for_nobody, other_calls_between, collectives_between, dropped, out_of_order, refused):
            use(rank, transport)


@pytest.mark.multi
def test_calls_in_flight():
    run_ranks(every_use, 4)


@pytest.mark.multi
def test_calls_in_flight_between_nodes():
    run_ranks(hierarchical_uses, 4, environment={"SHARDWEAVE_NODE_SIZE": "2"})


def hierarchical_uses(rank: int) -> None:
    for use in (start_waits_for_nobody, other_calls_between, collectives_between, dropped, out_of_order):
        use(rank, "hierarchical")


@pytest.mark.multi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_may_dispatch_in_phases_where_others_do_not(transport):
    run_ranks(phases_on_one_rank, 2, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})


def one_ends(rank: int, transport: str) -> list[str]:
    d = small(transport)
    d.dispatch(*of_value(1.0))
    if rank == 1:
        os._exit(0)
    names = []
    pending = [d.dispatch_start(*of_value(1.0)) for _ in range(2)]
    for call in (*[p.finish for p in pending], pending[0].finish, lambda: d.dispatch(*of_value(1.0))):
        with pytest.raises(TransportError) as raised:
            call()
        names.append(type(raised.value).__name__)
    return names


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_finish_raises_if_a_peer_ends(transport):
    ends = end_ranks(one_ends, 3, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})
    for rank in (0, 2):
        assert ends[rank].value == ["PeerError"] * 4, ends[rank]
