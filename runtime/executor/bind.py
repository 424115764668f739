"""A rank's program bound to a transport: a call then allocates, copies and meets.

Written once for every transport, as a generator that yields where ranks meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...planner import Program, check_local_shape, title
from ..statistics import Summary
from .copies import contiguous_strides
from .lower import Lowering, Reduction, lower
from .step import Run, Transport
from .step_collective import CollectiveReduction
from .step_hierarchical import HierarchicalStep, HierarchicalWindowStep
from .step_put import PutStep
from .step_sendrecv import SendRecvStep, may_leave_apart
from .step_window import WindowStep

_FAST = 1 << 62  # in the token of a program whose sums may be vendors'


def kind_of(
    lowering: Lowering, transport: Transport
) -> type[PutStep | SendRecvStep | WindowStep | CollectiveReduction]:
    """The kind of step that a lowering is carried out by."""
    if lowering.algorithm == "push and send":
        return HierarchicalWindowStep if transport.windows else HierarchicalStep
    if lowering.algorithm in ("reduce-scatter", "all-reduce"):
        return CollectiveReduction
    if lowering.algorithm in ("push", "pull", "local") and transport.windows:
        return WindowStep
    return PutStep if transport.one_sided or lowering.algorithm == "push" else SendRecvStep


def _summary(program: Program, position: int) -> Summary:
    at, bound = program.ranks.index(position), program.bytes_bound
    return title(program), program.bytes_received[at], None if bound is None else bound[at]


class BoundProgram:
    """One rank's program on one transport, for inputs with the given strides.

    Attributes:
        fingerprint: what ranks compare when they meet; differs for different requests.
        asked: equal for programs of the same request.
        title: makes its text.
        summary: makes that and its bytes; keeps the program alive, and nothing that is bound.
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
        other = program.target_mesh if program.is_cross_mesh else None
        self.asked = program.src, program.dst, program.shape, program.dtype, program.source_mesh, other
        self.title, self.summary = partial(title, program), partial(_summary, program, position)
        meets = program.exchanges > 0
        self.fingerprint = (program.digest & ~0xFFFF) ^ (_FAST if reduction == "fast" else 0) if meets else 0
        self.steps: list[PutStep | SendRecvStep | WindowStep | CollectiveReduction] = []
        lowerings = [lower(program, step, position, transport, reduction) for step in program.steps]
        kinds = [kind_of(lowering, transport) for lowering in lowerings]
        origin, buffers = None, 1
        for i, step in enumerate(program.steps):
            before = strides if i == 0 else contiguous_strides(program.shape_before(step, position))
            given = program, step, position, before, transport, dtype, device
            if kinds[i] is PutStep:
                self.steps.append(PutStep(*given))
                continue
            if kinds[i] is not SendRecvStep:
                self.steps.append(kinds[i](*given, lowering=lowerings[i]))
                continue
            apart = kinds[i + 1 : i + 2] == [SendRecvStep] and may_leave_apart(step, program.steps[i + 1])
            bound = SendRecvStep(*given, lowering=lowerings[i], origin=origin, buffers=buffers, leave_apart=apart)
            self.steps.append(bound)
            origin, buffers = (bound.patchwork, buffers + 1) if apart else (None, 1)
        for earlier in self.steps[:-1]:
            earlier.last = False

    def check(self, x: torch.Tensor) -> None:
        check_local_shape(self.program, self.position, x.shape)

    def build(self, address: int) -> None:
        """Compile and upload what is launched for an input at an address that is a multiple of fewer than 16 bytes, and
        not ready yet."""
        aligned = (address | 16) & -(address | 16)
        for copies in self.steps[0].launched():
            copies.build(aligned)

    def run(self, x: torch.Tensor, fingerprint: int | None = None) -> Run:
        """Yields where ranks meet; returns the target shard. The input is only read.

        Args:
            fingerprint: what ranks compare; None: that of the request.
        """
        fingerprint = self.fingerprint if fingerprint is None else fingerprint
        if len(self.steps) == 1:
            return self.steps[0].run(x, fingerprint)
        return self._run_all(x, fingerprint)

    def _run_all(self, x: torch.Tensor, fingerprint: int) -> Run:
        between: torch.Tensor | list[torch.Tensor] = x
        for i, step in enumerate(self.steps):
            between = yield from step.run(between, fingerprint + 2 * i)  # type: ignore[arg-type]
        return between
