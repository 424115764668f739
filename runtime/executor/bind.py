"""Binding: one rank's program with a transport and strides, so that a call only allocates, copies and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...planner import ITEMSIZE, Exchange, Program, title
from ..statistics import Summary
from ..transports.base import Transport
from .choose_algorithm import Algorithm, Reduction, choose_algorithm
from .copies import contiguous_strides
from .run import Run, run_steps
from .step_collective import CollectiveReduction
from .step_direct import DirectStep
from .step_hierarchical import HierarchicalStep, HierarchicalWindowStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep
from .step_window import WindowStep

_FAST = 1 << 62  # in the fingerprint of a program whose backend may reduce

AnyStep = PutStep | SendRecvStep | WindowStep | DirectStep | CollectiveReduction


def step_type(algorithm: Algorithm, transport: Transport) -> type[AnyStep]:
    """The class that implements an algorithm on a transport."""
    if algorithm.name == "push and send":
        return HierarchicalWindowStep if transport.windows else HierarchicalStep
    if algorithm.name in ("reduce-scatter", "all-reduce"):
        return CollectiveReduction
    if algorithm.name == "direct push":
        return DirectStep
    if algorithm.name in ("push", "pull", "local") and transport.windows:
        return WindowStep
    return PutStep if transport.one_sided or algorithm.name == "push" else SendRecvStep


def _summary(program: Program, position: int) -> Summary:
    at, bound = program.ranks.index(position), program.bytes_bound
    return title(program), program.bytes_received[at], None if bound is None else bound[at]


def traffic_of(program: Program, position: int) -> tuple[int, int]:
    """The bytes that a rank sends and receives in all steps."""
    steps = [program.traffic(step, position) for step in program.steps if isinstance(step, Exchange)]
    sent, received = sum(step.sent for step in steps), sum(step.received for step in steps)
    return sent * ITEMSIZE[program.dtype], received * ITEMSIZE[program.dtype]


class BoundProgram:
    """One rank's program on one transport, for inputs with the given strides.

    Attributes:
        fingerprint: compared by ranks in each exchange; differs for different requests.
        request: equal for programs of the same request.
        title: returns the request as text.
        summary: returns the text, the bytes received and their bound, or None. Keeps the program alive, but none of the
            bound buffers.
        traffic: returns the bytes sent and received. Keeps alive what `summary` does.
        run: takes the source shard, which is only read, and the fingerprint that ranks compare in each exchange. Yields
            requests and returns the target shard.
    """

    def __init__(
        self,
        program: Program,
        position: int,
        strides: Sequence[int],
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
        reduction: Reduction = "ordered",
    ) -> None:
        self.program, self.position, self.device = program, position, device
        target_mesh = program.target_mesh if program.is_cross_mesh else None
        self.request = program.source, program.target, program.shape, program.dtype, program.source_mesh, target_mesh
        self.title, self.summary = partial(title, program), partial(_summary, program, position)
        self.traffic = partial(traffic_of, program, position)
        self.fingerprint = 0
        if program.exchanges:
            self.fingerprint = (program.digest & ~0xFFFF) ^ (_FAST if reduction == "fast" else 0)
        self.steps: list[AnyStep] = []
        for i, step in enumerate(program.steps):
            source_strides = strides if i == 0 else contiguous_strides(program.shape_before(step, position))
            algorithm = choose_algorithm(program, step, position, transport, reduction)
            bind = step_type(algorithm, transport)
            arguments = program, step, position, source_strides, transport, dtype, device
            self.steps.append(bind(*arguments) if bind is PutStep else bind(*arguments, algorithm=algorithm))
        for earlier in self.steps[:-1]:
            earlier.last = False
        self.run: Callable[[Any, int], Run] = (
            self.steps[0].run if len(self.steps) == 1 else partial(run_steps, self.steps)
        )

    def build(self, address: int) -> None:
        """Compile and upload the launches for an input at `address` that are not ready yet: those for inputs aligned to
        fewer than 16 bytes."""
        aligned = (address | 16) & -(address | 16)
        for launch in self.steps[0].launches:
            launch.build(aligned)
