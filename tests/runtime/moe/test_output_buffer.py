"""Experts write their output to memory that peers read: `RoutedTokens.output_buffer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_processes import interpreted, run_ranks
from test_processes import SETTINGS, given, leaf, raw
from test_symmetric import transport_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import shardweave
from shardweave.errors import ArgumentError
from shardweave.kernels import recorded_launches
from shardweave.runtime.moe.simulate import VirtualTokenDispatcher
from shardweave.runtime.moe.transfer import window
from shardweave.runtime.statistics import stats
from shardweave.runtime.transports import buffer_pool

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


def lent(rank: int, transport: str, settings: dict[str, Any]) -> list[bool]:
    """Whether each output was left where it is; all results equal those of experts without lent memory."""
    d = shardweave.TokenDispatcher(**{**SETTINGS, **settings}, transport=transport)
    in_place, offer = [], window.offer_rows

    def offered(source: Any, target: Any, *rest: Any) -> None:
        in_place.append(target is None)
        offer(source, target, *rest)

    window.offer_rows = offered
    for i in range(4):
        want = layer(d, rank, i, None)
        in_place.clear()
        for write in ("function", "copy_"):
            assert layer(d, rank, i, write) == want, (i, write)
    window.offer_rows = offer
    return in_place


@pytest.mark.parametrize("settings", [{"pooled_buffers": 2}, {"pooled_buffers": 2, **BATCHED}], ids=["rows", "batched"])
def test_lent_output_is_not_copied(settings: dict[str, Any]) -> None:
    # Of each layer the combine, and the backward of the dispatch, whose gradient autograd allocates. In the batched
    # layout the last rank, which has an expert less than the others, adds rows to what it was lent.
    of_last = [False] * 4 if "layout" in settings else [True, False] * 2
    assert run_ranks(lent, 3, "symmetric_memory", settings) == [[True, False] * 2] * 2 + [of_last]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_lent_output_equals_copied_output(transport: str) -> None:
    assert run_ranks(lent, 3, transport, {}) == [[]] * 3


@pytest.mark.long
def test_interpreted_kernels_read_lent_buffers() -> None:
    ran = interpreted("test_output_buffer", "t.run_ranks(t.lent, 2, 'symmetric_memory', {'pooled_buffers': 2})")
    # Kernels bring the gradients of the weights by a launch of its own, before those of the rows.
    assert ran == repr([[True, False, False] * 2] * 2)


@torch.no_grad()
def misused(rank: int) -> None:
    """What is not the lent tensor itself is copied; a lent buffer is lent again only when peers have read it."""
    d = shardweave.TokenDispatcher(**{**SETTINGS, "pooled_buffers": 3}, transport="symmetric_memory")
    pool = d.transfers[0]._pool
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    want = d.combine(routed.x * 2, routed)
    out = routed.output_buffer()
    assert pool.lent(out) is not None and pool.lent(routed.x) is None
    # Values in other memory while a buffer is lent; rows in place; then the buffer.
    assert torch.equal(d.combine(routed.x * 2, routed), want)
    once = d.combine(routed.x, routed)
    torch.mul(routed.x, 2, out=out)
    assert torch.equal(d.combine(out.t().contiguous().t(), routed), want)
    assert torch.equal(d.combine(out, routed), want)
    first = out.data_ptr()
    del out
    second = routed.output_buffer()
    assert pool.lent(second) is not None and second.data_ptr() != first, "peers may read the first one still"
    before = stats().copies.total()
    third = routed.output_buffer()
    assert pool.number(third) is None and stats().copies.total() == before + 1
    torch.mul(routed.x, 2, out=third)
    assert torch.equal(d.combine(third, routed), want)  # now the first one has been read
    again = routed.output_buffer()
    assert again.data_ptr() == first and stats().copies.total() == before + 1
    torch.mul(routed.x, 2, out=again)
    assert torch.equal(d.combine(again, routed), want) and torch.equal(d.combine(routed.x, routed), once)


def test_misuse_of_lent_buffers_costs_copies() -> None:
    run_ranks(misused, 3)


@torch.no_grad()
def only_one(rank: int) -> None:
    """With one pooled buffer the received rows have it."""
    d = shardweave.TokenDispatcher(**{**SETTINGS, "pooled_buffers": 1}, transport="symmetric_memory")
    pool, t = d.transfers[0]._pool, given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    before = stats().copies.total()
    out = routed.output_buffer()
    assert pool.number(routed.x) == 0 and pool.number(out) is None and stats().copies.total() == before + 1
    want = d.combine(routed.x * 2, routed)
    assert torch.equal(d.combine(torch.mul(routed.x, 2, out=out), routed), want)


def test_received_rows_take_the_only_buffer() -> None:
    run_ranks(only_one, 2)


@contextmanager
def capturing() -> Iterator[None]:
    """Buffers are taken and offered as in the capture of a CUDA graph; kernels run at once."""
    with mock.patch.object(buffer_pool, "capturing", lambda _: True):
        with mock.patch.object(window, "capturing", lambda _: True):
            yield


@torch.no_grad()
def in_graphs(rank: int) -> None:
    """A graph lends memory only if it has the dispatch, and does not free what an eager combine lent."""
    d = shardweave.TokenDispatcher(**{**SETTINGS, "pooled_buffers": 5}, transport="symmetric_memory")
    pool, held, t = d.transfers[0]._pool, d.transfers[0]._window.after_acquire, given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    want = d.combine(routed.x * 2, routed)
    first, second = routed.output_buffer(), routed.output_buffer()
    assert torch.equal(d.combine(torch.mul(routed.x, 2, out=first), routed), want)
    lent = pool.number(first)
    del first
    assert [*held] == [False]
    with capturing():
        assert pool.number(routed.output_buffer()) is None and pool.lent(second) is None
        assert torch.equal(d.combine(torch.mul(routed.x, 2, out=second), routed), want)
        assert [*held] == [False] and lent not in pool._free, "peers may still read it: no wait is enqueued"
        inside = d.dispatch(t.x, t.ids, t.weights)
        of_graph = inside.output_buffer()
        assert pool.lent(of_graph) is not None
        assert torch.equal(d.combine(torch.mul(inside.x, 2, out=of_graph), inside), want)
        assert {*held} == {False, True}
        number = pool.number(of_graph)
        del of_graph
        again = inside.output_buffer()
        assert pool.number(again) != number
        assert torch.equal(d.combine(torch.mul(inside.x, 2, out=again), inside), want)
        assert number in pool._of_graphs and lent not in pool._free
    assert torch.equal(d.combine(routed.x * 2, routed), want)
    assert not held and lent in pool._free


def test_graphs_lend_buffers_behind_their_dispatch() -> None:
    run_ranks(in_graphs, 2)


@torch.no_grad()
def replayed(rank: int) -> None:
    """Experts and combine in a graph, replayed with other values."""
    d = shardweave.TokenDispatcher(**{**SETTINGS, "pooled_buffers": 3}, transport="symmetric_memory")
    t = given(rank, 1)
    routed = d.dispatch(t.x, t.ids, t.weights)
    out = routed.output_buffer()
    with capturing(), recorded_launches() as launches:
        y = d.combine(out, routed)
    assert [made.kernel.fn.__name__ for made in launches] == ["offer_rows_kernel", "combine_rows_kernel"]
    for i in range(4):
        torch.mul(routed.x, i, out=out)
        for made in launches:
            made.start(*made.arguments)
        got = y.clone()
        assert torch.equal(d.combine(routed.x * i, routed), got), i


@pytest.mark.long
def test_graph_of_experts_and_combine_is_replayed() -> None:
    assert interpreted("test_output_buffer", "t.run_ranks(t.replayed, 2)") == "[None, None]"


@torch.no_grad()
def layers(rank: int) -> None:
    """Two buffers are enough for any number of layers: one for rows, one for what experts write."""
    dispatchers = [
        shardweave.TokenDispatcher(**{**SETTINGS, "pooled_buffers": 2}, transport="symmetric_memory") for _ in range(4)
    ]
    t = given(rank, 1)
    for _ in range(2):
        for d in dispatchers:
            routed = d.dispatch(t.x, t.ids, t.weights)
            want = d.combine(routed.x * 2, routed)
            out = routed.output_buffer()
            assert d.transfers[0]._pool.lent(out) is not None
            assert torch.equal(d.combine(torch.mul(routed.x, 2, out=out), routed), want)
            del out, routed


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
    style = shardweave.moe.ExpertParallel(**{**settings, "pooled_buffers": 2}, transport=transport)
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
    routed = d.dispatch(xs, ids, weights)[0]
    routed = replace(routed, _source=(-1, 0))
    with pytest.raises(ArgumentError, match="destroyed"):
        routed.output_buffer()
