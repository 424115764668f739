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
from .step_collective import VendorReduction
from .step_hierarchical import MixedStep, WindowedMixedStep
from .step_put import OneSidedStep
from .step_sendrecv import TwoSidedStep, may_leave_apart
from .step_window import WindowedStep

_FAST = 1 << 62  # in the token of a program whose sums may be vendors'


def kind_of(
    lowering: Lowering, transport: Transport
) -> type[OneSidedStep | TwoSidedStep | WindowedStep | VendorReduction]:
    """The kind of step that a lowering is carried out by."""
    if lowering.how == "push and send":
        return WindowedMixedStep if transport.windows else MixedStep
    if lowering.how in ("reduce-scatter", "all-reduce"):
        return VendorReduction
    if lowering.how in ("push", "pull", "local") and transport.windows:
        return WindowedStep
    return OneSidedStep if transport.one_sided or lowering.how == "push" else TwoSidedStep


def _summary(program: Program, position: int) -> Summary:
    at, bound = program.ranks.index(position), program.bytes_bound
    return title(program), program.bytes_received[at], None if bound is None else bound[at]


class BoundProgram:
    """One rank's program on one transport, for inputs with the given strides.

    Attributes:
        token: what ranks compare when they meet; differs for different requests.
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
        other = program.target_mesh if program.crosses else None
        self.asked = program.src, program.dst, program.shape, program.dtype, program.source_mesh, other
        self.title, self.summary = partial(title, program), partial(_summary, program, position)
        meets = program.exchanges > 0
        self.token = (program.digest & ~0xFFFF) ^ (_FAST if reduction == "fast" else 0) if meets else 0
        self.steps: list[OneSidedStep | TwoSidedStep | WindowedStep | VendorReduction] = []
        lowerings = [lower(program, step, position, transport, reduction) for step in program.steps]
        kinds = [kind_of(lowering, transport) for lowering in lowerings]
        origin, buffers = None, 1
        for i, step in enumerate(program.steps):
            before = strides if i == 0 else contiguous_strides(program.shape_before(step, position))
            given = program, step, position, before, transport, dtype, device
            if kinds[i] is OneSidedStep:
                self.steps.append(OneSidedStep(*given))
                continue
            if kinds[i] is not TwoSidedStep:
                self.steps.append(kinds[i](*given, lowering=lowerings[i]))
                continue
            apart = kinds[i + 1 : i + 2] == [TwoSidedStep] and may_leave_apart(step, program.steps[i + 1])
            bound = TwoSidedStep(*given, lowering=lowerings[i], origin=origin, buffers=buffers, leave_apart=apart)
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

    def run(self, x: torch.Tensor, token: int | None = None) -> Run:
        """Yields where ranks meet; returns the target shard. The input is only read.

        Args:
            token: what ranks compare; None: that of the request.
        """
        token = self.token if token is None else token
        if len(self.steps) == 1:
            return self.steps[0].run(x, token)
        return self._run_all(x, token)

    def _run_all(self, x: torch.Tensor, token: int) -> Run:
        between: torch.Tensor | list[torch.Tensor] = x
        for i, step in enumerate(self.steps):
            between = yield from step.run(between, token + 2 * i)  # type: ignore[arg-type]
        return between
