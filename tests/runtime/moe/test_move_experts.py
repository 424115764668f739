"""move_experts and sum_replicas: results before and after, weights, gradients of replicas, refused arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, dense, expert, matrices_of, tokens_of
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import shardweave
from shardweave.errors import ArgumentError, DisagreementError, PeerError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.move_experts import move_experts, sum_replicas

EXPERTS, HIDDEN, K = 6, 8, 3
COUNTS = [9, 0, 4, 7]
MAPS = [
    [[0, 1], [2, 3], [4, 5], [0, 2]],
    [[5, 0], [0, 4], [3, 0], [1, 2]],  # experts travel, move within a rank, get and lose replicas
    [[5, 0], [4, 0], [3, 2], [1, 2]],
]


def made(transport: str | None, expert_map, **more) -> TokenDispatcher:
    sizes = {"num_experts": EXPERTS, "top_k": K, "hidden": HIDDEN, "max_tokens": 9, "dtype": torch.float32}
    return TokenDispatcher(**with_options(transport=transport, expert_map=expert_map, **sizes, **more))


def tokens(seed: int) -> list[Tokens]:
    size = dist.get_world_size()
    return [tokens_of(r, COUNTS[r], K, EXPERTS, HIDDEN, torch.float32, "holes", seed) for r in range(size)]


def in_stated_order(t: Tokens, rank: int, expert_map, factors: torch.Tensor) -> torch.Tensor:
    """The sum over ranks ascending of the sums over k, in float32, of experts that multiply by a factor."""
    chosen = {}
    for e in range(EXPERTS):
        replicas = [r for r, held in enumerate(expert_map) if e in held]
        chosen[e] = rank if rank in replicas else replicas[rank % len(replicas)]
    y = torch.zeros_like(t.x)
    for i, (ids, weights) in enumerate(zip(t.ids.tolist(), t.weights, strict=True)):
        for r in range(len(expert_map)):
            parts = [w * (t.x[i] * factors[e]) for e, w in zip(ids, weights, strict=True) if e >= 0 and chosen[e] == r]
            if parts:
                total = torch.zeros(HIDDEN)
                for part in parts:
                    total = total + part
                y[i] = y[i] + total
    return y


def same_bits_after_moves(rank: int) -> None:
    for transport in (None, "process_group", "symmetric_memory"):
        dispatcher = made(transport, MAPS[0])
        factors = torch.arange(1.0, EXPERTS + 1) / 3
        state = torch.arange(EXPERTS, dtype=torch.int8)[:, None].expand(-1, 5)
        held = [factors[MAPS[0][rank]], state[MAPS[0][rank]].t().contiguous().t()]
        for step, expert_map in enumerate([*MAPS, MAPS[2], MAPS[0]] if transport is None else MAPS[:2]):
            if step:
                move_experts(dispatcher, expert_map, held)
            assert torch.equal(held[0], factors[expert_map[rank]]) and torch.equal(held[1], state[expert_map[rank]])
            t = tokens(step)[rank]
            routed = dispatcher.dispatch(t.x, t.ids, t.weights)
            group = torch.bucketize(torch.arange(len(routed.x)), routed.offsets, right=True).clamp(max=1)
            y = dispatcher.combine(routed.x * held[0][group][:, None], routed)
            assert torch.equal(y, in_stated_order(t, rank, expert_map, factors)), (transport, step)
            counts = torch.stack([torch.bincount(o.ids[o.ids >= 0], minlength=EXPERTS) for o in tokens(step)])
            assert torch.equal(routed.load().per_source, counts)
        dispatcher.check()


@pytest.mark.multi
def test_results_are_in_the_stated_order_after_moves():
    run_ranks(same_bits_after_moves, 4)


def moved_while_a_dispatch_is_in_flight(rank: int) -> None:
    """Neither move has anything to send."""
    first = [[0, 1, 2], [3, 4, 5]]
    dispatcher = made(None, first)
    t = tokens(1)[rank]
    want = t.x * (t.weights * (t.ids >= 0)).sum(1, keepdim=True)
    store = dist.distributed_c10d._get_default_store()
    for step, expert_map in enumerate((first[::-1], first)):
        if rank:  # so that the dispatch of rank 0 is in flight
            store.wait([f"started {step}"])
        pending = dispatcher.dispatch_start(t.x, t.ids, t.weights)
        if not rank:
            store.set(f"started {step}", "")
        move_experts(dispatcher, expert_map)
        routed = pending.finish()
        assert_near(dispatcher.combine(routed.x, routed), want, torch.float32, f"y at step {step}")


@pytest.mark.multi
def test_move_waits_for_calls_in_flight():
    run_ranks(moved_while_a_dispatch_is_in_flight, 2)


def moved_within_one_or_two_ranks(rank: int) -> None:
    size = dist.get_world_size()
    first = [list(range(r, EXPERTS, size)) for r in range(size)]
    second = [held[::-1] for held in first[::-1]]
    dispatcher = made(None, first)
    weights = matrices_of(EXPERTS, HIDDEN, torch.bfloat16)
    held = weights[first[rank]]
    move_experts(dispatcher, second, [held])
    assert torch.equal(held, weights[second[rank]])
    # A dispatch before a move may be combined after it.
    t = tokens(1)[rank]
    routed = dispatcher.dispatch(t.x, t.ids, t.weights)
    move_experts(dispatcher, first)
    want = t.x * (t.weights * (t.ids >= 0)).sum(1, keepdim=True)
    assert_near(dispatcher.combine(routed.x, routed), want, torch.float32, "y")
    dispatcher.check()


@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 2])
def test_moves_on_few_ranks(size):
    run_ranks(moved_within_one_or_two_ranks, size)


def train_step(dispatcher: TokenDispatcher, own: torch.Tensor, t: Tokens) -> dict[str, torch.Tensor]:
    x, weights, m = (v.detach().clone().requires_grad_() for v in (t.x, t.weights, own))
    routed = dispatcher.dispatch(x, t.ids, weights)
    at = [0, *routed.offsets.tolist()]
    parts = [expert(routed.x[a:b], w) for a, b, w in zip(at, at[1:], m, strict=False)]
    rest = routed.x.new_full((len(routed.x) - at[-1], HIDDEN), float("nan"))
    y = dispatcher.combine(torch.cat([*parts, rest]), routed)
    y.backward(t.gradient)
    assert m.grad is not None
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "matrices": m.grad}


def replicas_train(rank: int) -> None:
    matrices = matrices_of(EXPERTS, HIDDEN, torch.float32)
    for transport in (None, "process_group"):
        dispatcher, own = made(transport, MAPS[0]), matrices[MAPS[0][rank]].clone()
        for step, expert_map in enumerate(MAPS[:2]):
            if step:
                move_experts(dispatcher, expert_map, [own])
            everyone = tokens(10 + step)
            got, want = train_step(dispatcher, own, everyone[rank]), dense(everyone[rank], matrices)
            for name in ("y", "x", "weights"):
                assert_near(got[name], want[name], torch.float32, f"{name} at step {step}")
            total = sum(dense(t, matrices)["matrices"] for t in everyone)
            for again in range(2):  # the second is bound already
                gradient = got["matrices"].clone()
                sum_replicas(dispatcher, [gradient, gradient[:, 0, 0].contiguous()])
                assert_near(gradient, total[expert_map[rank]], torch.float32, f"matrices at step {step}, {again}")
            every = [torch.empty_like(gradient) for _ in range(4)]
            dist.all_gather(every, gradient)
            for e in range(EXPERTS):
                same = [every[r][held.index(e)] for r, held in enumerate(expert_map) if e in held]
                assert all(torch.equal(same[0], other) for other in same)


@pytest.mark.multi
def test_gradients_of_replicas():
    run_ranks(replicas_train, 4)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 9.0))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        group = torch.bucketize(torch.arange(len(x)), offsets, right=True).clamp(max=len(offsets) - 1)
        return x * self.scale.to_local()[group][:, None]


def refused_and_disagreed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    style = shardweave.moe.ExpertParallel(top_k=1, hidden=4, max_tokens=8, dtype=torch.float32)
    module = parallelize_module(Scale(), mesh, style)
    dispatcher = module.token_dispatcher
    ids, x = torch.arange(8)[:, None], torch.ones(8, 4)
    assert torch.equal(module(x, ids, torch.ones(8, 1)), x * (ids + 1))
    # DTensors are moved as well; they stay in order of physical experts.
    order = [[7, 2, 4, 0], [1, 5, 6, 3]]
    move_experts(dispatcher, order, [module.scale])
    assert torch.equal(module.scale.to_local(), torch.tensor(order[rank]) + 1.0)
    assert torch.equal(module(x, ids, torch.ones(8, 1)), x * (ids + 1))

    rows, taken = torch.zeros(4, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]
    for expert_map, tensors, text in (
        ([[0, 1, 2], [3, 4, 5, 6, 7]], [rows], r"expert_map: \[3, 5\] experts on the ranks; allowed: .*\[4, 4\]"),
        ([[0, 1, 2, 3], [4, 5, 6, 6]], [rows], r"expert_map: no rank has experts \[7\]"),
        (None, [rows], "expert_map: None; allowed: the experts of each rank"),
        (taken, rows, "tensors: Tensor; allowed: a list of tensors"),
        (taken, [rows[:3]], r"tensors\[0\]: shape \(3, 2\); allowed: 4 rows"),
        (taken, [rows, torch.zeros(())], r"tensors\[1\]: shape \(\); allowed: 4 rows"),
        (taken, [rows, 3], r"tensors\[1\]: 3; allowed: 4 rows"),
        (taken, [rows.to("meta")], r"tensors\[0\]: device meta; allowed"),
    ):
        with pytest.raises(ArgumentError, match=text):
            move_experts(dispatcher, expert_map, tensors)
    with pytest.raises(ArgumentError, match="dispatcher: None; allowed: a TokenDispatcher"):
        move_experts(None, taken, [rows])
    with pytest.raises(ArgumentError, match=r"tensors\[0\]: 1; allowed: 4 rows"):
        sum_replicas(dispatcher, [1])
    sum_replicas(dispatcher, [rows])  # without replicas nothing is sent
    assert torch.equal(module(x, ids, torch.ones(8, 1)), x * (ids + 1))  # the ranks all refused: nothing has changed
    # Ranks that pass different maps fail, at once or in the next dispatch.
    with pytest.raises((DisagreementError, PeerError)):
        move_experts(dispatcher, taken if rank else taken[::-1], [module.scale])
        module(x, ids, torch.ones(8, 1))


@pytest.mark.multi
def test_dtensors_and_refused_arguments():
    run_ranks(refused_and_disagreed, 2)
