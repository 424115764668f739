"""TokenDispatcher against a dense mixture of experts in float64: results, gradients, overflow and refused arguments."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import Tokens, assert_near, dense, matrices_of, run_experts, tokens_of
from test_processes import leaf, raw
from torch.utils import _pytree

from shardweave.errors import ArgumentError, CapacityError
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.statistics import stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def virtual_moe(dispatcher: VirtualTokenDispatcher, tokens: list[Tokens], matrices: torch.Tensor, weighted=True):
    """Return y, dx, dweights of each rank and dmatrices [E, H, H], summed over the replicas of an expert."""
    experts = leaf(matrices)
    xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
    adds = [None if t.add is None else leaf(t.add) for t in tokens]
    routed = dispatcher.dispatch(xs, [t.ids for t in tokens], weights)
    outputs = []
    for rank, r in enumerate(routed):
        with r.kept():
            outputs.append(run_experts(r, [experts[e] for e in held(dispatcher, rank)], weighted))
    ys = dispatcher.combine(outputs, routed, add=adds, weighted=weighted)
    torch.autograd.backward(ys, [t.gradient for t in tokens])
    for t, add in zip(tokens, adds, strict=True):
        assert add is None or torch.equal(add.grad, t.gradient)
    return [y.detach() for y in ys], [x.grad for x in xs], [w.grad for w in weights], experts.grad, routed


def held(dispatcher, rank: int) -> list[int]:
    """The experts of a rank's physical experts."""
    config = dispatcher.config
    own = range(*config.bounds[rank : rank + 2])
    return [config.expert_of[physical] for physical in own] if config.expert_of else list(own)


def check(dispatcher, tokens, matrices, dtype, weighted=True, kept=None):
    ys, dxs, dws, dm, routed = virtual_moe(dispatcher, tokens, matrices, weighted)
    total = torch.zeros_like(matrices, dtype=torch.float64)
    for rank, t in enumerate(tokens):
        want = dense(t, matrices, None if kept is None else kept[rank])
        total += want["matrices"]
        assert_near(ys[rank], want["y"], dtype, f"y of rank {rank}")
        assert_near(dxs[rank], want["x"], dtype, f"dx of rank {rank}")
        assert_near(dws[rank], want["weights"], dtype, f"dweights of rank {rank}")
    assert_near(dm, total, dtype, "dmatrices")
    return routed


def check_two_sided(given: dict, tokens: list[Tokens], matrices: torch.Tensor, weighted=True) -> None:
    """Check that chunks of exact and of fixed sizes give the bits of rows that are pushed."""
    ranks, results = len(tokens), []
    for kind, reads in (({}, 0), ({"one_sided": False}, 1), ({"one_sided": False, "chunk_capacity": 1 << 20}, 0)):
        before = stats().host_reads["counts of a token dispatch"]
        found = virtual_moe(VirtualTokenDispatcher(ranks, **with_options(**given, **kind)), tokens, matrices, weighted)[
            :4
        ]
        results.append([[raw(x) for x in of] for of in found])
        assert stats().host_reads["counts of a token dispatch"] - before == reads * ranks
    assert results[1] == results[0] and results[2] == results[0]


GRID = [
    # ranks, tokens of each rank, K, E, H, align, dtype, routing
    (1, [5], 1, 1, 4, 1, torch.float32, "uniform"),
    (2, [6, 0], 2, 3, 8, 4, torch.float32, "holes"),
    (3, [4, 7, 1], 3, 8, 5, 8, torch.float32, "zipf"),
    (4, [9, 9, 9, 9], 8, 6, 16, 16, torch.bfloat16, "uniform"),
    (4, [3, 0, 8, 2], 5, 60, 8, 1, torch.float16, "uniform"),
    (4, [5, 5, 5, 5], 2, 8, 8, 32, torch.float32, "hot"),
    (4, [7, 0, 9, 5], 3, 16, 24, 8, torch.float32, "hot rank"),
    (2, [6, 5], 2, 5, 200, 4, torch.bfloat16, "zipf"),
    (2, [6, 5], 2, 5, 257, 1, torch.float32, "hot rank"),
    (4, [5, 5, 5, 5], 2, 8, 8, 8, torch.float32, "none"),
    (5, [0, 0, 0, 0, 0], 4, 7, 8, 8, torch.float32, "uniform"),
    (5, [4, 3, 2, 1, 0], 3, 3, 8, 1, torch.bfloat16, "zipf"),  # fewer experts than ranks
    (8, [4] * 8, 6, 256, 8, 128, torch.float32, "uniform"),
]


