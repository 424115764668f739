"""Redistributions by which each rank keeps one box of its shard, without tables, kernels or peers."""

from __future__ import annotations

from functools import partial

import torch

from ...planner import LocalSlice, Planner, check_local_shape, title
from ..statistics import Summary
from ..transports.base import Transport
from .copies import Where, place
from .run import Run


def _title(planner: Planner, shape: tuple[int, ...]) -> str:
    return title(planner.program(shape))


def _summary(planner: Planner, shape: tuple[int, ...]) -> Summary:
    return _title(planner, shape), 0, 0


class BoundSlice:
    """Copies a box of the input into a new tensor of the transport. Has the interface of `BoundProgram`.

    Raises:
        ArgumentError: the input does not have the shape of this rank's source shard.
    """

    fingerprint, traffic = 0, None  # there is no exchange

    def __init__(
        self, planner: Planner, sliced: LocalSlice, shape: tuple[int, ...], x: torch.Tensor, transport: Transport
    ) -> None:
        held, start, extent = sliced.of(shape)
        if x.shape != held:
            program = planner.program(shape)
            check_local_shape(program, program.ranks[0], x.shape)
        self.transport, self.dtype, self.device = transport, x.dtype, x.device
        self.request = planner.source, planner.target, shape, planner.dtype, planner.mesh, None
        self.title, self.summary = partial(_title, planner, shape), partial(_summary, planner, shape)
        self.where: Where = place(extent, start, x.stride())

    def run(self, x: torch.Tensor, fingerprint: int) -> Run:
        yield from ()  # a generator, as all runs are
        extent, strides, offset = self.where
        out = self.transport.empty(extent, self.dtype, self.device)
        return out.copy_(x.as_strided(extent, strides, x.storage_offset() + offset))
