"""Experts write their output to memory that peers read: `RoutedTokens.output_buffer`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from dispatcher_settings import with_options
from rank_processes import interpreted, run_ranks
from test_processes import SETTINGS, given, leaf, raw
from test_symmetric import transport_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import shardweave
from shardweave.errors import ArgumentError
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.statistics import stats

pytestmark = pytest.mark.multi
BATCHED = {"layout": "batched", "expert_capacity": 7, "overflow": "drop"}


class Doubled(torch.autograd.Function):
    """An expert that writes its result to given memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.mark_dirty(out)
        return torch.mul(x, 2, out=out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return 2 * gradient, None


def layer(d: Any, rank: int, i: int, write: str | None) -> list[bytes]:
    """The output and gradients of a residual layer; `write`: how the experts write to the lent buffer."""
    t = given(rank, i)
    x, weights = leaf(t.x), leaf(t.weights)
    routed = d.dispatch(x, t.ids, weights)
    if write is None:
        output = routed.x * 2
    else:
        out = routed.output_buffer()
        assert (out.shape, out.dtype, out.requires_grad) == (routed.x.shape, routed.x.dtype, False)
        out.fill_(torch.nan)
        output = Doubled.apply(routed.x, out) if write == "function" else out.copy_(routed.x * 2)
        assert output.data_ptr() == out.data_ptr()
    y = d.combine(output, routed, add=x)
    y.backward(t.gradient)
    return [raw(y), raw(x.grad), raw(weights.grad)]


def lent(rank: int, transport: str, settings: dict[str, Any]) -> int:
    """Results equal those of experts without lent memory; returns the number of copies."""
    d = shardweave.TokenDispatcher(**with_options(**{**SETTINGS, **settings}, transport=transport))
    for i in range(4):
        want = layer(d, rank, i, None)
        for write in ("function", "copy_"):
            assert layer(d, rank, i, write) == want, (i, write)
    return stats().copies.total()


@pytest.mark.parametrize("settings", [{"pooled_buffers": 2}, {"pooled_buffers": 2, **BATCHED}], ids=["rows", "batched"])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "symmetric_memory"])
def test_lent_output_equals_copied_output(transport: str, settings: dict[str, Any]) -> None:
    assert run_ranks(lent, 3, transport, settings) == [0, 0, 0]


@pytest.mark.long
def test_interpreted_kernels_read_lent_buffers() -> None:
    ran = interpreted("test_output_buffer", "t.run_ranks(t.lent, 2, 'symmetric_memory', {'pooled_buffers': 2})")
    assert ran == "[0, 0]"


@torch.no_grad()
def misused(rank: int) -> None:
    """What is not the lent tensor itself is copied; a lent buffer is lent again only when peers have read it."""
    d = shardweave.TokenDispatcher(**with_options(**{**SETTINGS, "pooled_buffers": 3}, transport="symmetric_memory"))
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    want = d.combine(routed.x * 2, routed)
    out = routed.output_buffer()
    # Values in other memory while a buffer is lent; rows in place; then the buffer.
    assert torch.equal(d.combine(routed.x * 2, routed), want)
    once = d.combine(routed.x, routed)
    torch.mul(routed.x, 2, out=out)
    assert torch.equal(d.combine(out.t().contiguous().t(), routed), want)
    assert torch.equal(d.combine(out, routed), want)
    first = out.data_ptr()
    del out
    second = routed.output_buffer()
    assert second.data_ptr() != first, "peers may read the first one still"
    before = stats().copies.total()
    third = routed.output_buffer()
    assert stats().copies.total() == before + 1
    torch.mul(routed.x, 2, out=third)
    assert torch.equal(d.combine(third, routed), want)  # now the first one has been read
    again = routed.output_buffer()
    assert again.data_ptr() == first and stats().copies.total() == before + 1
    torch.mul(routed.x, 2, out=again)
    assert torch.equal(d.combine(again, routed), want) and torch.equal(d.combine(routed.x, routed), once)


def test_misuse_of_lent_buffers_costs_copies() -> None:
    run_ranks(misused, 3)


@torch.no_grad()
def layers(rank: int) -> None:
    """Two buffers are enough for any number of layers: one for rows, one for what experts write."""
    dispatchers = [
        shardweave.TokenDispatcher(**with_options(**{**SETTINGS, "pooled_buffers": 2}, transport="symmetric_memory"))
        for _ in range(4)
    ]
    t = given(rank, 1)
    for _ in range(2):
        for d in dispatchers:
            routed = d.dispatch(t.x, t.ids, t.weights)
            want = d.combine(routed.x * 2, routed)
            out = routed.output_buffer()
            assert torch.equal(d.combine(torch.mul(routed.x, 2, out=out), routed), want)
            del out, routed
    assert not stats().copies


def test_layers_share_lent_buffers() -> None:
    run_ranks(layers, 3)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 6.0))
        self.lent = 0

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        expert = torch.bucketize(torch.arange(len(x)), offsets, right=True).clamp(max=len(offsets) - 1)
        scale = self.scale.to_local()[expert][:, None].to(x.dtype)
        self.lent += out is not None
        return torch.mul(x, scale, out=out)


def styled(rank: int, transport: str) -> None:
    mesh, experts = init_device_mesh("cpu", (3,)), Experts()
    settings = {name: value for name, value in SETTINGS.items() if name != "num_experts"}
    style = shardweave.moe.ExpertParallel(**with_options(**{**settings, "pooled_buffers": 2}, transport=transport))
    parallelize_module(nn.ModuleDict({"experts": experts}), mesh, {"experts": style})
    t = given(rank, 2)
    want = experts(t.x, t.ids, t.weights)  # gradients are recorded: nothing is lent
    assert experts.lent == 0
    with torch.no_grad():
        for lent in (1, 2):
            assert torch.equal(experts(t.x, t.ids, t.weights), want) and experts.lent == lent
    assert transport != "symmetric_memory" or not transport_of("cpu")._all[0].failure.read()


@pytest.mark.parametrize("transport", ["shared_memory", "symmetric_memory"])
def test_parallel_style_lends_buffers(transport: str) -> None:
    run_ranks(styled, 3, transport)


def test_virtual_ranks_and_compiled_layers() -> None:
    d = VirtualTokenDispatcher(2, num_experts=2, top_k=1, hidden=4, max_tokens=3, dtype=torch.float32)
    xs, ids, weights = [torch.ones(3, 4)] * 2, [torch.arange(3)[:, None] % 2] * 2, [torch.ones(3, 1)] * 2

    def ran() -> list[torch.Tensor]:
        routed = d.dispatch(xs, ids, weights)
        return d.combine([r.output_buffer().copy_(r.x * 3) for r in routed], routed)

    assert all(torch.equal(y, 3 * x) for y, x in zip(ran(), xs, strict=True))
    traced = torch.compile(ran, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert all(torch.equal(y, 3 * x) for y, x in zip(traced(), xs, strict=True))


def test_buffer_of_a_destroyed_dispatcher_is_refused() -> None:
    d = VirtualTokenDispatcher(1, num_experts=2, top_k=1, hidden=4, max_tokens=3, dtype=torch.float32)
    (routed,) = d.dispatch([torch.ones(3, 4)], [torch.zeros(3, 1, dtype=torch.int64)], [torch.ones(3, 1)])
    del d
    gc.collect()
    with pytest.raises(ArgumentError, match="destroyed"):
        routed.output_buffer()