@pytest.mark.parametrize("ranks, counts, k, experts, hidden, align, dtype, routing", GRID, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_dispatch_and_combine_equal_dense(ranks, counts, k, experts, hidden, align, dtype, routing, weighted):
    given = {
        "num_experts": experts, "top_k": k, "hidden": hidden, "max_tokens": max(counts), "dtype": dtype, "align": align
    }  # fmt: skip
    d = VirtualTokenDispatcher(ranks, **with_options(**given))
    tokens = [tokens_of(r, n, k, experts, hidden, dtype, routing) for r, n in enumerate(counts)]
    tokens[0].add = torch.ones_like(tokens[0].x)
    routed = check(d, tokens, matrices_of(experts, hidden, dtype), dtype, weighted)
    check_two_sided(given, tokens, matrices_of(experts, hidden, dtype), weighted)
    load = routed[0].load()
    want = torch.stack([torch.cat([t.ids.flatten() for t in tokens]) == e for e in range(experts)]).sum(1)
    assert torch.equal(load.per_physical_expert, want) and torch.equal(load.per_expert, want)
    assert load.per_rank.tolist() == [int(want[a:b].sum()) for a, b in itertools.pairwise(d.config.bounds)]
    d.check()


@pytest.mark.parametrize("ranks", [16, pytest.param(64, marks=pytest.mark.long)])
def test_many_ranks(ranks):
    d = VirtualTokenDispatcher(
        ranks, num_experts=100, top_k=3, hidden=4, max_tokens=3, dtype=torch.float32, options=DispatchOptions(align=2)
    )
    tokens = [tokens_of(r, r % 4, 3, 100, 4, torch.float32, "holes") for r in range(ranks)]
    check(d, tokens, matrices_of(100, 4, torch.float32), torch.float32)


@pytest.mark.parametrize("capacity", [None, 2])
def test_load_of_replicated_experts(capacity):
    """Replicas add up, in loads and in gradients. Bad ids are not counted."""
    experts_of = [[1, 0], [3, 1], [2, 1, 0, 2]]
    d = VirtualTokenDispatcher(
        3,
        num_experts=4,
        top_k=2,
        hidden=8,
        max_tokens=9,
        dtype=torch.float32,
        options=DispatchOptions(expert_map=experts_of, expert_capacity=capacity, overflow="drop"),
    )
    tokens = [tokens_of(r, 9 - 4 * r, 2, 4, 8, torch.float32, "holes") for r in range(3)]
    if capacity is None:
        check(d, tokens, matrices_of(4, 8, torch.float32), torch.float32)
    tokens[0].ids[0, 0] = 7
    per_physical_expert, per_expert = [0] * 8, [0] * 4
    for rank, t in enumerate(tokens):
        for e in t.ids.flatten().tolist():
            if 0 <= e < 4:
                per_expert[e] += 1
                per_physical_expert[d.config.physical_expert_of[rank][e]] += 1
    assert d.config.expert_of == (1, 0, 3, 1, 2, 1, 0, 2) and min(per_expert) > 0
    # The own replica (the first), else replica r mod n.
    assert d.config.physical_expert_of == ((1, 0, 4, 2), (6, 3, 7, 2), (6, 5, 4, 2))
    with torch.inference_mode():
        loads = [r.load() for r in d.dispatch(*zip(*[(t.x, t.ids, t.weights) for t in tokens], strict=True))]
    for load in loads:
        assert load.per_physical_expert.tolist() == per_physical_expert and load.per_expert.tolist() == per_expert
        assert load.per_expert.dtype is torch.int64
        per_rank = [sum(per_physical_expert[a:b]) for a, b in itertools.pairwise(d.config.bounds)]
        assert load.per_rank.tolist() == per_rank
        assert load.imbalance.item() == pytest.approx(3 * max(per_rank) / sum(per_rank))


@pytest.mark.parametrize(
    "ranks, experts, most, capacity", [(2, 4, 6, 13), (2, 5, 6, 13), (3, 2, 6, 16), (3, 2, 6, 0), (2, 3, 0, None)]
)
def test_batched(ranks, experts, most, capacity):
    """Including ranks without experts, a capacity of 0, and no tokens."""
    given = {
        "num_experts": experts, "top_k": 2, "hidden": 8, "max_tokens": most, "dtype": torch.float32, "align": 8,
        "expert_capacity": capacity, "layout": "batched", "overflow": "drop",
    }  # fmt: skip
    d = VirtualTokenDispatcher(ranks, **with_options(**given))
    tokens = [tokens_of(r, most, 2, experts, 8, torch.float32, "uniform") for r in range(ranks)]
    matrices = matrices_of(experts, 8, torch.float32)
    kept = first_of_each_expert(tokens, experts, 0 if capacity is None else capacity)
    routed = check(d, tokens, matrices, torch.float32, kept=kept)
    check_two_sided(given, tokens, matrices)
    each = 16 if capacity else 0
    assert [r.x.shape for r in routed] == [(len(held(d, rank)), each, 8) for rank in range(ranks)]
    assert routed[0].padded_counts.tolist() == [each] * len(held(d, 0))


def first_of_each_expert(tokens: list[Tokens], experts: int, most: int) -> list[torch.Tensor]:
    """Return which pairs are among the first `most` of their expert, in order of source rank, token, k."""
    seen, collected = [0] * experts, []
    for t in tokens:
        kept = torch.zeros(t.ids.shape, dtype=torch.bool)
        for i, j in itertools.product(range(t.ids.shape[0]), range(t.ids.shape[1])):
            e = int(t.ids[i, j])
            if e >= 0:
                kept[i, j] = seen[e] < most
                seen[e] += 1
        collected.append(kept)
    return collected


@pytest.mark.parametrize("layout", ["grouped", "batched"])
@pytest.mark.parametrize("routing", ["zipf", "hot", "holes"])
def test_rows_beyond_expert_capacity_are_dropped(routing, layout):
    given = {
        "num_experts": 4, "top_k": 3, "hidden": 8, "max_tokens": 7, "dtype": torch.float32, "expert_capacity": 6,
        "overflow": "drop", "layout": layout,
    }  # fmt: skip
    d = VirtualTokenDispatcher(3, **with_options(**given))
    tokens = [tokens_of(r, 7 - 2 * r, 3, 4, 8, torch.float32, routing) for r in range(3)]
    kept = first_of_each_expert(tokens, 4, 6)
    routed = check(d, tokens, matrices_of(4, 8, torch.float32), torch.float32, kept=kept)
    check_two_sided(given, tokens, matrices_of(4, 8, torch.float32))
    lost = sum(int(((t.ids >= 0) & ~k).sum()) for t, k in zip(tokens, kept, strict=True))
    assert lost > 0 and [int(r.dropped) for r in routed] == [lost] * 3
    d.check()


def test_rows_beyond_capacity_are_dropped():
    """One expert per rank and a buffer of 8 rows."""
    d = VirtualTokenDispatcher(
        2,
        num_experts=2,
        top_k=1,
        hidden=8,
        max_tokens=20,
        dtype=torch.float32,
        options=DispatchOptions(capacity=0.35, align=4, overflow="drop"),
    )
    assert d.config.rows == 8
    tokens = [tokens_of(r, 20, 1, 2, 8, torch.float32, "uniform") for r in range(2)]
    routed = check(d, tokens, matrices_of(2, 8, torch.float32), torch.float32, kept=first_of_each_expert(tokens, 2, 8))
    assert int(routed[0].dropped) == 24 and int(routed[0].offsets[-1]) == 8


def fitting_in_chunks(tokens: list[Tokens], destination_of: list[int], most: int) -> list[torch.Tensor]:
    """Return which pairs are among the first `most` of a rank for each destination, in order of expert, token, k."""
    collected = []
    for t in tokens:
        kept = torch.zeros(t.ids.shape, dtype=torch.bool)
        seen: Counter[int] = Counter()
        for e, destination in enumerate(destination_of):
            for i, j in (t.ids == e).nonzero().tolist():
                kept[i, j] = seen[destination] < most
                seen[destination] += 1
        collected.append(kept)
    return collected


@pytest.mark.parametrize(
    "routing, layout", [("zipf", "grouped"), ("hot rank", "grouped"), ("holes", "grouped"), ("hot rank", "batched")]
)
@pytest.mark.parametrize("most, expert_capacity", [(0, None), (3, None), (4, 5), (100, 4)])
def test_rows_beyond_chunk_capacity_are_dropped(most, expert_capacity, routing, layout):
    experts, destination_of = 5, [0, 0, 1, 1, 2]
    d = VirtualTokenDispatcher(
        3,
        num_experts=experts,
        top_k=3,
        hidden=8,
        max_tokens=7,
        dtype=torch.float32,
        one_sided=False,
        options=DispatchOptions(
            overflow="drop", align=4, layout=layout, expert_capacity=expert_capacity, chunk_capacity=most
        ),
    )
    assert d.config.chunk_capacity == min(most, 21) and d.config.bounds == (0, 2, 4, 5)
    tokens = [tokens_of(r, 7 - 2 * r, 3, experts, 8, torch.float32, routing) for r in range(3)]
    there = fitting_in_chunks(tokens, destination_of, most)
    rest = [dataclasses.replace(t, ids=torch.where(k, t.ids, -1)) for t, k in zip(tokens, there, strict=True)]
    room = 99 if expert_capacity is None else expert_capacity
    limit = first_of_each_expert(rest, experts, -(-room // 4) * 4 if layout == "batched" else room)
    kept = [a & b for a, b in zip(there, limit, strict=True)]
    before = stats().host_reads.total()
    routed = check(d, tokens, matrices_of(experts, 8, torch.float32), torch.float32, kept=kept)
    lost = sum(int(((t.ids >= 0) & ~k).sum()) for t, k in zip(tokens, kept, strict=True))
    assert [int(r.dropped) for r in routed] == [lost] * 3 and stats().host_reads.total() == before
    assert lost > 0 or most == 100


def test_check_raises_for_chunk_capacity():
    d = VirtualTokenDispatcher(
        2,
        num_experts=2,
        top_k=1,
        hidden=8,
        max_tokens=8,
        dtype=torch.float32,
        one_sided=False,
        options=DispatchOptions(chunk_capacity=0.5),
    )
    assert d.config.chunk_capacity == 2
    t = tokens_of(0, 8, 1, 2, 8, torch.float32, "hot")
    d.dispatch([t.x] * 2, [t.ids] * 2, [t.weights] * 2)
    with pytest.raises(CapacityError, match="dispatch 0: 12 rows exceeded the capacity .*chunk_capacity: 2"):
        d.check()
    text = d.explain()
    assert "one chunk of fixed size per pair of ranks; no host read (chunk_capacity=2)" in text
    assert "one chunk of exact size per pair of ranks; the host reads their sizes once" in text


def lossy() -> tuple[VirtualTokenDispatcher, tuple]:
    d = VirtualTokenDispatcher(2, num_experts=4, top_k=2, hidden=4, max_tokens=3, dtype=torch.float32)
    ids = torch.tensor([[0, 4], [-2, 1], [3, -1]])
    x, w = torch.randn(3, 4), torch.rand(3, 2)
    return d, ([x, x], [ids, ids.clamp(-1, 3)], [w, w])


def test_check_raises_bad_ids_once():
    d, given = lossy()
    routed = d.dispatch(*given)
    assert [int(r.bad_ids) for r in routed] == [2, 2]
    with pytest.raises(CapacityError, match="^dispatch 0: 2 ids were outside -1 to 3, all ranks together"):
        d.check()
    d.check()


def test_second_dispatch_raises_bad_ids():
    d, given = lossy()
    good = given[0], [given[1][1]] * 2, given[2]
    d.dispatch(*given)
    d.dispatch(*good)
    with pytest.raises(CapacityError, match="dispatch 0"):
        d.dispatch(*good)
    d.dispatch(*good)
    d.check()


def test_bad_ids_act_as_minus_one():
    d, (xs, ids, ws) = lossy()
    routed = d.dispatch(xs, ids, ws)
    ys = d.combine([r.x for r in routed], routed)
    share = (ws[0] * ((ids[0] >= 0) & (ids[0] < 4))).sum(1, keepdim=True)
    torch.testing.assert_close(ys[0], xs[0] * share)


@pytest.mark.parametrize("one_sided", [True, False])
def test_routed_is_a_pytree_and_combines_repeatedly(one_sided):
    d = VirtualTokenDispatcher(
        2, num_experts=3, top_k=2, hidden=8, max_tokens=5, dtype=torch.float32, one_sided=one_sided
    )
    tokens = [tokens_of(r, 5, 2, 3, 8, torch.float32, "uniform") for r in range(2)]
    routed = d.dispatch([t.x for t in tokens], [t.ids for t in tokens], [t.weights for t in tokens])
    again = _pytree.tree_map(lambda x: x.clone(), routed)
    first = d.combine([r.x for r in routed], routed)
    out = [torch.full_like(y, 7.0) for y in first]
    d.combine([r.x for r in again], again, out=out)
    assert all(torch.equal(a, b) for a, b in zip(first, out, strict=True))
    d.combine([r.x for r in again], again, out=out, add=out)
    assert all(torch.equal(2 * a, b) for a, b in zip(first, out, strict=True))


def test_gradients_cannot_be_differentiated():
    d = VirtualTokenDispatcher(1, num_experts=3, top_k=2, hidden=8, max_tokens=5, dtype=torch.float32)
    t = tokens_of(0, 5, 2, 3, 8, torch.float32, "uniform")
    x = leaf(t.x)
    (routed,) = d.dispatch([x], [t.ids], [t.weights])
    (y,) = d.combine([routed.x * routed.x], [routed])
    (gradient,) = torch.autograd.grad(y, x, t.gradient, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_unused_rows_masked_as_documented():
    """Elementwise operations over all rows, with a parameter whose gradient sums over them."""
    d = VirtualTokenDispatcher(
        2, num_experts=3, top_k=2, hidden=8, max_tokens=9, dtype=torch.float32, options=DispatchOptions(align=4)
    )
    tokens = [tokens_of(r, 5, 2, 3, 8, torch.float32, "holes") for r in range(2)]
    scale = torch.tensor(1.5, requires_grad=True)
    xs = [leaf(t.x) for t in tokens]
    routed = d.dispatch(xs, [t.ids for t in tokens], [t.weights for t in tokens])
    outputs = []
    for r in routed:
        there = torch.arange(len(r.x))[:, None] < r.num_rows
        assert r.x[~there[:, 0]].isnan().all() and not there.all()
        outputs.append(torch.where(there, torch.where(there, r.x, 0) * scale, 0))
    torch.autograd.backward(d.combine(outputs, routed), [t.gradient for t in tokens])
    total = 0.0
    for t, x in zip(tokens, xs, strict=True):
        share = (t.weights.double() * (t.ids >= 0)).sum(1, keepdim=True)
        total += float((t.gradient.double() * t.x * share).sum())
        assert_near(x.grad, 1.5 * share * t.gradient, torch.float32, "dx")
    assert_near(scale.grad.view(1), torch.tensor([total]).double(), torch.float32, "dscale")


@pytest.mark.parametrize("align", [1, 8, 16, 32, 128])
def test_offsets_fit_grouped_mm(align):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no _grouped_mm")
    d = VirtualTokenDispatcher(2, num_experts=5, top_k=2, hidden=16, max_tokens=9, options=DispatchOptions(align=align))
    tokens = [tokens_of(r, 9, 2, 5, 16, torch.bfloat16, "uniform") for r in range(2)]
    matrices = matrices_of(5, 16, torch.bfloat16)
    for rank, r in enumerate(d.dispatch(*zip(*[(t.x, t.ids, t.weights) for t in tokens], strict=True))):
        n = int(r.num_rows)
        own = matrices[d.config.bounds[rank] : d.config.bounds[rank + 1]]
        assert all(end % align == 0 for end in r.offsets.tolist())
        got = torch._grouped_mm(r.x[:n], own.transpose(1, 2).contiguous().transpose(1, 2), offs=r.offsets)
        at = 0
        for matrix, count, padded in zip(own, r.counts.tolist(), r.padded_counts.tolist(), strict=True):
            torch.testing.assert_close(got[at : at + count], r.x[at : at + count] @ matrix)
            assert (got[at + count : at + padded] == 0).all()
            at += padded


@pytest.mark.parametrize("quantize", [None, "mxfp8"])
def test_padded_tokens_equal_those_alone(quantize):
    """A decoding step: T is fixed, ids of -1 are behind the tokens, whatever x and weights hold there."""
    settings = {"num_experts": 6, "top_k": 3, "hidden": 40, "layout": "batched", "quantize": quantize}
    d, alone = (VirtualTokenDispatcher(2, **with_options(max_tokens=6, **settings)) for _ in range(2))
    for step, counts in enumerate([(6, 6), (1, 0), (0, 0), (3, 6)]):
        tokens = [tokens_of(r, n, 3, 6, 40, torch.bfloat16, "zipf", step) for r, n in enumerate(counts)]
        results = []
        for dispatcher, most in ((d, 6), (alone, 0)):
            padding = [max(most - n, 0) for n in counts]
            xs, weights = (
                [
                    torch.cat([v, torch.full((n, v.shape[1]), torch.nan, dtype=v.dtype)])
                    for v, n in zip(of, padding, strict=True)
                ]
                for of in ([t.x for t in tokens], [t.weights for t in tokens])
            )
            ids = [torch.cat([t.ids, t.ids.new_full((n, 3), -1)]) for t, n in zip(tokens, padding, strict=True)]
            routed = dispatcher.dispatch(xs, ids, weights)
            outputs = [2 * (r.x if quantize is None else r.dequantized()) for r in routed]
            results.append(dispatcher.combine(outputs, routed, out=[torch.full_like(x, torch.nan) for x in xs]))
        for n, padded, y in zip(counts, *results, strict=True):
            assert torch.equal(padded[:n], y) and not padded[n:].any()


@pytest.mark.parametrize("phases", [False, True], ids=["dispatch", "dispatch_start"])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"save": "copy"},
        {"layout": "batched"},
        {"one_sided": False},
        {"one_sided": False, "chunk_capacity": 1 << 20},
        {"one_sided": False, "nodes": [0, 0, 1, 1], "two_level": True},
        {"one_sided": False, "nodes": [0, 0, 1, 1], "two_level": True, "chunk_capacity": 1 << 20},
    ],
    ids=str,
)
def test_arguments_may_be_overwritten_after_dispatch(kind, phases):
    """Forward and backward are of what was dispatched, whatever the dtypes of ids and weights."""
    d = VirtualTokenDispatcher(
        4, **with_options(num_experts=6, top_k=3, hidden=8, max_tokens=5, dtype=torch.float32, **kind)
    )
    matrices = matrices_of(6, 8, torch.float32)
    for ids_dtype, weights_dtype in itertools.product((torch.int64, torch.int32), (torch.float32, torch.float64)):
        tokens = [tokens_of(r, n, 3, 6, 8, torch.float32, "holes") for r, n in enumerate((5, 0, 3, 4))]
        given = [[leaf(t.x), t.ids.to(ids_dtype, copy=True), leaf(t.weights.to(weights_dtype))] for t in tokens]
        arguments = [list(each) for each in zip(*given, strict=True)]
        routed = d.dispatch_start(*arguments).finish() if phases else d.dispatch(*arguments)
        with torch.no_grad():
            for x, ids, weights in given:
                x.fill_(float("nan"))
                ids.fill_(0)
                weights.mul_(3)
        outputs = [run_experts(r, [matrices[e] for e in held(d, rank)], True) for rank, r in enumerate(routed)]
        ys = d.combine_start(outputs, routed).finish() if phases else d.combine(outputs, routed)
        torch.autograd.backward(ys, [t.gradient for t in tokens])
        for t, y, (x, _, weights) in zip(tokens, ys, given, strict=True):
            want = dense(t, matrices)
            assert weights.grad.dtype is weights_dtype
            for name, got in (("y", y), ("x", x.grad), ("weights", weights.grad)):
                assert_near(got, want[name], torch.float32, f"{name}, {ids_dtype}, {weights_dtype}")


def test_x_of_redispatch_that_was_overwritten_is_refused() -> None:
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 2, "dtype": torch.float32}
    d = VirtualTokenDispatcher(1, **with_options(**sizes, save="redispatch"))
    x, ids = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    (routed,) = d.dispatch([x], [ids], [torch.ones(2, 1)])
    x.zero_()
    assert d.combine([routed.x], [routed])[0].eq(1).all()
    with pytest.raises(ArgumentError, match=r"routed\[0\]: its x was written after the dispatch; allowed with save="):
        d.combine([routed.x.clone().requires_grad_()], [routed])


