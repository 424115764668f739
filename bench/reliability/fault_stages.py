"""The calls that ranks of `faults` and of `soak` make, with exact results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...runtime.dtensor.batch import redistribute_batch
from ...runtime.dtensor.redistribute import redistribute
from ...runtime.moe.dispatcher import TokenDispatcher

Stage = Callable[[int], None]
_EXPERTS, _TOKENS, _HIDDEN = 6, 6, 16


class WrongValues(AssertionError):
    """A call returned, with values that are not those of the request."""


def _check(got: torch.Tensor, want: torch.Tensor, stage: str) -> None:
    if not torch.equal(got, want):
        raise WrongValues(f"{stage}: {got}, not {want}")


class Stages:
    """All stages, among the ranks of the default process group.

    Args:
        transport: of all calls.
    """

    def __init__(self, transport: Any) -> None:
        self.transport, self.rank, self.size = transport, dist.get_rank(), dist.get_world_size()
        self.mesh = DeviceMesh("cpu", list(range(self.size)), _init_backend=False)
        self._pending: tuple[DTensor, torch.Tensor] | None = None
        self._leaf: tuple[DTensor, DTensor] | None = None
        self._dispatcher: TokenDispatcher | None = None
        self._tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._routed: Any = None
        self._sums: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[str, Stage]]:
        """The stages in order, by the names in `fault_points.POINTS`. Each takes the number of the round."""
        yield "set-up", self._redistribute
        yield "redistribution", self._redistribute
        yield "asynchronous", self._begin
        yield "asynchronous, used", self._use
        yield "growth", self._grow
        yield "forward", self._forward
        yield "backward", self._backward
        yield "batch", self._batch
        yield "dispatcher", self._make_dispatcher
        yield "dispatch", self._dispatch
        yield "combine", self._combine
        yield "token backward", self._token_backward

    def run_all(self, number: int = 0) -> None:
        """Run each stage once, with the same dispatcher in all rounds."""
        for name, stage in self:
            if name != "dispatcher" or self._dispatcher is None:
                stage(number)

    def _redistribute(self, number: int) -> None:
        """Two meetings: a reduction, and a gather of its result."""
        shape = (2 * self.size, 8)
        whole = torch.arange(16.0 * self.size).view(shape) + number
        x = DTensor.from_local(whole * (self.rank + 1), self.mesh, [Partial()], run_check=False)
        y = redistribute(x, [Replicate()], transport=self.transport)
        _check(y.to_local(), whole * (self.size * (self.size + 1) // 2), "redistribution")

    def _sharded(self, columns: int, number: int) -> tuple[DTensor, torch.Tensor]:
        whole = torch.arange(2.0 * self.size * columns, dtype=torch.float64).view(-1, columns) + number
        return DTensor.from_local(
            whole.chunk(self.size)[self.rank].clone(), self.mesh, [Shard(0)], run_check=False
        ), whole

    def _begin(self, number: int) -> None:
        x, whole = self._sharded(4, number)
        self._pending = redistribute(x, [Replicate()], transport=self.transport, async_op=True), whole

    def _use(self, number: int) -> None:
        assert self._pending is not None
        y, whole = self._pending
        self._pending = None
        _check(y.to_local() + 0, whole, "asynchronous")

    def _grow(self, number: int) -> None:
        """An output of a new size each time, at first in pages that the pool does not have yet."""
        x, whole = self._sharded((1 << 15) * (1 + number % 3) + number % 9973, number)
        _check(redistribute(x, [Replicate()], transport=self.transport).to_local(), whole, "growth")

    def _forward(self, number: int) -> None:
        x, _ = self._sharded(3, number)
        x.requires_grad_()
        self._leaf = x, redistribute(x, [Replicate()], transport=self.transport)

    def _backward(self, number: int) -> None:
        assert self._leaf is not None
        x, y = self._leaf
        y.to_local(grad_placements=[Partial()]).backward(torch.full(y.shape, self.rank + 1.0, dtype=torch.float64))
        gradient = x.grad
        assert isinstance(gradient, DTensor)
        want = torch.full_like(x.to_local().detach(), self.size * (self.size + 1) // 2)
        _check(gradient.to_local(), want, "backward")

    def _batch(self, number: int) -> None:
        given = [self._sharded(columns, number) for columns in (2, 5)]
        ys = redistribute_batch([x for x, _ in given], [[Replicate()]] * 2, transport=self.transport)
        for y, (_, whole) in zip(ys, given, strict=True):
            _check(y.to_local(), whole, "batch")

    def _make_dispatcher(self, number: int) -> None:
        self._dispatcher = TokenDispatcher(
            num_experts=_EXPERTS, top_k=2, hidden=_HIDDEN, max_tokens=_TOKENS, dtype=torch.float32,
            transport=self.transport,
        )  # fmt: skip

    def _dispatch(self, number: int) -> None:
        """Each token goes to two experts, of two ranks."""
        assert self._dispatcher is not None
        x = torch.arange(float(_TOKENS * _HIDDEN)).view(_TOKENS, _HIDDEN) + 100 * self.rank + number
        ids = (torch.arange(_TOKENS)[:, None] + torch.tensor([[0, 3]])) % _EXPERTS
        weights = torch.tensor([[1.0, 2.0]]).repeat(_TOKENS, 1)
        self._tokens = x.requires_grad_(), weights.requires_grad_(), ids
        self._routed = self._dispatcher.dispatch(x, ids, weights)

    def _combine(self, number: int) -> None:
        assert self._dispatcher is not None and self._tokens is not None
        self._sums = self._dispatcher.combine(self._routed.x, self._routed)
        _check(self._sums.detach(), 3 * self._tokens[0].detach(), "combine")

    def _token_backward(self, number: int) -> None:
        assert self._sums is not None and self._tokens is not None
        self._sums.sum().backward()
        gradient = self._tokens[0].grad
        assert gradient is not None
        _check(gradient, torch.full_like(gradient, 3.0), "token backward")
        self._routed = self._sums = None
