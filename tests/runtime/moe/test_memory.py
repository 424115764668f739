"""The values of `save`: equal gradients, and the memory that backward keeps."""

from __future__ import annotations

import gc

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import matrices_of, run_experts, tokens_of
from rank_processes import run_ranks
from torch.utils.checkpoint import checkpoint
from variants import crossed

from shardweave.errors import UnsupportedError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.in_process import InProcessTransport

K, E, H = 2, 3, 8
SAVES = ["buffer", "redispatch", "copy"]


class Allocated:
    """Tracks the transport's allocations, filled with NaN, that are still referenced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._refs: list = []

        def empty(transport, shape, dtype, device):
            x = torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=device)
            self._refs.append((x.untyped_storage()._weak_ref(), tuple(shape)))
            return x

        monkeypatch.setattr(InProcessTransport, "empty", empty)

    def alive(self, shape: tuple[int, ...]) -> int:
        """Return the number of live allocations of a shape."""
        gc.collect()
        return sum(s == shape and not torch.UntypedStorage._expired(ref) for ref, s in self._refs)


def settings(save: str, **given) -> dict:
    return {
        "num_experts": E, "top_k": K, "hidden": H, "max_tokens": 9, "dtype": torch.float32, "align": 4, "save": save,
        **given,
    }  # fmt: skip


# Each layout, and each way to transfer.
@crossed(
    "given, weighted, one_sided", [{}, {"layout": "batched", "expert_capacity": 7, "overflow": "drop"}],
    [True, False], [True, False], ids=str,
    gate=lambda given, weighted, one_sided: weighted and one_sided == bool(given),
)  # fmt: skip
def test_gradients_are_equal_for_all_saves(one_sided, weighted, given, monkeypatch):
    allocated = Allocated(monkeypatch)
    tokens = [tokens_of(r, 9 - 2 * r, K, E, H, torch.float32, "holes") for r in range(2)]
    collected, held, runs = [], [], []
    for save in SAVES:
        d = VirtualTokenDispatcher(2, **with_options(**settings(save, **given), one_sided=one_sided))
        run = d.run
        runs.append(0)

        def counted(what, given, run=run):
            runs[-1] += 1
            return run(what, given)

        d.run = counted
        xs, ws = [t.x.clone().requires_grad_() for t in tokens], [t.weights.clone().requires_grad_() for t in tokens]
        experts = matrices_of(E, H, torch.float32).requires_grad_()

        def layer(xs, ws, d=d, experts=experts):
            routed = d.dispatch(xs, [t.ids for t in tokens], ws)
            outputs = []
            for rank, r in enumerate(routed):
                own = range(*d.config.bounds[rank : rank + 2])
                with r.kept():
                    outputs.append(run_experts(r, [experts[e] for e in own], weighted))
            return d.combine(outputs, routed, weighted=weighted)

        ys = layer(xs, ws)
        held.append(allocated.alive((d.config.rows, H)))
        torch.autograd.backward(ys, [t.gradient for t in tokens])
        assert allocated.alive((d.config.rows, H)) == 0
        collected.append([*ys, *[x.grad for x in (*xs, *ws)], experts.grad])
    for other in collected[1:]:
        assert all(torch.equal(a, b) for a, b in zip(collected[0], other, strict=True))
    assert all(x.isfinite().all() and x.any() for x in collected[0])
    assert held == [2, 0, 0]  # one buffer per rank, or none
    assert runs == [4, 5, 4]


def test_redispatch_twice_in_flight_and_checkpointed(monkeypatch):
    Allocated(monkeypatch)
    d = VirtualTokenDispatcher(2, **with_options(**settings("redispatch")))
    tokens = [tokens_of(r, 5, K, E, H, torch.float32, "holes") for r in range(2)]

    def layer(x0, x1):
        routed = d.dispatch([x0, x1], [t.ids for t in tokens], [t.weights for t in tokens])
        outputs = []
        for r in routed:
            with r.kept():
                outputs.append(r.x * r.x)
        return tuple(d.combine(outputs, routed))

    wanted = None
    for way in (layer, lambda *xs: checkpoint(layer, *xs, use_reentrant=False)):
        xs = [t.x.clone().requires_grad_() for t in tokens]
        first, second = way(*xs), way(*xs)
        total = sum(y.sum() for y in (*first, *second))
        total.backward(retain_graph=True)
        total.backward()
        want = [
            8 * t.x * torch.where(t.ids >= 0, t.weights, 0.0).sum(1, keepdim=True) for t in tokens
        ]  # d(x^2), two layers, two backwards
        for x, w in zip(xs, want, strict=True):
            torch.testing.assert_close(x.grad, w)
        wanted = wanted or [x.grad for x in xs]
        assert all(torch.equal(x.grad, w) for x, w in zip(xs, wanted, strict=True))


def test_redispatch_refuses_backward_without_combine():
    d = VirtualTokenDispatcher(1, **with_options(**settings("redispatch")))
    t = tokens_of(0, 5, K, E, H, torch.float32, "uniform")
    (routed,) = d.dispatch([t.x.clone().requires_grad_()], [t.ids], [t.weights])
    with routed.kept():
        output = routed.x * routed.x
    with pytest.raises(UnsupportedError, match="backward from the result of combine"):
        output.sum().backward()


def each_transport(rank: int) -> list:
    """Return results and gradients by transport and `save`."""
    return [[as_one_rank(rank, save, transport) for save in SAVES] for transport in ("shared_memory", "process_group")]


def as_one_rank(rank: int, save: str, transport: str) -> list:
    d = TokenDispatcher(**with_options(**settings(save), transport=transport))
    t = tokens_of(rank, 9 - 4 * rank, K, E, H, torch.float32, "holes")
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    routed = d.dispatch(x, t.ids, weights)
    with routed.kept():
        output = routed.x * routed.x
    y = d.combine(output, routed)
    del routed, output
    y.backward(t.gradient)
    return [y.tolist(), x.grad.tolist(), weights.grad.tolist()]


@pytest.mark.multi
def test_processes_are_equal_for_all_saves():
    for of_transports in run_ranks(each_transport, 2):
        (first, *others), over_messages = of_transports
        assert all(other == first for other in (*others, *over_messages))