def test_weights_that_need_gradients_of_a_dispatch_without_are_refused() -> None:
    d = VirtualTokenDispatcher(2, num_experts=2, top_k=1, hidden=4, max_tokens=2, dtype=torch.float32)
    ids = [torch.zeros(2, 1, dtype=torch.int64)] * 2
    x, weights = [torch.ones(2, 4)] * 2, [torch.ones(2, 1, requires_grad=True)] * 2
    with torch.no_grad():
        routed = d.dispatch(x, ids, weights)
    with pytest.raises(
        ArgumentError, match=r"routed\[0\]: of a dispatch without gradients, with topk_weights that require"
    ):
        d.combine([r.x for r in routed], routed)
    with torch.no_grad():
        assert all(y.eq(1).all() for y in d.combine([r.x for r in routed], routed))
    # A loss of the router may use them.
    sum(r.topk_weights.sum() for r in routed).backward()
    assert weights[0].grad.eq(2).all()


@pytest.mark.parametrize("one_sided", [True, False])
def test_gradients_of_weights_of_several_combines_and_of_row_weights_add(one_sided: bool) -> None:
    settings = {"num_experts": 6, "top_k": 2, "hidden": 8, "max_tokens": 5, "dtype": torch.float32}
    d = VirtualTokenDispatcher(3, **with_options(one_sided=one_sided, **settings))
    tokens = [tokens_of(r, 5, 2, 6, 8, torch.float32, "uniform") for r in range(3)]
    xs, weights = [leaf(t.x) for t in tokens], [leaf(t.weights) for t in tokens]
    routed = d.dispatch(xs, [t.ids for t in tokens], weights)
    ys = d.combine([2 * r.x for r in routed], routed)
    more = d.combine([r.x * r.weights[:, None] for r in routed], routed, weighted=False)
    third = d.combine([r.x.square() for r in routed], routed)
    torch.autograd.backward([*ys, *more, *third], 3 * [t.gradient for t in tokens])
    for t, w in zip(tokens, weights, strict=True):
        x, gradient = t.x.double(), t.gradient.double()
        want = (gradient * (3 * x + x.square())).sum(1, keepdim=True) * (t.ids >= 0)
        assert_near(w.grad, want, torch.float32, "dweights")
