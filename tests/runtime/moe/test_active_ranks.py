"""Ranks masked out of a dispatcher: against an oracle from ids alone; stalled and ended ranks; taken back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, dense, matrices_of, run_experts, tokens_of
from rank_processes import end_ranks, run_ranks
from test_processes import poisoned, raw

from shardweave.errors import ArgumentError, TransportError, UnsupportedError
from shardweave.moe import move_experts, sum_replicas
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher

E, K, H, T = 6, 3, 8, 7
MAPS = {
    1: [None, [[5, 4, 3, 2, 1, 0, 0]]],
    2: [None, [[0, 1, 2, 3, 0], [4, 5, 0, 3]]],
    3: [None, [[0, 1, 2, 0], [2, 3, 0], [4, 5, 1, 5]]],
    4: [None, [[0, 1, 2], [2, 3, 4], [4, 5, 0], [1, 3, 5, 0]]],
}
SETTINGS = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "dtype": torch.float32}


def experts_of(ranks: int, expert_map: Sequence[Sequence[int]] | None) -> list[list[int]]:
    if expert_map is not None:
        return [list(of) for of in expert_map]
    return [part.tolist() for part in torch.arange(E).tensor_split(ranks)]


def destination(held: list[list[int]], active: Sequence[int], rank: int, expert: int) -> tuple[int, int] | None:
    """The rank, and the number there, of the replica that serves an expert's pair of a rank's token; None: dropped."""
    if expert < 0:
        return None
    replicas = [(r, i) for r in active for i, e in enumerate(held[r]) if e == expert]
    own = [replica for replica in replicas if replica[0] == rank]
    return own[0] if own else replicas[rank % len(replicas)] if replicas else None


def check_virtual(d: VirtualTokenDispatcher, active: Sequence[int], held: list[list[int]], seed: int) -> None:
    """Everything that the dispatcher counts and returns, from ids alone."""
    tokens = {
        rank: tokens_of(rank, (3 * rank + seed) % (T + 1), K, E, H, torch.float32, "holes", seed) for rank in active
    }
    matrices, of_experts = matrices_of(E, H, torch.float32), matrices_of(E, H, torch.float32).requires_grad_()
    served: dict[tuple[int, int], int] = {}
    masked, kept = 0, {}
    per_source = torch.zeros(len(held), E, dtype=torch.int64)
    for rank, t in tokens.items():
        kept[rank] = torch.zeros(t.ids.shape, dtype=torch.bool)
        for i, expert in enumerate(t.ids.flatten().tolist()):
            place = destination(held, active, rank, expert)
            kept[rank].view(-1)[i] = place is not None
            masked += expert >= 0 and place is None
            per_source[rank, max(expert, 0)] += expert >= 0
            if place is not None:
                served[place] = served.get(place, 0) + 1
    xs = [t.x.clone().requires_grad_() for t in tokens.values()]
    weights = [t.weights.clone().requires_grad_() for t in tokens.values()]
    routed = d.dispatch(xs, [t.ids for t in tokens.values()], weights)
    outputs = []
    for rank, r in zip(active, routed, strict=True):
        assert (int(r.masked), int(r.dropped), int(r.bad_ids)) == (masked, 0, 0)
        assert r.counts.tolist() == [served.get((rank, i), 0) for i in range(len(held[rank]))]
        assert int(r.num_rows) == sum(r.counts.tolist())
        assert torch.equal(r.load().per_source, per_source)
        outputs.append(run_experts(r, [of_experts[e] for e in held[rank]], True))
    ys = d.combine(outputs, routed)
    torch.autograd.backward(ys, [t.gradient for t in tokens.values()])
    of_all = torch.zeros_like(matrices, dtype=torch.float64)
    for (rank, t), y, x, w in zip(tokens.items(), ys, xs, weights, strict=True):
        exact = dense(t, matrices, kept[rank])
        of_all += exact["matrices"]
        for name, got in (("y", y.detach()), ("x", x.grad), ("weights", w.grad)):
            assert got is not None
            assert_near(got, exact[name], torch.float32, f"{name} of rank {rank}, active {active}")
    grad = torch.zeros_like(matrices) if of_experts.grad is None else of_experts.grad
    assert_near(grad, of_all, torch.float32, f"matrices, active {active}")


def subsets(ranks: int) -> list[list[int]]:
    return [[r for r in range(ranks) if bits >> r & 1] for bits in range(1, 1 << ranks)]


@pytest.mark.parametrize("kind", ["push", "exact chunks", "fixed chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_active_ranks_equal_oracle(ranks, kind):
    more: dict[str, Any] = {"chunk_capacity": 1 << 20} if kind == "fixed chunks" else {}
    for expert_map in MAPS[ranks]:
        d = VirtualTokenDispatcher(
            ranks, **with_options(**SETTINGS, **more, one_sided=kind == "push", expert_map=expert_map)
        )
        held = experts_of(ranks, expert_map)
        for seed, active in enumerate(subsets(ranks)):
            d.set_active_ranks(active)
            check_virtual(d, active, held, seed)
        d.set_active_ranks(None)
        check_virtual(d, range(ranks), held, 3)
        d.check()


@pytest.mark.parametrize("save", ["buffer", "copy", "redispatch"])
@pytest.mark.parametrize("layout", ["grouped", "batched"])
def test_capacity_counts_remaining_pairs(save, layout):
    """Experts 2 and 3 are on rank 1 only."""
    d = VirtualTokenDispatcher(
        3,
        **{**SETTINGS, "num_experts": 4, "top_k": 1},
        options=DispatchOptions(
            expert_map=[[0, 1], [2, 3], [0, 1]], expert_capacity=2, overflow="drop", save=save, layout=layout, align=2
        ),
    )
    d.set_active_ranks([0, 2])
    ids = [torch.tensor([[0], [0], [0], [1], [2], [3], [-1]])] * 2
    xs = [torch.full((T, H), 1.0 + i) for i in range(2)]
    routed = d.dispatch(xs, ids, [torch.ones(T, 1)] * 2)
    for r in routed:
        assert (int(r.masked), int(r.dropped)) == (4, 2)  # each sends to its own replica
        assert r.counts.tolist() == [2, 1]
    ys = d.combine([r.x.clone() for r in routed], routed)
    for i, y in enumerate(ys):
        assert y[:, 0].tolist() == [1.0 + i, 1.0 + i, 0, 1.0 + i, 0, 0, 0]


def test_arguments_are_checked():
    d = VirtualTokenDispatcher(2, **SETTINGS)
    for ranks, text in (([], "at least one rank"), ([0, 2], "whole number, 0 to 1"), ([0, 0], "each rank once")):
        with pytest.raises(ArgumentError, match=text):
            d.set_active_ranks(ranks)
    t = tokens_of(0, 3, K, E, H, torch.float32, "uniform")
    routed = d.dispatch([t.x] * 2, [t.ids] * 2, [t.weights] * 2)
    x = t.x.clone().requires_grad_()
    of_all = d.dispatch([x] * 2, [t.ids] * 2, [t.weights] * 2)
    pending = d.combine_start([r.x for r in routed], routed)
    d.set_active_ranks([1])
    with pytest.raises(UnsupportedError, match="finish of a combine.* after set_active_ranks; allowed: before it"):
        pending.finish()
    with pytest.raises(ArgumentError, match="output_buffer: of rank 0, which is not active"):
        routed[0].output_buffer()
    with pytest.raises(ArgumentError, match=r"active ranks all; allowed: .*\[1\]"):
        d.combine([routed[1].x], routed[1:])
    with pytest.raises(UnsupportedError, match="backward after set_active_ranks"):
        of_all[0].x.sum().backward()
    with pytest.raises(UnsupportedError, match="two_level"):
        VirtualTokenDispatcher(
            2, **SETTINGS, one_sided=False, nodes=[0, 1], options=DispatchOptions(two_level=True)
        ).set_active_ranks([0])


def given(rank: int, i: int) -> Tokens:
    return tokens_of(rank, (5 * rank + 3 * i) % (T + 1), K, E, H, torch.float32, "holes", i)


def layer(d: TokenDispatcher, rank: int, i: int) -> bytes:
    t = given(rank, i)
    held = experts_of(d.config.ranks, MAPS[d.config.ranks][1])[rank]
    pending = d.dispatch_start(t.x, t.ids, t.weights) if i % 2 else None
    routed = pending.finish() if pending else d.dispatch(t.x, t.ids, t.weights)
    y = d.combine(run_experts(routed, [matrices_of(E, H, torch.float32)[e] for e in held], True), routed)
    return raw(y) + bytes([int(routed.masked)])


def virtual_layers(size: int, masks: Sequence[Sequence[int] | None], nodes: Sequence[int] | None) -> list[list[bytes]]:
    d = VirtualTokenDispatcher(
        size, **SETTINGS, one_sided=nodes is None, nodes=nodes, options=DispatchOptions(expert_map=MAPS[size][1])
    )
    found: list[list[bytes]] = [[] for _ in range(size)]
    held = experts_of(size, MAPS[size][1])
    for i, mask in enumerate(masks):
        d.set_active_ranks(mask)
        active = list(range(size)) if mask is None else mask
        tokens = [given(rank, i) for rank in active]
        routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
        matrices = matrices_of(E, H, torch.float32)
        ys = d.combine(
            [run_experts(r, [matrices[e] for e in held[a]], True) for a, r in zip(active, routed, strict=True)], routed
        )
        for rank, y, r in zip(active, ys, routed, strict=True):
            found[rank].append(raw(y) + bytes([int(r.masked)]))
    return found


def masks_of(size: int) -> list[Sequence[int] | None]:
    last = size - 1
    return [None, [0], None, list(range(size - 1)), [0, last] if size > 2 else [0], [last], None, range(size)]


def masked_in_turn(rank: int, transport: str, **more: Any) -> list[bytes]:
    """A rank that is masked out does nothing at all until it is taken back: it waits in the store meanwhile."""
    store = dist.distributed_c10d._get_default_store()
    d = TokenDispatcher(
        **with_options(**SETTINGS, **more, transport=transport, expert_map=MAPS[dist.get_world_size()][1])
    )
    name, found = f"{transport} {more} done", []
    for i, mask in enumerate(masks_of(dist.get_world_size())):
        if mask is not None and rank not in mask:
            store.wait([f"{name} {i} {r}" for r in mask])
            continue
        d.set_active_ranks(mask)
        found.append(layer(d, rank, i))
        store.set(f"{name} {i} {rank}", "")
    d.check()
    return found


def on_each_transport(rank: int) -> list[list[bytes]]:
    torch.set_num_threads(1)
    poisoned()
    found = [masked_in_turn(rank, t) for t in ("shared_memory", "process_group", "hierarchical")]
    assert masked_in_turn(rank, "process_group", chunk_capacity=1 << 20) == found[1]
    return found


@pytest.mark.multi
@pytest.mark.parametrize("size", [2, 4])
def test_masked_ranks_need_not_take_part(size):
    by_rank, want = run_ranks(on_each_transport, size), virtual_layers(size, masks_of(size), None)
    for rank, of_transports in enumerate(by_rank):
        assert of_transports == [want[rank]] * 3, f"rank {rank}"


def on_each_level(rank: int) -> list[list[bytes]]:
    torch.set_num_threads(1)
    transports = ("hierarchical", False), ("hierarchical", True), ("process_group", True)
    found = [masked_in_turn(rank, transport, two_level=two_level) for transport, two_level in transports]
    return [*found, masked_in_turn(rank, "symmetric_memory", two_level=True, chunk_capacity=1 << 20)]


@pytest.mark.multi
def test_masked_ranks_between_nodes():
    by_rank = run_ranks(on_each_level, 4, environment={"SHARDWEAVE_NODE_SIZE": "2"})
    want = virtual_layers(4, masks_of(4), [0, 0, 1, 1])
    for rank, levels in enumerate(by_rank):
        assert levels == [want[rank]] * 4, f"rank {rank}"


def one_ends(rank: int, transport: str) -> list[bytes]:
    d = TokenDispatcher(**SETTINGS, transport=transport, options=DispatchOptions(expert_map=MAPS[4][1]))
    found = [layer(d, rank, 0)]
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(4)])
    if rank == 1:
        os._exit(0)
    d.set_active_ranks([0, 2, 3])
    return [*found, *[layer(d, rank, i) for i in (1, 2, 3)]]


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_calls_go_on_without_a_rank_that_ended(transport):
    ends = end_ranks(one_ends, 4, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})
    want = virtual_layers(4, [None, [0, 2, 3], [0, 2, 3], [0, 2, 3]], None)
    for rank in (0, 2, 3):
        assert ends[rank].value == want[rank], ends[rank]


def refusals(rank: int) -> None:
    for transport in ("shared_memory", "process_group"):
        d = TokenDispatcher(**SETTINGS, transport=transport, options=DispatchOptions(expert_map=MAPS[2][1]))
        t = given(rank, 1)
        with pytest.raises(ArgumentError, match="at least one rank"):
            d.set_active_ranks([])  # on all ranks, which go on
        routed = d.dispatch(t.x, t.ids, t.weights)
        pending = d.dispatch_start(t.x, t.ids, t.weights)
        d.set_active_ranks([0])
        with pytest.raises(UnsupportedError, match="finish of a dispatch after set_active_ranks"):
            pending.finish()
        if rank == 0:
            with pytest.raises(ArgumentError, match="routed: of a dispatch with the active ranks all"):
                d.combine(routed.x, routed)
        for call in (lambda d=d, t=t: d.dispatch(t.x, t.ids, t.weights), lambda d=d, r=routed: d.combine(r.x, r)):
            if rank == 1:
                with pytest.raises(UnsupportedError, match=r"rank 1 of the dispatcher is masked out; allowed: .*\[0\]"):
                    call()
        if rank == 0:
            with pytest.raises(ArgumentError, match=r"move_experts: only ranks \[0\] are active"):
                move_experts(d, MAPS[2][1], [])
            with pytest.raises(ArgumentError, match=r"sum_replicas: only ranks \[0\] are active"):
                sum_replicas(d, [])
        d.set_active_ranks([0, 1])
        layer(d, rank, 0)
    d = TokenDispatcher(**SETTINGS, transport="symmetric_memory")
    with pytest.raises(UnsupportedError, match="active ranks with symmetric_memory"):
        d.set_active_ranks([0])
    t = given(rank, 1)
    d.dispatch(t.x, t.ids, t.weights)


@pytest.mark.multi
def test_refusals():
    run_ranks(refusals, 2)


def other_lists(rank: int, transport: str) -> str:
    d = TokenDispatcher(**SETTINGS, transport=transport)
    layers = given(rank, 1)
    d.dispatch(layers.x, layers.ids, layers.weights)
    d.set_active_ranks([0, 1, 2] if rank == 0 else [0, 1])
    if rank == 2:
        d.set_active_ranks([0, 1, 2])
    with pytest.raises(TransportError) as raised:
        d.dispatch(layers.x, layers.ids, layers.weights)
    return type(raised.value).__name__


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_ranks_with_other_lists_disagree(transport):
    names = run_ranks(other_lists, 3, transport, environment={"SHARDWEAVE_TIMEOUT": "40"})
    assert "DisagreementError" in names, names


def refused_while_masked(rank: int) -> None:
    """What a masked rank passes wrongly does not concern the others."""
    d = TokenDispatcher(num_experts=2, top_k=1, hidden=8, max_tokens=4, dtype=torch.float32)
    given = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    d.dispatch(*given)
    d.set_active_ranks([0])
    if rank:
        with pytest.raises(ArgumentError):
            d.set_active_ranks([5])
    else:
        d.dispatch(*given)
    d.set_active_ranks(None)
    assert int(d.dispatch(*given).num_rows) == (0 if rank else 4)


@pytest.mark.multi
def test_refusal_of_a_masked_rank_is_its_own():
    run_ranks(refused_while_masked, 2)
