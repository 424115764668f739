"""The values of `save`: the memory that backward keeps. Their gradients are compared with those of other settings."""

from __future__ import annotations

import pytest
import torch
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.utils.checkpoint import checkpoint

from shardweave.errors import UnsupportedError
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.transports.shared_memory.pool_controls import pool_memory

K, E, H = 2, 3, 8
SAVES = ["buffer", "redispatch", "copy"]


def settings(save: str, **given) -> dict:
    return {
        "num_experts": E, "top_k": K, "hidden": H, "max_tokens": 9, "dtype": torch.float32, "align": 4, "save": save,
        **given,
    }  # fmt: skip


def held(rank: int) -> dict[str, int]:
    """Bytes of shared memory in use between combine and backward of experts that save their rows, beside y."""
    found = {}
    for save in SAVES:
        before = pool_memory().allocated
        d = TokenDispatcher(
            num_experts=4, top_k=2, hidden=1024, max_tokens=512, dtype=torch.float32, options=DispatchOptions(save=save)
        )
        x = torch.randn(512, 1024, requires_grad=True)
        routed = d.dispatch(x, torch.randint(0, 4, (512, 2)), torch.rand(512, 2))
        with routed.kept():
            output = routed.x.square()
        y = d.combine(output, routed)
        del routed, output
        found[save] = pool_memory().allocated - before - y.nbytes
        y.backward(x.detach())
        del x, y  # with the gradient of x
        assert pool_memory().allocated - before < 1 << 20
    return found


@pytest.mark.multi
def test_memory_that_backward_keeps():
    for found in run_ranks(held, 2):
        # Rows take 8 MiB; smaller pieces are kept for the next call.
        assert found["buffer"] >= 8 << 20 and max(found["copy"], found["redispatch"]) < 1 << 20, found


def test_redispatch_twice_in_flight_and_checkpointed(poisoned_memory):
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
