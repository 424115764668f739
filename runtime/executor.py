"""A rank's program bound to a world: a call then allocates, copies and meets.

Written once for every world, as a generator that yields where ranks meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..planner import Program, check_local_shape
from ..planner.explanation import title
from .bound_step import Run, World
from .copies import contiguous_strides
from .lowering import Reduction, lower
from .one_sided import OneSidedStep
from .two_sided import TwoSidedStep, may_leave_apart
from .vendor_reduction import VendorReduction
from .windowed import WindowedStep

_FAST = 1 << 62  # in the token of a program whose sums may be vendors'


class BoundProgram:
    """One rank's program on one world, for inputs with the given strides.

    Attributes:
        token: what ranks compare when they meet; differs for different requests.
    """

    def __init__(
        self,
        program: Program,
        position: int,
        strides: Sequence[int],
        world: World,
        dtype: torch.dtype,
        device: torch.device,
        reduction: Reduction = "ordered",
    ) -> None:
        self.program, self.position = program, position
        self.token = (program.digest & ~0xFFFF) ^ (_FAST if reduction == "fast" else 0)
        self.steps: list[OneSidedStep | TwoSidedStep | WindowedStep | VendorReduction] = []
        origin, buffers = None, 1
        for i, step in enumerate(program.steps):
            before = strides if i == 0 else contiguous_strides(program.shape_before(step, position))
            given = program, step, position, before, world, dtype, device
            lowering = lower(program, step, position, world, reduction)
            if world.windows:
                self.steps.append(WindowedStep(*given, lowering=lowering))
                continue
            if world.one_sided:
                self.steps.append(OneSidedStep(*given))
                continue
            if lowering.how in ("reduce-scatter", "all-reduce"):
                self.steps.append(VendorReduction(*given, lowering=lowering))
                continue
            apart = i + 1 < len(program.steps) and may_leave_apart(step, program.steps[i + 1])
            bound = TwoSidedStep(*given, lowering=lowering, origin=origin, buffers=buffers, leave_apart=apart)
            self.steps.append(bound)
            origin, buffers = (bound.patchwork, buffers + 1) if apart else (None, 1)
        for earlier in self.steps[:-1]:
            earlier.last = False

    def summary(self) -> tuple[str, int, int | None]:
        """What was asked for; the bytes that this rank receives, and must receive at least."""
        at = self.program.ranks.index(self.position)
        bound = self.program.bytes_bound
        return title(self.program), self.program.bytes_received[at], None if bound is None else bound[at]

    def check(self, x: torch.Tensor) -> None:
        check_local_shape(self.program, self.position, x.shape)

    def run(self, x: torch.Tensor) -> Run:
        """Yields where ranks meet; returns the target shard. The input is only read."""
        if len(self.steps) == 1:
            return self.steps[0].run(x, self.token)
        return self._run_all(x)

    def _run_all(self, x: torch.Tensor) -> Run:
        between: torch.Tensor | list[torch.Tensor] = x
        for i, step in enumerate(self.steps):
            between = yield from step.run(between, self.token + 2 * i)  # type: ignore[arg-type]
        return between
